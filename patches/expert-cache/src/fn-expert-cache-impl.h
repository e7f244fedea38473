#pragma once

#include "fn-expert-cache.h"
#include "fn-expert-core.h"
#include "fn-expert-miss.h"
#include "fn-expert-slots.h"
#include "fn-expert-trace.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct llama_context;
struct llama_model;

struct fn_expert_cache;

// userdata of the graph's custom operations
struct fn_cache_layer {
    fn_expert_cache * cache = nullptr;
    int32_t           index = 0; // position in fn_expert_cache::layers
    int32_t           il    = 0; // layer of the model
    fn_expert_host    host;
};

struct fn_expert_cache {
    fn_expert_cache(llama_context & ctx, fn_expert_cache_params params);
    ~fn_expert_cache();

    // everything that can refuse; result and, when it is not OK, the reason printed as a marker
    int32_t init();

    static int32_t           attach(llama_context * ctx, fn_expert_cache_params params);
    static fn_expert_cache * of    (llama_context * ctx);

    // graph side
    int32_t  index_of(int32_t il) const { return il < (int32_t) index.size() ? index[il] : -1; }
    void     begin_step();

    int32_t quiesce();
    int32_t resume();
    int32_t release();
    int32_t restore();

    uint64_t cpu_rows() const { return miss ? miss->rows_computed() : 0; }

    llama_context & ctx;

    const fn_expert_cache_params params;

    int32_t n_expert = 0;
    int32_t n_used   = 0;
    int32_t n_spare  = 0;

    bool merge  = false; // per lane, in the order of the stock graph, for comparisons to the byte
    bool serial = false; // misses after the hits, for comparisons of time

    std::vector<fn_cache_layer> layers;
    std::vector<int32_t>        index; // layer of the model -> position in layers, or -1

    std::unique_ptr<fn_expert_slots>  slots;
    std::unique_ptr<fn_expert_core>   core;
    std::unique_ptr<fn_expert_miss>   miss;
    std::unique_ptr<fn_routing_trace> trace;
    std::unique_ptr<fn_routing_dump>  dump;

    // results of the layer that is being computed
    std::vector<int32_t> ids;
    std::vector<int32_t> slot_ids;
    std::vector<uint8_t> hits;
    std::vector<float>   weights;

    std::atomic<int32_t>  phase{FN_EXPERT_CACHE_READY};
    std::atomic<uint64_t> generation{0};
    std::atomic<uint64_t> n_steps{0};
    std::atomic<uint64_t> size_bytes{0};

    // of whoever else reads the slots, or has lent their memory: nothing of it is under way after the call; false: keep them
    std::function<bool()> may_release;

    int64_t n_trace = 0; // tokens that took their routing from the trace

private:
    int32_t refuse(int32_t result, const std::string & reason);
    int32_t find_layers();
    int32_t init_switches();
    int32_t init_memory();
    void    invalidate_graphs();
};
