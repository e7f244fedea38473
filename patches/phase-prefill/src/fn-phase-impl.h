#pragma once

#include "fn-phase.h"
#include "fn-phase-context.h"
#include "fn-phase-fault.h"

#include "fn-expert-cache.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct fn_phase {
    fn_phase(llama_context * ctx_tgt, llama_context * ctx_dft, fn_phase_params params);
    ~fn_phase();

    // empty when the contexts fit the parameters
    std::string refusal() const;

    int32_t begin(int32_t n_tokens);
    int32_t end();

    fn_expert_cache_stats cache_stats() const;

    const fn_phase_params params;

    fn_expert_cache * cache = nullptr;

    std::vector<fn_phase_context> contexts; // target, draft
    std::vector<uint32_t>         n_ubatch; // physical micro-batch of each outside of a prompt

    fn_phase_fault fault;

    std::atomic<int32_t> state{FN_PHASE_READY};

    mutable std::mutex mutex; // of what follows: the readers are in other threads
    fn_phase_stats     stats = {};
    std::string        check;
    std::string        detail;

private:
    using step = bool (fn_phase::*)();

    bool fail(const char * name, const std::string & why);

    bool check_ready();
    bool quiesce();
    bool release();
    bool reserve_prompt();
    bool check_released();
    bool restore();
    bool reserve_decode();
    bool check_restored();
    bool check_slots();
    bool check_hash();
    bool reserve(bool prompt);

    uint64_t hash() const;
    size_t   workspace_bytes() const;
    void     mark(const char * event, const std::string & json) const;

    // runs a step and adds its time; false when it failed
    bool timed(step step, double & ms);

    uint64_t n_begin    = 0; // begins tried
    uint64_t capacity   = 0; // as configured
    uint64_t size_bytes = 0; // of the slots, as configured
    uint64_t generation = 0; // of the cache, which nobody else may move in between
    uint64_t hash_before = 0;
    size_t   workspace_decode = 0; // bytes before the last begin
    size_t   workspace_first  = 0; // bytes after the first end
    int32_t  n_prompt   = 0;
};
