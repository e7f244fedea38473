#pragma once

#include "ggml-backend.h"

#include <cstdint>
#include <memory>

// What a llama_context has to know about the times of its prompts.

struct fn_prefill_times;
struct llama_cparams;
struct llama_model;
struct llama_ubatch;

struct fn_prefill_times_deleter {
    void operator()(fn_prefill_times * times) const;
};

using fn_prefill_times_ptr = std::unique_ptr<fn_prefill_times, fn_prefill_times_deleter>;

// null without FN_PREFILL_TIMES=1, for a draft context, and where the evaluation callback is somebody else's;
// throws std::runtime_error for any value but 0 and 1
fn_prefill_times_ptr fn_prefill_times_make(const llama_model & model, const llama_cparams & cparams);

// One micro-batch, from its construction to its end. Does nothing where times is null.
class fn_prefill_timer {
public:
    fn_prefill_timer(fn_prefill_times * times, const llama_ubatch & ubatch);
    ~fn_prefill_timer();

    // the graph is about to be computed
    void watch(ggml_backend_sched_t sched, ggml_cgraph * graph);

    fn_prefill_timer(const fn_prefill_timer &) = delete;
    fn_prefill_timer & operator=(const fn_prefill_timer &) = delete;

private:
    fn_prefill_times *   times;
    ggml_backend_sched_t sched = nullptr;
};
