#pragma once

#include "fn-vgpu-device.h"

#include <atomic>
#include <set>
#include <string>
#include <thread>

// What ggml_backend_rpc_start_server lacks: it neither tells its port nor ever returns. A thread of its own finds the
// port, answers the control port, and at SIGTERM or SIGINT makes the server return by shutting its sockets down.

class fn_vgpu_control {
  public:
    // Call before any other thread exists: blocks the signals for all of them, and notes which descriptors were there
    // before the server's, so that a socket inherited from the parent is left alone.
    fn_vgpu_control(const fn_vgpu_options & options, fn_vgpu_device & device);
    ~fn_vgpu_control();

    fn_vgpu_control(const fn_vgpu_control &)             = delete;
    fn_vgpu_control & operator=(const fn_vgpu_control &) = delete;

    // Opens the control port and starts the thread. On false, `error` has the reason.
    bool start(std::string & error);

    // Ends the thread. Returns the signal that stopped the server, 0 when it ended by itself.
    int finish();

    bool was_listening() const { return port != 0; }

    // json with the accounting, process id and port
    std::string stats_json() const;

  private:
    void        run();
    void        look_for_port();
    void        stop(int signal);
    void        shut_down_sockets();
    void        serve_control_client();
    std::string answer(const std::string & line);

    const fn_vgpu_options & options;
    fn_vgpu_device &        device;

    std::set<int>    inherited;  // descriptors that are not the server's
    int              signal_fd    = -1;
    int              wake_fd      = -1;
    int              control_fd   = -1;
    int              control_port = 0;
    std::atomic<int> port{ 0 };  // of the RPC server, once it listens
    int              stop_signal = 0;
    std::thread      thread;
};

// Prints "fn:vgpu:<event> <json>" on stdout and flushes it. May be called from any thread.
void fn_vgpu_print(const char * event, const std::string & json);
