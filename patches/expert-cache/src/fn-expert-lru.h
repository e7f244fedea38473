#pragma once

#include <cstdint>
#include <vector>

// Which expert sits in which slot of one layer. Plain C++: no ggml, no locks; one thread drives it.
//
// A step is one graph execution: publish(), then one route(). Slots chosen by route() for new experts are "writing"
// until the next publish(): no lane of the step that writes them points at them, so a slot is never read while its
// bytes are in flight.

struct fn_expert_insert {
    int32_t expert;
    int32_t slot;
    int32_t evicted; // expert that lost the slot, -1 when it was empty
};

class fn_expert_lru {
public:
    // n_spare slots after the capacity are never filled: they keep the ids of a row distinct when the capacity is
    // smaller than what one row needs. Requires n_slots >= 1 and n_spare >= spare_needed(...).
    fn_expert_lru(int32_t n_expert, int32_t n_slots, int32_t n_spare, int32_t n_inserts);

    // distinct readable slots for one row of n_used lanes while n_inserts slots are being written
    static int32_t spare_needed(int32_t n_slots, int32_t n_used, int32_t n_inserts);

    // slots written since the last call become readable
    void publish();

    // ids, slots, hits: [n_tokens][n_used], ids in 0..n_expert-1 and distinct within a row.
    // slots are distinct within a row, hit or not; a lane with hits == 0 must be masked by the caller.
    void route(const int32_t * ids, int32_t n_used, int32_t n_tokens, int32_t * slots, uint8_t * hits);

    // experts to upload after the last route(), at most n_inserts
    const std::vector<fn_expert_insert> & inserts() const { return pending; }

    // expert in the slot or -1; only slots that can be read
    int32_t expert_in(int32_t slot) const { return state[slot] == READY ? expert_of[slot] : -1; }

    int32_t n_slots()    const { return capacity; }
    int32_t n_physical() const { return (int32_t) expert_of.size(); }
    int32_t n_ready()    const;

private:
    enum slot_state : uint8_t { EMPTY, READY, WRITING };

    int32_t pick_victim() const; // -1 when every slot is in use in this step

    const int32_t capacity;
    const int32_t max_inserts;

    uint64_t clock = 0; // one tick per touch
    uint64_t step  = 0; // one per route()

    std::vector<int32_t>    slot_of;   // [n_expert] slot, -1 when not resident or still being written
    std::vector<int32_t>    expert_of; // [n_physical]
    std::vector<slot_state> state;     // [n_physical]
    std::vector<uint64_t>   touched;   // [n_physical] clock of the last use
    std::vector<uint64_t>   used_in;   // [n_physical] step of the last hit
    std::vector<uint64_t>   row_mark;  // [n_physical] row that already points at the slot
    uint64_t                row = 0;

    std::vector<fn_expert_insert> pending;
};
