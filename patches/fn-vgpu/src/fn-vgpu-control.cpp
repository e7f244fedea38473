#include "fn-vgpu-control.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// How often the thread looks: for the server's port after the start, for sockets to shut down after a signal.
static const int FN_VGPU_TICK_MS = 10;

// A stop that takes longer than this is not clean any more.
static const int FN_VGPU_STOP_MS = 10000;

// A control client that sends no line for this long is dropped: the same thread watches for signals.
static const int FN_VGPU_LINE_MS = 1000;

static const size_t FN_VGPU_LINE_MAX = 256;

void fn_vgpu_print(const char * event, const std::string & json) {
    printf("fn:vgpu:%s %s\n", event, json.c_str());
    fflush(stdout);
}

static std::set<int> fn_vgpu_open_fds() {
    std::set<int> fds;
    DIR *         dir = opendir("/proc/self/fd");
    if (dir == NULL) {
        return fds;
    }
    while (const dirent * entry = readdir(dir)) {
        if (entry->d_name[0] != '.' && atoi(entry->d_name) != dirfd(dir)) {
            fds.insert(atoi(entry->d_name));
        }
    }
    closedir(dir);
    return fds;
}

// The port of a listening IPv4 socket, 0 for anything else.
static int fn_vgpu_listening_port(int fd) {
    int       listening = 0;
    socklen_t size      = sizeof(listening);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening == 0) {
        return 0;
    }
    sockaddr_in address = {};
    size                = sizeof(address);
    if (getsockname(fd, (sockaddr *) &address, &size) != 0 || address.sin_family != AF_INET) {
        return 0;
    }
    return ntohs(address.sin_port);
}

fn_vgpu_control::fn_vgpu_control(const fn_vgpu_options & options, fn_vgpu_device & device) :
    options(options),
    device(device) {
    // a client that is gone is an error of send(), not the end of this process
    signal(SIGPIPE, SIG_IGN);

    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    wake_fd   = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

fn_vgpu_control::~fn_vgpu_control() {
    finish();
    for (const int fd : { signal_fd, wake_fd, control_fd }) {
        if (fd >= 0) {
            close(fd);
        }
    }
}

bool fn_vgpu_control::start(std::string & error) {
    if (signal_fd < 0 || wake_fd < 0) {
        error = std::string("cannot watch for signals: ") + strerror(errno);
        return false;
    }
    sockaddr_in address = {};
    address.sin_family  = AF_INET;
    address.sin_port    = htons((uint16_t) options.control_port);
    inet_pton(AF_INET, options.host.c_str(), &address.sin_addr);
    const int yes = 1;

    control_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (control_fd < 0 || setsockopt(control_fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
        bind(control_fd, (const sockaddr *) &address, sizeof(address)) != 0 || listen(control_fd, 16) != 0) {
        error = "cannot listen for control lines on " + options.host + ":" + std::to_string(options.control_port) +
                ": " + strerror(errno);
        return false;
    }
    control_port = fn_vgpu_listening_port(control_fd);
    inherited    = fn_vgpu_open_fds();
    thread       = std::thread([this] { run(); });
    return true;
}

int fn_vgpu_control::finish() {
    if (thread.joinable()) {
        const uint64_t one = 1;
        if (write(wake_fd, &one, sizeof(one)) != (ssize_t) sizeof(one)) {
            perror("fn-vgpu: eventfd");
        }
        thread.join();
    }
    return stop_signal;
}

void fn_vgpu_control::run() {
    enum { WAKE, SIGNAL, CONTROL };

    pollfd fds[] = {
        { wake_fd,    POLLIN, 0 },
        { signal_fd,  POLLIN, 0 },
        { control_fd, POLLIN, 0 },
    };
    int stopping_ms = 0;
    while (true) {
        const bool waiting = port == 0 || stop_signal != 0;
        poll(fds, sizeof(fds) / sizeof(fds[0]), waiting ? FN_VGPU_TICK_MS : -1);
        if (fds[WAKE].revents != 0) {
            return;
        }
        if (port == 0) {
            look_for_port();
        }
        if (fds[SIGNAL].revents != 0) {
            signalfd_siginfo info = {};
            if (read(signal_fd, &info, sizeof(info)) == (ssize_t) sizeof(info)) {
                stop((int) info.ssi_signo);
            }
        }
        if (fds[CONTROL].revents != 0) {
            serve_control_client();
        }
        if (stop_signal != 0) {
            // again and again: a client may have been accepted while the sockets were listed
            shut_down_sockets();
            stopping_ms += FN_VGPU_TICK_MS;
            if (stopping_ms > FN_VGPU_STOP_MS) {
                fprintf(stderr, "fn-vgpu: error: the RPC server did not end within %d s\n", FN_VGPU_STOP_MS / 1000);
                _exit(1);
            }
        }
    }
}

void fn_vgpu_control::look_for_port() {
    for (const int fd : fn_vgpu_open_fds()) {
        const int found = inherited.count(fd) > 0 ? 0 : fn_vgpu_listening_port(fd);
        if (found != 0) {
            port = found;
            fn_vgpu_print("listening", "{\"name\":\"" + options.name + "\",\"pid\":" + std::to_string(getpid()) +
                                           ",\"host\":\"" + options.host + "\",\"port\":" + std::to_string(found) +
                                           ",\"control_port\":" + std::to_string(control_port) +
                                           ",\"memory_bytes\":" + std::to_string(device.stats().memory_bytes) + "}");
            return;
        }
    }
}

void fn_vgpu_control::stop(int signal) {
    if (stop_signal != 0) {
        _exit(128 + signal);  // asked twice: at once, clean or not
    }
    stop_signal = signal;
    // first the client, then the device: nobody may read what a graph that was cut short left behind
    shut_down_sockets();
    device.stop();
}

void fn_vgpu_control::shut_down_sockets() {
    for (const int fd : fn_vgpu_open_fds()) {
        if (inherited.count(fd) == 0) {
            shutdown(fd, SHUT_RDWR);  // fails on what is not a socket, with no effect
        }
    }
}

std::string fn_vgpu_control::stats_json() const {
    std::string json = device.stats_json();
    json.pop_back();
    return json + ",\"pid\":" + std::to_string(getpid()) + ",\"port\":" + std::to_string(port) + "}";
}

std::string fn_vgpu_control::answer(const std::string & line) {
    const size_t      space   = line.find(' ');
    const std::string command = line.substr(0, space);
    const std::string value   = space == std::string::npos ? "" : line.substr(space + 1);

    fn_vgpu_fault fault;
    size_t        bytes = 0;
    if (command == "fault" && fn_vgpu_parse_fault(value, fault)) {
        device.arm(fault);
    } else if (command == "memory" && fn_vgpu_parse_size(value, bytes) && bytes > 0) {
        device.set_memory(bytes);
    } else if (line != "stats") {
        return "{\"error\":\"expected one line: stats, fault EVENT:N or memory SIZE\"}";
    }
    return stats_json();
}

void fn_vgpu_control::serve_control_client() {
    const int fd = accept4(control_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        return;
    }
    std::string line;
    while (line.find('\n') == std::string::npos && line.size() < FN_VGPU_LINE_MAX) {
        pollfd        readable = { fd, POLLIN, 0 };
        char          part[FN_VGPU_LINE_MAX];
        const ssize_t n = poll(&readable, 1, FN_VGPU_LINE_MS) == 1 ? recv(fd, part, sizeof(part), 0) : 0;
        if (n <= 0) {
            break;
        }
        line.append(part, (size_t) n);
    }
    line                    = line.substr(0, line.find_first_of("\r\n"));
    const std::string reply = answer(line) + "\n";
    // a reply of a few hundred bytes fits the socket's buffer: this cannot block
    if (send(fd, reply.data(), reply.size(), MSG_NOSIGNAL) != (ssize_t) reply.size()) {
        fprintf(stderr, "fn-vgpu: a control client left before its answer\n");
    }
    close(fd);
}
