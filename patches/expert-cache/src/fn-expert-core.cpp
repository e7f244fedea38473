#include "fn-expert-core.h"

fn_expert_core::fn_expert_core(
        int32_t n_layer, int32_t n_expert, int32_t n_used, int32_t n_slots, int32_t n_inserts, fn_slot_port & port) :
    n_used(n_used),
    port(port) {
    const int32_t n_spare = fn_expert_lru::spare_needed(n_slots, n_used, n_inserts);
    for (int32_t il = 0; il < n_layer; ++il) {
        layers.push_back(std::unique_ptr<layer_state>(
                    new layer_state { fn_expert_lru(n_expert, n_slots, n_spare, n_inserts), {}, false, true }));
    }
}

void fn_expert_core::begin_step() {
    for (int32_t il = 0; il < n_layer(); ++il) {
        // an execution that was cut short has chosen slots and not filled them
        start_uploads(il);
        layers[il]->lru.publish();
    }
}

void fn_expert_core::route(int32_t il, const int32_t * ids, int32_t n_tokens, int32_t * slots, uint8_t * hits) {
    layer_state & layer = *layers[il];

    start_uploads(il);

    if (layer.fenced) {
        port.wait(il);
        layer.fenced = false;
    }

    layer.lru.route(ids, n_used, n_tokens, slots, hits);
    layer.started = layer.lru.inserts().empty();

    uint64_t n_hits = 0;
    for (int32_t i = 0; i < n_used*n_tokens; ++i) {
        n_hits += hits[i];
    }

    layer.counters.hits   += n_hits;
    layer.counters.misses += (uint64_t) n_used*n_tokens - n_hits;
}

void fn_expert_core::start_uploads(int32_t il) {
    layer_state & layer = *layers[il];
    if (layer.started) {
        return;
    }

    for (const fn_expert_insert & ins : layer.lru.inserts()) {
        port.upload(il, ins.expert, ins.slot);
    }
    port.fence(il);

    layer.counters.uploads += layer.lru.inserts().size();
    layer.started = true;
    layer.fenced  = true;
}

void fn_expert_core::drain() {
    begin_step();
    port.drain();
    for (auto & layer : layers) {
        layer->fenced = false;
    }
}

void fn_expert_core::reload() {
    for (int32_t il = 0; il < n_layer(); ++il) {
        layer_state & layer = *layers[il];
        for (int32_t slot = 0; slot < layer.lru.n_slots(); ++slot) {
            const int32_t expert = layer.lru.expert_in(slot);
            if (expert >= 0) {
                port.upload(il, expert, slot);
                layer.counters.uploads++;
            }
        }
    }
    drain();
}
