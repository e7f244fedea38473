#pragma once

#include "fn-lean.h"
#include "fn-lean-ring.h"
#include "fn-lean-stage.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

struct llama_context;

struct fn_lean;

// userdata of the graph's custom operation: one layer in one place
struct fn_lean_stop {
    fn_lean * lean;
    int32_t   layer;
    int32_t   place;
};

// one layer of a graph
struct fn_lean_use {
    int32_t layer;
    int32_t place;
    bool    whole;
};

struct fn_lean_device {
    std::unique_ptr<fn_lean_stage> stage;
    std::unique_ptr<fn_lean_ring>  ring;
    ggml_backend_t compute = nullptr; // the context's backend, not ours
    std::vector<int32_t> layers;
    std::vector<uint8_t> reading;     // experts of the layer that is being read, for FN_LEAN_VERIFY; empty = all

    std::vector<int32_t> lent_layers; // whose slots are the staging memory
    ggml_backend_buffer_t lent_buffer = nullptr;
    uint8_t *             lent_base   = nullptr;

    std::atomic<uint64_t> wait_us{0};
    std::atomic<uint64_t> n_run  {0};
    std::atomic<uint64_t> n_ready{0};

    size_t free_bytes = 0; // after everything was allocated
};

// of one prompt: consecutive passes
struct fn_lean_prompt {
    uint64_t n_passes = 0;
    uint64_t n_tokens = 0;
    int64_t  t_begin  = 0;
    uint64_t wait_us = 0, compute_us = 0, upload_us = 0, bytes_uploaded = 0, bytes_copied = 0; // counters at its begin
};

void fn_lean_print_attached(const fn_lean & lean);

struct fn_lean {
    fn_lean(llama_context & ctx, int32_t n_chunk);
    ~fn_lean();

    int32_t init();

    static int32_t   attach(llama_context * ctx, int32_t n_chunk);
    static fn_lean * of    (llama_context * ctx);

    // graph side
    int32_t index_of(int32_t il) const { return il < (int32_t) index.size() ? index[il] : -1; }
    bool    takes(int64_t n_tokens) const; // such a micro-batch gets its experts from staging memory
    bool    whole(int64_t n_rows)   const; // so many rows use nearly every expert
    void    begin_pass(const std::vector<fn_lean_use> & uses, int64_t n_tokens);
    void    reach(const fn_lean_stop & stop, const int32_t * ids, int64_t n_ids, int64_t t_reached);

    llama_context & ctx;

    const int32_t requested; // tokens, or FN_LEAN_AUTO

    int32_t n_chunk    = 0;
    int32_t n_ring     = 2;
    int32_t min_tokens = 32; // from here on the stock scheduler uploads experts too
    int32_t n_expert   = 0;
    int32_t n_used     = 0;
    bool    verify     = false; // compare what is staged with host memory, when it is handed over and when it was read
    bool    report     = false; // a marker per prompt
    int32_t lend       = -1;    // FN_LEAN_LEND: staging memory from the cache's slots. 0 never, 1 always, -1 when needed
    bool    lending    = false; // it is
    bool    lent       = false; // and the slots are not slots now

    fn_lean_switches switches;

    std::vector<std::unique_ptr<fn_lean_layer>>  layers;
    std::vector<std::unique_ptr<fn_lean_stop>>   stops; // [layer*n_ring + place]
    std::vector<int32_t>                         index; // layer of the model -> position in layers, or -1
    std::vector<std::unique_ptr<fn_lean_device>> devices;

    std::atomic<uint64_t> n_passes  {0};
    std::atomic<uint64_t> n_tokens  {0};
    std::atomic<uint64_t> n_plain   {0};
    std::atomic<uint64_t> n_reserves{0};
    std::atomic<uint64_t> n_verified{0};
    std::atomic<uint64_t> compute_us{0};
    std::atomic<uint64_t> n_refills {0};
    std::atomic<uint64_t> refill_us {0};

    std::string choice; // why this chunk, as JSON

private:
    struct FILE_closer { void operator()(FILE * f) const { fclose(f); } };

    // of fn_lean_stage; data: the fn_lean
    static void slot_map(void * data, int32_t cache_index, std::vector<int32_t> & slot_of);

    int32_t refuse(int32_t result, const std::string & reason);
    int32_t read_switches();
    int32_t find_layers();
    void    make_rings();
    void    free_workspace();
    void    find_lendable();
    bool    set_memory(bool borrowed, std::string & why);
    int32_t choose_chunk();
    bool    try_chunk(int32_t n, bool borrowed, size_t margin, std::string & why);
    bool    start(std::string & why);
    void    guard_slots();
    void    give_back();
    size_t  margin_bytes(int32_t n) const;
    void    check(fn_lean_device & device, int32_t layer, int32_t place, const char * when);
    void    count_reserves();
    void    write_timeline(fn_lean_device & device);
    void    end_prompt();

    std::vector<size_t>  workspace; // per backend
    std::vector<uint8_t> wanted;    // experts of the layer that is reached
    int64_t              t_released = 0;
    int64_t              n_tokens_last = 0; // of the micro-batch before
    fn_lean_prompt       prompt;
    std::unique_ptr<FILE, FILE_closer> timeline;
};
