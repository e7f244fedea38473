#include "fn-lean-impl.h"

#include "fn-expert-cache-impl.h"

#include "llama-context.h"

// the experts that the cache holds of a layer, as of now; called between graph executions and while a prompt's graph
// runs, when nothing changes the slots
void fn_lean::slot_map(void * data, int32_t cache_index, std::vector<int32_t> & slot_of) {
    const fn_lean & lean = *(const fn_lean *) data;
    const fn_expert_cache * cache = fn_expert_cache_get(&lean.ctx);
    if (!cache || !cache->core || cache->phase != FN_EXPERT_CACHE_READY) {
        return;
    }
    for (const auto & device : lean.devices) {
        for (const int32_t layer : device->lent_layers) {
            if (lean.lending && lean.layers[layer]->cache_index == cache_index) {
                return; // what is staged is there now
            }
        }
    }
    const fn_expert_lru & lru = cache->core->lru(cache_index);
    for (int32_t slot = 0; slot < lru.n_slots(); ++slot) {
        const int32_t expert = lru.expert_in(slot);
        if (expert >= 0) {
            slot_of[expert] = slot;
        }
    }
}

// the slots of a device's last layers, which lie together at the end of its slots
void fn_lean::find_lendable() {
    const fn_expert_cache * cache = ctx.fn_cache && ctx.fn_cache->core ? ctx.fn_cache.get() : nullptr;
    for (auto & device : devices) {
        uint8_t * end = nullptr;
        for (auto it = device->layers.rbegin(); cache && it != device->layers.rend(); ++it) {
            const fn_lean_layer & l = *layers[*it];
            if (l.cache_index < 0 || (end && l.slots[0]->buffer != device->lent_buffer)) {
                break;
            }
            if (!end) {
                device->lent_buffer = l.slots[0]->buffer;
                end = (uint8_t *) ggml_backend_buffer_get_base(device->lent_buffer) + ggml_backend_buffer_get_size(device->lent_buffer);
            }
            uint8_t * begin = (uint8_t *) l.slots[0]->data;
            device->lent_layers.push_back(*it);
            if (begin < end && (size_t) (end - begin) >= device->stage->need_bytes()) {
                device->lent_base = begin;
                break;
            }
        }
    }
}

// the cache asks before it frees the slots
void fn_lean::guard_slots() {
    if (!ctx.fn_cache) {
        return;
    }
    ctx.fn_cache->may_release = [this] {
        for (auto & device : devices) {
            device->stage->wait_slots();
        }
        return !lending; // graphs read staging tensors there, also when the slots are slots again
    };
}

// the slots that were staging memory hold their experts again
void fn_lean::give_back() {
    const int64_t t_start = ggml_time_us();
    for (auto & device : devices) {
        ggml_backend_synchronize(device->compute); // it may still read what is staged
        device->stage->wait_all();
        device->ring->forget();
        for (const int32_t layer : device->lent_layers) {
            const fn_expert_lru & lru = ctx.fn_cache->core->lru(layers[layer]->cache_index);
            std::vector<int32_t> expert_in(lru.n_slots());
            for (int32_t slot = 0; slot < lru.n_slots(); ++slot) {
                expert_in[slot] = lru.expert_in(slot);
            }
            device->stage->refill(layer, expert_in);
        }
    }
    lent = false;
    n_refills++;
    refill_us += ggml_time_us() - t_start;
}
