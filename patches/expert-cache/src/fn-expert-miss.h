#pragma once

#include "fn-expert-rows.h"
#include "fn-task-pool.h"

#include <atomic>
#include <cstdint>
#include <vector>

// The three matrices of a layer's experts in host memory.
struct fn_expert_host {
    fn_expert_mat gate;
    fn_expert_mat up;
    fn_expert_mat down;
};

// Computes the lanes of one layer that have no slot, from host memory, on its own threads: start() between the
// lookup and the device's part, finish() after it. Every weight row is read once per batch.
class fn_expert_miss {
public:
    fn_expert_miss(int32_t n_workers, int32_t spin_us);

    // x: n_embd floats per token, stride x_stride floats; ids, hits: [n_tokens][n_used]. Everything is copied.
    // deferred: nothing runs before finish() (the switch that compares overlapped with serial)
    void start(const fn_expert_host & host, const float * x, int64_t x_stride,
               const int32_t * ids, const uint8_t * hits, int32_t n_used, int32_t n_tokens, bool deferred);

    // waits; results are valid until the next start()
    void finish();

    int32_t n_rows() const { return (int32_t) rows.size(); }

    // for row i in 0..n_rows-1, ordered by token and lane
    int32_t       row_lane(int32_t i) const { return rows[i].lane; } // token*n_used + lane
    const float * row_out (int32_t i) const { return out.data() + (size_t) i*n_embd; }

    // expert rows computed since the start: has to equal the misses
    uint64_t rows_computed() const { return n_computed.load(); }

private:
    struct row_desc {
        int32_t lane;
        int32_t token;
        int32_t expert;
    };

    // the rows of one expert
    struct group_desc {
        int32_t expert;
        int32_t first; // in order[]
        int32_t count;
    };

    static void run_task(void * ctx, int32_t i);

    void run_gate_up(int32_t group, int32_t chunk);
    void run_down   (int32_t group, int32_t chunk);
    void activate   (int32_t group);

    fn_task_pool pool;

    const fn_expert_host * host = nullptr;

    int64_t n_embd = 0;
    int64_t n_ff   = 0;

    std::vector<row_desc>   rows;
    std::vector<int32_t>    order;  // row indices, grouped by expert
    std::vector<group_desc> groups;

    int32_t n_chunks_up   = 0; // per group
    int32_t n_chunks_down = 0;

    // [n_tokens] inputs in the type of the gate and up matrices; [n_rows] the others
    std::vector<uint8_t> x_gate;
    std::vector<uint8_t> x_up;
    std::vector<uint8_t> x_down;
    std::vector<float>   gate;
    std::vector<float>   up;
    std::vector<float>   out;

    size_t nb_gate = 0;
    size_t nb_up   = 0;
    size_t nb_down = 0;

    struct group_state {
        std::atomic<int32_t> chunks_left{0};
        std::atomic<bool>    ready{false};
    };
    std::vector<group_state> state;

    bool    waiting  = false; // started and not finished
    bool    deferred = false;
    int32_t n_tasks  = 0;

    std::atomic<uint64_t> n_computed{0};
};
