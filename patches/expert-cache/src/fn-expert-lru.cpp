#include "fn-expert-lru.h"

#include <algorithm>

int32_t fn_expert_lru::spare_needed(int32_t n_slots, int32_t n_used, int32_t n_inserts) {
    // at most min(n_inserts, n_slots) slots are being written, the rest has to hold one row
    return std::max(0, n_used + std::min(n_inserts, n_slots) - n_slots);
}

fn_expert_lru::fn_expert_lru(int32_t n_expert, int32_t n_slots, int32_t n_spare, int32_t n_inserts) :
    capacity(n_slots),
    max_inserts(n_inserts),
    slot_of  (n_expert, -1),
    expert_of(n_slots + n_spare, -1),
    state    (n_slots + n_spare, EMPTY),
    touched  (n_slots + n_spare, 0),
    used_in  (n_slots + n_spare, 0),
    row_mark (n_slots + n_spare, 0) {
    pending.reserve(n_inserts);
}

int32_t fn_expert_lru::n_ready() const {
    return (int32_t) std::count(state.begin(), state.end(), READY);
}

void fn_expert_lru::publish() {
    for (const fn_expert_insert & ins : pending) {
        state[ins.slot]     = READY;
        slot_of[ins.expert] = ins.slot;
    }
    pending.clear();
}

int32_t fn_expert_lru::pick_victim() const {
    int32_t best = -1;
    for (int32_t s = 0; s < capacity; ++s) {
        if (state[s] == EMPTY) {
            return s;
        }
        if (state[s] == WRITING || used_in[s] == step) {
            continue;
        }
        if (best < 0 || touched[s] < touched[best]) {
            best = s;
        }
    }
    return best;
}

void fn_expert_lru::route(const int32_t * ids, int32_t n_used, int32_t n_tokens, int32_t * slots, uint8_t * hits) {
    publish();

    step++;

    const int32_t n_lanes = n_used*n_tokens;

    // misses of this step in order of first appearance
    int32_t wanted[64];
    int32_t n_wanted = 0;

    const int32_t max_wanted = std::min<int32_t>(max_inserts, 64);

    for (int32_t i = 0; i < n_lanes; ++i) {
        const int32_t slot = slot_of[ids[i]];

        hits [i] = slot >= 0;
        slots[i] = slot;

        if (slot >= 0) {
            touched[slot] = ++clock;
            used_in[slot] = step;
        } else if (n_wanted < max_wanted && std::find(wanted, wanted + n_wanted, ids[i]) == wanted + n_wanted) {
            wanted[n_wanted++] = ids[i];
        }
    }

    for (int32_t i = 0; i < n_wanted; ++i) {
        const int32_t slot = pick_victim();
        if (slot < 0) {
            break;
        }

        const int32_t evicted = expert_of[slot];
        if (evicted >= 0) {
            slot_of[evicted] = -1;
        }

        expert_of[slot] = wanted[i];
        state    [slot] = WRITING;
        touched  [slot] = ++clock;

        pending.push_back({ wanted[i], slot, evicted });
    }

    // lanes without a slot read any other finite slot and are masked; low indices first, so that the rows of a batch
    // share them and the device reads them once
    for (int32_t t = 0; t < n_tokens; ++t) {
        row++;
        for (int32_t i = t*n_used; i < (t + 1)*n_used; ++i) {
            if (hits[i]) {
                row_mark[slots[i]] = row;
            }
        }

        int32_t next = 0;
        for (int32_t i = t*n_used; i < (t + 1)*n_used; ++i) {
            if (hits[i]) {
                continue;
            }
            while (row_mark[next] == row || state[next] == WRITING) {
                next++;
            }
            row_mark[next] = row;
            slots[i] = next++;
        }
    }
}
