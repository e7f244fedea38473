#pragma once

#include <cstdint>

// What a llama_context has to know about the transaction that it takes part in.
struct fn_phase_link {
    uint32_t n_ubatch_seen = 0;     // what n_ubatch() says while the physical one is another; 0: they are the same
    bool     broken        = false; // a transition failed
    int      fault         = 0;     // for tests: what the next batch returns instead of being computed

    bool (*stop)(void * data) = nullptr;
    void * stop_data          = nullptr;

    int64_t n_tokens_done = 0; // of the last batch

    // before a batch: 0, or what decode() returns
    int refuses() {
        const int code = broken ? -3 : fault;
        fault = 0;
        return code;
    }

    // after every micro-batch
    bool stops(int64_t n_done, int64_t n_all) {
        n_tokens_done = n_done;
        return n_done < n_all && stop && stop(stop_data);
    }
};
