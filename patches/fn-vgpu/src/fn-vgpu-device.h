#pragma once

#include "fn-vgpu-options.h"
#include "ggml-backend-impl.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

// A ggml device around the CPU backend that behaves like a card of limited memory.
//
// The RPC server asks a device for three things: a default buffer type, a backend to compute on, and its memory. Buffers
// of this device's type are CPU buffers with an entry in the books; the backend hands every graph to a CPU backend. The
// buffer type says is_host = true, since inside this process the data is plain host memory in standard layout and the CPU
// backend computes on it; the RPC client does not see that and treats the device as one with memory of its own.

struct fn_vgpu_stats {
    uint64_t memory_bytes    = 0;
    uint64_t allocated_bytes = 0;
    uint64_t peak_bytes      = 0;  // highest allocated_bytes so far
    uint64_t buffers         = 0;  // alive now
    uint64_t allocations     = 0;  // that succeeded
    uint64_t refusals        = 0;  // that failed: over the limit, by a fault, or no memory in the host
    uint64_t frees           = 0;
    uint64_t uploads         = 0;
    uint64_t upload_bytes    = 0;
    uint64_t downloads       = 0;
    uint64_t download_bytes  = 0;
    uint64_t copies          = 0;  // inside the device
    uint64_t copy_bytes      = 0;
    uint64_t graphs          = 0;  // that were started
    uint64_t faults          = 0;  // that happened
};

// Called from the serving thread with a marker's event name and its json.
using fn_vgpu_emit = std::function<void(const char * event, const std::string & json)>;

class fn_vgpu_device {
  public:
    // `options` are the limits, `emit` may be empty. Uses the CPU backend's buffer type and backend.
    fn_vgpu_device(const fn_vgpu_options & options, fn_vgpu_emit emit);
    ~fn_vgpu_device();

    fn_vgpu_device(const fn_vgpu_device &)             = delete;
    fn_vgpu_device & operator=(const fn_vgpu_device &) = delete;

    ggml_backend_dev_t dev() { return &device; }

    // the functions below may be called from any thread

    fn_vgpu_stats stats() const;
    std::string   stats_json() const;  // the members of fn_vgpu_stats, free_bytes and the name

    void arm(const fn_vgpu_fault & fault);
    void set_memory(size_t bytes);

    // Ends delays, hangs and running graphs at once. A graph that was cut short still reports success, since the RPC
    // server aborts on anything else: call this only when no client can read results any more.
    void stop();

    // parts of the interface, called by the functions in the .cpp

    ggml_backend_t        init_backend();
    void                  forget_backend(ggml_backend_t backend);
    ggml_backend_buffer_t alloc_buffer(size_t size);
    void                  free_buffer(size_t size);
    void                  upload(ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    void                  count_download(size_t size);
    void                  count_copy(size_t size);
    ggml_status           compute(ggml_backend_t inner, ggml_cgraph * graph);
    void                  memory(size_t * free, size_t * total) const;

    const std::string & name() const { return options.name; }

    bool is_stopping() const;

  private:
    using clock = std::chrono::steady_clock;

    bool take_fault(fn_vgpu_event event);
    void sleep_until(clock::time_point deadline);
    void hang();

    const fn_vgpu_options options;
    const fn_vgpu_emit    emit;

    mutable std::mutex         mutex;
    std::condition_variable    stopped;
    bool                       stopping = false;
    fn_vgpu_stats              books;
    std::vector<fn_vgpu_fault> armed;     // n counts down to 0
    std::set<ggml_backend_t>   backends;  // alive: the RPC server never frees its own, the destructor does

    ggml_backend_reg         reg;
    ggml_backend_device      device;
    ggml_backend_buffer_type buft;
};
