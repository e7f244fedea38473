#include "fn-vgpu-options.h"

#include <arpa/inet.h>

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <limits>

static const char * const FN_VGPU_EVENT_NAMES[] = { "alloc", "abort", "hang", "upload-corrupt" };

const char * fn_vgpu_event_name(fn_vgpu_event event) {
    return FN_VGPU_EVENT_NAMES[event];
}

const char * fn_vgpu_help() {
    return R"(usage: fn-vgpu [options]

A virtual GPU: one device of the RPC backend, computed on the CPU, with a memory limit, accounting, delays and faults.
llama-server reaches it with --rpc HOST:PORT. For tests and for machines without a GPU.

  --port PORT             port for the RPC client; 0 (default) picks a free one
  --control-port PORT     port for the control lines below; 0 (default) picks a free one
  --host ADDRESS          127.0.0.1 (default), another 127.x.x.x or localhost. Nothing else is accepted: the RPC protocol
                          has no authentication, whoever connects reads and writes this process's memory
  --name NAME             name in this program's own lines (letters, digits, . _ -); default vgpu. The client counts its
                          devices itself: RPC0, RPC1, ...
  --memory SIZE           the device's memory: bytes, or a number with KiB, MiB or GiB; 0 (default): what the host has.
                          free = memory - allocated. An allocation over it fails, as on a real device
  --threads N             threads that compute; default 1. Keep threads x processes within the cores
  --upload-delay-us N     each write to the device takes at least N microseconds
  --upload-mib-s N        and at least its bytes / N MiB/s
  --compute-delay-us N    each graph takes N microseconds longer
  --fault EVENT:N         at the N-th event (1 = the first), once; may be given more than once:
                            alloc:N           the N-th allocation fails
                            abort:N           the process kills itself when the N-th graph arrives
                            hang:N            the N-th graph is never finished
                            upload-corrupt:N  one byte of the N-th write is inverted
  --parent-death on|off   on (default): be killed when the thread that started this process ends, however it ends
  --help                  this text

Lines on stdout, each {json}:
  fn:vgpu:listening {"name","pid","host","port","control_port","memory_bytes"}    ready for a client
  fn:vgpu:fault     {"name","event"}                                              a fault happened on purpose
  fn:vgpu:refused   {"name","asked_bytes","free_bytes"}                           an allocation over the limit
  fn:vgpu:stopped   {the accounting}                                              after SIGTERM or SIGINT, exit code 0

Control port: send one line, read one line of JSON with the accounting, or with {"error"}:
  stats                   change nothing
  fault EVENT:N           arm a fault; N counts from now
  memory SIZE             set the device's memory (above 0); what is allocated stays

Limits:
  one client at a time, a second one waits until the first is gone; commands are executed in the order sent;
  the client aborts when it loses the device; host weights are never offloaded to it;
  memory that the CPU backend needs while it computes (its work buffer) is not counted; IPv4 only

Exit code: 0 stopped by a signal, 1 cannot serve, 2 wrong options.
)";
}

static bool fn_vgpu_parse_u64(const std::string & text, uint64_t max, uint64_t & value) {
    if (text.empty() || text.size() > 19) {
        return false;
    }
    value = 0;
    for (const char c : text) {
        if (c < '0' || c > '9') {
            return false;
        }
        value = value * 10 + (uint64_t) (c - '0');
    }
    return value <= max;
}

bool fn_vgpu_parse_size(const std::string & text, size_t & bytes) {
    static const struct {
        const char * suffix;
        double       factor;
    } units[] = {
        { "KiB", 1024.0                   },
        { "MiB", 1024.0 * 1024.0          },
        { "GiB", 1024.0 * 1024.0 * 1024.0 },
    };

    uint64_t whole = 0;
    if (fn_vgpu_parse_u64(text, std::numeric_limits<size_t>::max(), whole)) {
        bytes = (size_t) whole;
        return true;
    }
    for (const auto & unit : units) {
        const std::string suffix = unit.suffix;
        if (text.size() <= suffix.size() || text.compare(text.size() - suffix.size(), suffix.size(), suffix) != 0) {
            continue;
        }
        const std::string number = text.substr(0, text.size() - suffix.size());
        if (number.find_first_not_of("0123456789.") != std::string::npos) {
            return false;
        }
        char *       end   = nullptr;
        const double value = strtod(number.c_str(), &end);
        if (end != number.c_str() + number.size() || !std::isfinite(value) || value * unit.factor > 1e18) {
            return false;
        }
        bytes = (size_t) (value * unit.factor);
        return true;
    }
    return false;
}

bool fn_vgpu_parse_fault(const std::string & text, fn_vgpu_fault & fault) {
    const size_t colon = text.find(':');
    if (colon == std::string::npos) {
        return false;
    }
    const std::string name = text.substr(0, colon);
    if (!fn_vgpu_parse_u64(text.substr(colon + 1), std::numeric_limits<uint64_t>::max(), fault.n) || fault.n == 0) {
        return false;
    }
    for (size_t i = 0; i < sizeof(FN_VGPU_EVENT_NAMES) / sizeof(FN_VGPU_EVENT_NAMES[0]); i++) {
        if (name == FN_VGPU_EVENT_NAMES[i]) {
            fault.event = (fn_vgpu_event) i;
            return true;
        }
    }
    return false;
}

static bool fn_vgpu_parse_host(const std::string & text, std::string & host) {
    host = text == "localhost" ? "127.0.0.1" : text;
    in_addr address;
    return inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

static bool fn_vgpu_parse_name(const std::string & text) {
    for (const char c : text) {
        if (!isalnum((unsigned char) c) && c != '.' && c != '_' && c != '-') {
            return false;
        }
    }
    return !text.empty() && text.size() <= 64;
}

// Sets one option. Returns what was expected instead when the value is wrong, "?" when there is no such option.
static std::string fn_vgpu_options_set(fn_vgpu_options & options, const std::string & key, const std::string & value) {
    // an hour: longer is a mistake in the unit
    const uint64_t max_delay_us = 3600ull * 1000 * 1000;

    uint64_t number = 0;
    if (key == "--port" || key == "--control-port") {
        if (!fn_vgpu_parse_u64(value, 65535, number)) {
            return "a port from 0 to 65535";
        }
        (key == "--port" ? options.port : options.control_port) = (int) number;
    } else if (key == "--host") {
        if (!fn_vgpu_parse_host(value, options.host)) {
            return "a loopback address (127.x.x.x or localhost): the protocol has no authentication, whoever connects "
                   "reads and writes this process's memory";
        }
    } else if (key == "--name") {
        if (!fn_vgpu_parse_name(value)) {
            return "1 to 64 letters, digits, '.', '_' or '-'";
        }
        options.name = value;
    } else if (key == "--memory") {
        if (!fn_vgpu_parse_size(value, options.memory_bytes)) {
            return "a size: bytes, or a number with KiB, MiB or GiB";
        }
    } else if (key == "--threads") {
        if (!fn_vgpu_parse_u64(value, 512, number) || number == 0) {
            return "a number from 1 to 512";
        }
        options.n_threads = (int) number;
    } else if (key == "--upload-delay-us" || key == "--compute-delay-us") {
        if (!fn_vgpu_parse_u64(value, max_delay_us, number)) {
            return "microseconds, at most an hour";
        }
        (key == "--upload-delay-us" ? options.upload_delay_us : options.compute_delay_us) = number;
    } else if (key == "--upload-mib-s") {
        if (!fn_vgpu_parse_u64(value, 1ull << 30, number) || number == 0) {
            return "MiB per second, 1 or more";
        }
        options.upload_mib_s = number;
    } else if (key == "--fault") {
        fn_vgpu_fault fault;
        if (!fn_vgpu_parse_fault(value, fault)) {
            return "alloc:N, abort:N, hang:N or upload-corrupt:N with N from 1";
        }
        options.faults.push_back(fault);
    } else if (key == "--parent-death") {
        if (value != "on" && value != "off") {
            return "on or off";
        }
        options.parent_death = value == "on";
    } else {
        return "?";
    }
    return "";
}

bool fn_vgpu_options_parse(int argc, const char * const * argv, fn_vgpu_options & options, std::string & error) {
    for (int i = 1; i < argc; i++) {
        std::string key = argv[i];
        std::string value;
        if (key == "--help") {
            options.help = true;
            continue;
        }
        const size_t equals    = key.find('=');
        bool         has_value = equals != std::string::npos;
        if (has_value) {
            value = key.substr(equals + 1);
            key   = key.substr(0, equals);
        } else if (i + 1 < argc) {
            has_value = true;
            value     = argv[i + 1];
            i++;
        }
        const std::string expected = fn_vgpu_options_set(options, key, value);
        if (expected == "?") {
            error = "no such option: " + key;
            return false;
        }
        if (!has_value) {
            error = key + ": a value is missing";
            return false;
        }
        if (!expected.empty()) {
            error = key + " '" + value + "': expected " + expected;
            return false;
        }
    }
    return true;
}
