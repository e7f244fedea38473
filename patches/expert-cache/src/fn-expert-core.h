#pragma once

#include "fn-expert-lru.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

// Moves experts into slots. One implementation per kind of device; the unit test has one that writes late.
// Calls come from the thread that drives the graph, in this order within a step and layer:
//   wait (before the device reads the layer's slots), upload..., fence.
struct fn_slot_port {
    virtual ~fn_slot_port() = default;

    // start copying the expert's weights into the slot; may return before they are there
    virtual void upload(int32_t layer, int32_t expert, int32_t slot) = 0;

    // everything uploaded to the layer so far is covered by the layer's next wait
    virtual void fence(int32_t layer) = 0;

    // what the device computes from now on sees the uploads before the last fence
    virtual void wait(int32_t layer) = 0;

    // returns when every upload is in place
    virtual void drain() = 0;
};

struct fn_expert_counters {
    std::atomic<uint64_t> hits   {0}; // lanes
    std::atomic<uint64_t> misses {0}; // lanes
    std::atomic<uint64_t> uploads{0}; // experts
};

// The slots of all layers of one context: lookup, admission, eviction, and the order of uploads against reads.
class fn_expert_core {
public:
    fn_expert_core(int32_t n_layer, int32_t n_expert, int32_t n_used, int32_t n_slots, int32_t n_inserts, fn_slot_port & port);

    // between graph executions: uploads of the last step become hits
    void begin_step();

    // within the execution, before the device reads the layer's slots. See fn_expert_lru::route.
    void route(int32_t layer, const int32_t * ids, int32_t n_tokens, int32_t * slots, uint8_t * hits);

    // after the device's part of the layer was queued: start the uploads that route() chose
    void start_uploads(int32_t layer);

    // nothing in flight after it
    void drain();

    // fill every slot that holds an expert again, after the memory was taken away and given back
    void reload();

    const fn_expert_lru &      lru     (int32_t layer) const { return layers[layer]->lru; }
    const fn_expert_counters & counters(int32_t layer) const { return layers[layer]->counters; }

    int32_t n_layer() const { return (int32_t) layers.size(); }

private:
    struct layer_state {
        fn_expert_lru      lru;
        fn_expert_counters counters;
        bool               fenced  = false; // uploads that no wait has covered yet
        bool               started = true;  // inserts of the last route are on their way
    };

    const int32_t n_used;

    fn_slot_port & port;

    std::vector<std::unique_ptr<layer_state>> layers;
};
