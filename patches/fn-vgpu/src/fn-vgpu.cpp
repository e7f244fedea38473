// A virtual GPU: see fn_vgpu_help() for what it does and README.md for why.

#include "fn-vgpu-control.h"
#include "fn-vgpu-device.h"
#include "fn-vgpu-options.h"
#include "ggml-rpc.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

static int fn_vgpu_fail(int code, const std::string & reason) {
    fprintf(stderr, "fn-vgpu: error: %s\n", reason.c_str());
    return code;
}

// The kernel kills this process when the thread that started it ends: also while it hangs or is stopped, and with no
// help from the parent.
static bool fn_vgpu_die_with_parent(pid_t parent) {
    // a parent that was gone before the call sends no signal any more
    return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == parent;
}

int main(int argc, char ** argv) {
    const pid_t parent = getppid();

    fn_vgpu_options options;
    std::string     error;
    if (!fn_vgpu_options_parse(argc, argv, options, error)) {
        return fn_vgpu_fail(2, error + " (see --help)");
    }
    if (options.help) {
        fputs(fn_vgpu_help(), stdout);
        return 0;
    }
    if (options.parent_death && !fn_vgpu_die_with_parent(parent)) {
        return fn_vgpu_fail(1, "the parent process is gone (see --parent-death)");
    }

    fn_vgpu_device  device(options, fn_vgpu_print);
    fn_vgpu_control control(options, device);
    if (!control.start(error)) {
        return fn_vgpu_fail(1, error);
    }

    ggml_backend_dev_t devices[] = { device.dev() };
    const std::string  endpoint  = options.host + ":" + std::to_string(options.port);
    ggml_backend_rpc_start_server(endpoint.c_str(), /* cache_dir */ NULL, (size_t) options.n_threads, 1, devices);

    // the server has ended and freed its client's buffers; its backend is freed with the device
    const int signal = control.finish();
    if (signal == 0) {
        return fn_vgpu_fail(1, control.was_listening() ? "the RPC server ended by itself" :
                                                         "cannot listen on " + endpoint + ": is the port in use?");
    }
    fn_vgpu_print("stopped", control.stats_json());
    return 0;
}
