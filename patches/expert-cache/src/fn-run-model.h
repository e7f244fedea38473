#pragma once

// What the drivers fn-*-run have in common: options, devices and model. The arms, and what they measure, are their own.

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct fn_run_options {
    const char * program;
    std::string  model;
    std::string  rpc;             // endpoints, comma separated
    std::string  experts = "CPU"; // buffer type of the experts, "device" = where the layer is
    std::string  split;           // proportions of the devices, comma separated
    int32_t      n_ctx     = 4096;
    int32_t      n_batch   = 2048;
    int32_t      n_ubatch  = 512;
    int32_t      n_threads = 1;
    bool         verbose   = false;
    llama_load_mode load_mode = LLAMA_LOAD_MODE_MMAP;
    std::vector<std::string> arms;
};

[[noreturn]] inline void fn_run_fail(const char * program, const std::string & reason) {
    fprintf(stderr, "%s: %s\n", program, reason.c_str());
    exit(2);
}

inline std::vector<std::string> fn_run_split(const std::string & s, char sep) {
    std::vector<std::string> parts;
    for (size_t start = 0; start <= s.size(); ) {
        const size_t end = std::min(s.find(sep, start), s.size());
        if (end > start) {
            parts.push_back(s.substr(start, end - start));
        }
        start = end + 1;
    }
    return parts;
}

// own(arg, value): sets an option of the one driver, value() is the next argument; false: it has no such option
template <typename T> void fn_run_parse(fn_run_options & o, int argc, char ** argv, T own) {
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        auto value = [&]() -> std::string {
            if (i + 1 >= argc) {
                fn_run_fail(o.program, arg + " needs a value");
            }
            return argv[++i];
        };
        if      (arg == "-m")         { o.model     = value(); }
        else if (arg == "--rpc")      { o.rpc       = value(); }
        else if (arg == "--experts")  { o.experts   = value(); }
        else if (arg == "--split")    { o.split     = value(); }
        else if (arg == "--ctx")      { o.n_ctx     = std::stoi(value()); }
        else if (arg == "--batch")    { o.n_batch   = std::stoi(value()); }
        else if (arg == "--ubatch")   { o.n_ubatch  = std::stoi(value()); }
        else if (arg == "--threads")  { o.n_threads = std::stoi(value()); }
        else if (arg == "--no-mmap")  { o.load_mode = LLAMA_LOAD_MODE_NONE; }
        else if (arg == "--verbose")  { o.verbose   = true; }
        else if (arg == "--arm")      { o.arms.push_back(value()); }
        else if (!own(arg, value))    { fn_run_fail(o.program, "unknown argument " + arg); }
    }
    if (o.model.empty() || o.arms.empty()) {
        fn_run_fail(o.program, "-m and at least one --arm are needed");
    }
}

inline ggml_backend_buffer_type_t fn_run_buffer_type(const fn_run_options & o) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        for (ggml_backend_buffer_type_t buft : { ggml_backend_dev_buffer_type(dev), ggml_backend_dev_host_buffer_type(dev) }) {
            if (buft && o.experts == ggml_backend_buft_name(buft)) {
                return buft;
            }
        }
    }
    fn_run_fail(o.program, "no buffer type " + o.experts);
}

// backends and RPC devices; without --verbose errors alone are logged
inline void fn_run_start(const fn_run_options & o) {
    llama_backend_init();
    ggml_backend_load_all();
    if (!o.verbose) {
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                fputs(text, stderr);
            }
        }, nullptr);
    }
    if (o.rpc.empty()) {
        return;
    }
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    if (!reg) {
        fn_run_fail(o.program, "this build has no RPC backend");
    }
    typedef ggml_backend_reg_t (*add_server_fn)(const char * endpoint);
    auto add_server = (add_server_fn) ggml_backend_reg_get_proc_address(reg, "ggml_backend_rpc_add_server");
    for (const std::string & endpoint : fn_run_split(o.rpc, ',')) {
        ggml_backend_register(add_server(endpoint.c_str()));
    }
}

// all layers on devices, the experts in --experts
inline llama_model * fn_run_load(const fn_run_options & o) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers    = 99;
    params.use_extra_bufts = false; // repacked experts are not host memory
    params.load_mode       = o.load_mode;

    std::vector<llama_model_tensor_buft_override> overrides;
    if (o.experts != "device") {
        overrides.push_back({ "ffn_(gate|up|down)_exps", fn_run_buffer_type(o) });
    }
    overrides.push_back({ nullptr, nullptr });
    params.tensor_buft_overrides = overrides.data();

    std::vector<float> split(llama_max_devices(), 0.0f);
    const std::vector<std::string> parts = fn_run_split(o.split, ',');
    for (size_t i = 0; i < parts.size() && i < split.size(); ++i) {
        split[i] = std::stof(parts[i]);
    }
    params.tensor_split = parts.empty() ? nullptr : split.data();

    llama_model * model = llama_model_load_from_file(o.model.c_str(), params);
    if (!model) {
        fn_run_fail(o.program, "cannot load " + o.model);
    }
    return model;
}

// one sequence
inline llama_context_params fn_run_context(const fn_run_options & o) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = o.n_ctx;
    params.n_batch         = o.n_batch;
    params.n_ubatch        = o.n_ubatch;
    params.n_threads       = o.n_threads;
    params.n_threads_batch = o.n_threads;
    params.n_seq_max       = 1;
    return params;
}

// the arms one after the other, on one model; run(arm, model) returns an exit status
template <typename T> int fn_run_arms(const fn_run_options & o, llama_model * model, T run) {
    int result = 0;
    for (const std::string & arm : o.arms) {
        result = std::max(result, run(arm, model));
    }
    llama_model_free(model);
    llama_backend_free();
    return result;
}
