#pragma once

#include "fn-expert-core.h"

#include "ggml-cpp.h"

#include <map>
#include <string>
#include <vector>

// A layer as the memory sees it: its experts in host memory and the device that computes it.
struct fn_slot_layer {
    const ggml_tensor * src[3] = {}; // gate, up, down: [n_in, n_out, n_expert]
    ggml_tensor *       dst[3] = {}; // the same with one slot per expert of the cache
    ggml_backend_dev_t  dev    = nullptr;
    int32_t             device = -1; // index in fn_expert_slots::devices
};

struct fn_slot_device {
    ggml_backend_dev_t  dev     = nullptr;
    ggml_backend_t      compute = nullptr; // the context's backend, not ours

    ggml_backend_ptr        upload; // its own stream; null when the device copies synchronously
    ggml_context_ptr        ctx;    // the slot tensors
    ggml_backend_buffer_ptr buf;

    std::vector<int32_t> layers;

    size_t  slot_bytes = 0; // one slot in each of its layers
    size_t  need_bytes = 0; // the whole
    size_t  free_bytes = 0; // reported before the allocation
    int32_t n_fit      = 0; // slots per layer that would fit

    // delays uploads and poisons slots, for tests of the order of writes and reads
    ggml_context_ptr        late_ctx;
    ggml_backend_buffer_ptr late_buf;
    ggml_backend_buffer_ptr late_src; // page-locked where the device can: the copies are queued, the host does not wait
    ggml_tensor *           late_dst = nullptr;
};

// Device memory of the slots, and the copies into it.
class fn_expert_slots : public fn_slot_port {
public:
    // backends: of the context that will run the graph, one per device
    fn_expert_slots(std::vector<fn_slot_layer> layers, const std::vector<ggml_backend_t> & backends, int32_t n_physical, int32_t n_late);
    ~fn_expert_slots() override;

    // fills need, free and fit of every device; true when all fit. n_spare: physical slots beyond the capacity
    bool plan(int32_t n_slots, int32_t n_used, int32_t n_inserts);

    // false when a device refuses; nothing is held then
    bool alloc();
    void free();

    void upload(int32_t layer, int32_t expert, int32_t slot) override;
    void fence (int32_t layer) override;
    void wait  (int32_t layer) override;
    void drain () override;

    size_t size_bytes(int32_t device) const;

    std::vector<fn_slot_layer>  layers;
    std::vector<fn_slot_device> devices;

private:
    void make_late(fn_slot_device & device);

    const int32_t n_late;

    std::vector<ggml_backend_event_ptr> events; // per layer, null without events
    size_t                              slot_max = 0; // bytes of the largest slot of one tensor
};
