#pragma once

#include "fn-rs-range.h"
#include "llama-batch.h"

#include <cstdint>
#include <utility>
#include <vector>

// Recurrent states that one decode leaves behind besides its last one: those before positions that lie inside it. They are
// written to the planes that hold the states of the last few tokens for the rollback of drafts. A prompt has no drafts.

// What one micro-batch writes to the planes of a recurrent state.
struct fn_inline_planes {
    struct state {
        int64_t  n_tokens; // of the micro-batch that the state has seen
        uint32_t plane;

        bool operator==(const state & other) const { return n_tokens == other.n_tokens && plane == other.plane; }
    };

    bool               active = false; // the decode's plan holds; otherwise the states of its last tokens are kept, as in stock
    std::vector<state> states;         // ascending, without the last one, which is in plane 0

    bool operator==(const fn_inline_planes & other) const { return active == other.active && states == other.states; }

    // The states in order of their writing, n_stock or the last and those of the plan: the i-th one's plane, and how many of
    // n_tokens tokens it has seen (stock: below 0 where the micro-batch has fewer).
    int64_t count(int64_t n_stock) const { return active ? 1 + (int64_t) states.size() : n_stock; }
    int64_t plane(int64_t i) const { return active && i > 0 ? states[i - 1].plane : i; }
    int64_t seen (int64_t i, int64_t n_tokens) const {
        return !active ? n_tokens - i : i > 0 ? states[i - 1].n_tokens : n_tokens;
    }
};

// The plan of a decode, in the recurrent memory.
class fn_inline_states {
public:
    // Keep the states before these positions, ascending; none: the decodes that follow are stock.
    void want(llama_seq_id seq_id, const llama_pos * pos, size_t n) {
        seq = seq_id;
        wanted.clear();
        for (size_t i = 0; i < n; ++i) {
            wanted.push_back({ pos[i], false });
        }
    }

    bool         kept(size_t i) const { return i < wanted.size() && wanted[i].kept; }
    llama_pos    pos (size_t i) const { return wanted[i].pos; }
    llama_seq_id seq_id()       const { return seq; }

    llama_pos last = -1; // of the sequence, while another state is shown in its place

    static uint32_t plane(size_t i) { return 1 + (uint32_t) i; }

    fn_inline_planes planes(const llama_ubatch & ubatch) const {
        fn_inline_planes res;
        if (wanted.empty() || ubatch.n_seqs != 1 || ubatch.seq_id[0][0] != seq) {
            return res;
        }
        res.active = true;
        for (size_t i = 0; i < wanted.size(); ++i) {
            const int64_t n = wanted[i].pos - ubatch.pos[0];
            if (n >= 1 && n <= (int64_t) ubatch.n_seq_tokens) {
                res.states.push_back({ n, plane(i) });
            }
        }
        return res;
    }

    // The largest graph: n_planes states, and so many parts of nearly equal length.
    static fn_inline_planes largest(uint32_t n_planes, int64_t n_tokens) {
        fn_inline_planes res;
        res.active = n_planes > 0 && n_tokens > (int64_t) n_planes;
        for (uint32_t i = 0; res.active && i < n_planes; ++i) {
            res.states.push_back({ (i + 1)*n_tokens/(n_planes + 1), plane(i) });
        }
        return res;
    }

    // The states of the micro-batch are being written.
    void record(const llama_ubatch & ubatch, fn_rs_range & range) {
        const fn_inline_planes now = planes(ubatch);
        if (!now.active) {
            return;
        }
        range.forget(seq); // nothing to roll back to: the planes hold other states
        for (const auto & state : now.states) {
            wanted[state.plane - 1].kept = true;
        }
    }

private:
    struct state {
        llama_pos pos;
        bool      kept;
    };

    llama_seq_id       seq = -1;
    std::vector<state> wanted; // the i-th goes to plane(i)
};
