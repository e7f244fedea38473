#pragma once

#include "fn-lean-balance.h"
#include "fn-lean-ring.h"

#include "ggml-cpp.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// A layer's experts: gate, up, down, each [n_in, n_out, n_expert].
struct fn_lean_layer {
    const ggml_tensor * src[3]  = {};      // in host memory
    const ggml_tensor * slots[3] = {};     // of the expert cache, or null
    int32_t             cache_index = -1;  // its number in the expert cache
    int32_t             il     = 0;        // layer of the model
    int32_t             device = -1;
    int32_t             own_place = -1;    // where every layer of the device has one
    std::vector<ggml_tensor *> dst[3];     // per place of the ring
    size_t              pad[3] = {};       // bytes after a staging tensor that kernels may read
};

struct fn_lean_job_times {
    int32_t  layer;
    int32_t  place;
    int64_t  t_submit;
    int64_t  t_begin;
    int64_t  t_end;
    uint64_t bytes_uploaded;
    uint64_t bytes_copied;
};

struct fn_lean_switches {
    int32_t late_ms = -1; // FN_LEAN_LATE_MS: poison the place, wait so long, and only then copy. -1: off
};

// The staging memory of one device, and the thread that fills it over a stream of its own.
class fn_lean_stage : public fn_lean_port {
public:
    // slot_of(cache_index, slots): fills [n_expert] with the slot that holds the expert, or -1
    using slot_map_t = void (*)(void * data, int32_t cache_index, std::vector<int32_t> & slot_of);

    fn_lean_stage(ggml_backend_dev_t dev, int32_t n_ring, const fn_lean_switches & switches);
    ~fn_lean_stage() override;

    void add(int32_t layer, fn_lean_layer * l);

    // bytes of the whole ring
    size_t need_bytes() const;

    // memory of its own. false: the device refuses
    bool alloc();
    // memory that belongs to somebody else: need_bytes() from base on
    bool borrow(ggml_backend_buffer_t from, uint8_t * base);
    void free();

    // after alloc() or borrow(). false: the device refuses
    bool start();

    uint64_t submit(int32_t layer, int32_t place, const uint8_t * experts, bool ahead) override;
    bool     wait  (uint64_t serial) override;

    // no copy that reads a slot of the expert cache is left
    void wait_slots() { wait(last_slot_serial); }
    // no copy at all
    void wait_all() { wait(next_serial - 1); }

    // all slots of the layer's part of the cache written anew, experts from host memory and zeros: returns when they are
    // in place. Only with no copy left. The bytes that were uploaded.
    uint64_t refill(int32_t layer, const std::vector<int32_t> & expert_in);

    // bytes of the experts in the place that differ from host memory; experts: nullptr = all
    size_t n_different(int32_t layer, int32_t place, const uint8_t * experts, uint64_t & n_verified) const;

    // times of the copies that are done, and forgets them
    std::vector<fn_lean_job_times> take_times();

    ggml_backend_dev_t dev;

    slot_map_t slot_map      = nullptr;
    void *     slot_map_data = nullptr;

    std::atomic<uint64_t> bytes_uploaded{0};
    std::atomic<uint64_t> bytes_copied  {0};
    std::atomic<uint64_t> upload_us     {0};

    size_t size_bytes = 0; // of its own
    size_t lent_bytes = 0; // of somebody else's

private:
    // of all three tensors of a layer
    struct copy {
        int32_t expert;
        int32_t n_experts; // a run of experts from host memory, or 1
        int32_t slot;      // -1: from host memory
        bool    pad;       // a bit of the next expert as well
    };
    struct job {
        uint64_t serial;
        int32_t  layer;
        int32_t  place;
        int64_t  t_submit;
        std::vector<copy> copies;
    };

    void run();
    void execute(const job & j);
    void upload(ggml_tensor * dst, const void * data, size_t offset, size_t size);
    void copy_slot(const ggml_tensor * slots, int32_t slot, ggml_tensor * dst, int32_t expert);
    void poison(const fn_lean_layer & l, int32_t place);
    bool place_tensors(ggml_backend_buffer_t buffer, uint8_t * base);
    void zero(const ggml_tensor * t, size_t offset, size_t size);

    const int32_t          n_ring;
    const fn_lean_switches switches;

    ggml_backend_ptr        backend; // its own stream
    ggml_backend_ptr        copier;  // another one, for copies from slots; null where nothing is asynchronous
    fn_lean_balance         balance;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    std::vector<fn_lean_layer *> layers; // by number, null when another device has it

    size_t               part_bytes[3] = {}; // gate, up, down of a place, as large as the largest layer needs
    std::vector<uint8_t> junk;
    std::vector<uint8_t> zeros;

    uint64_t next_serial      = 1;
    uint64_t last_slot_serial = 0;

    std::mutex                     mutex;
    std::condition_variable        cv_jobs;
    std::condition_variable        cv_done;
    std::deque<job>                jobs;
    std::vector<fn_lean_job_times> times;
    uint64_t                       done = 0;
    bool                           stop = false;
    std::thread                    thread;
};
