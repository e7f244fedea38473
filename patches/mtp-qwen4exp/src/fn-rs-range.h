#pragma once

#include "llama-batch.h"

#include <vector>

// How far a recurrent state can be rolled back. A decode of m tokens writes the snapshots of its last m tokens only:
// the planes beyond it hold what an older decode left there, and restoring one of them is silently wrong.
struct fn_rs_range {
    // the ubatch's states are being written: the state before its last n-1 tokens can be restored
    void record(const llama_ubatch & ubatch) {
        for (uint32_t s = 0; s < ubatch.n_seqs; ++s) {
            const uint32_t i = s*ubatch.n_seq_tokens;
            for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
                set(ubatch.seq_id[i][j], ubatch.n_seq_tokens - 1);
            }
        }
    }

    // the state of seq_id came from elsewhere (restore, copy, removal): no snapshot belongs to it. < 0 = all sequences
    void forget(llama_seq_id seq_id) {
        if (seq_id < 0) {
            n_back.clear();
        } else {
            set(seq_id, 0);
        }
    }

    bool allows(llama_seq_id seq_id, llama_pos k) const {
        return seq_id >= 0 && (size_t) seq_id < n_back.size() && k <= (llama_pos) n_back[seq_id];
    }

private:
    std::vector<uint32_t> n_back; // per sequence

    void set(llama_seq_id seq_id, uint32_t n) {
        if ((size_t) seq_id >= n_back.size()) {
            n_back.resize(seq_id + 1, 0);
        }
        n_back[seq_id] = n;
    }
};
