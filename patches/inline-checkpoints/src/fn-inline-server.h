#pragma once

#include "fn-inline-checkpoints.h"
#include "speculative.h"

#include <cstdint>
#include <utility>
#include <vector>

// The checkpoints of one slot's prompt that lie inside the batch being filled.
class fn_inline_server {
public:
    // spec: may be null; one that puts its own state into checkpoints has that state only between batches
    void init(llama_context * ctx_tgt, common_speculative * spec) {
        std::vector<uint8_t> state;
        ctx   = ctx_tgt;
        n_max = spec && common_speculative_get_state(spec, 0, state) ? 0 : fn_inline_checkpoints_max(ctx);
    }

    // a batch begins
    void clear() {
        n_start = std::exchange(n_cut, -1);
        if (!points.empty()) {
            points.clear();
            want();
        }
    }

    // Has the state behind n_tokens of the prompt kept, before the token at pos. False: the batch has to end here.
    bool add(int64_t n_tokens, llama_pos pos) {
        if (!points.empty() && points.back().n_tokens == n_tokens) {
            return true;
        }
        if ((int32_t) points.size() >= n_max) {
            n_cut = n_tokens;
            return false;
        }
        points.push_back({ n_tokens, pos, false });
        want();
        return true;
    }

    // Whether a batch that starts behind n_tokens of the prompt, which was computed from n_first on, may have its checkpoint made
    // before it is computed: the prompt starts there or was cut there. What a full batch ended at is no place of the stock server's.
    bool starts(int64_t n_tokens, int64_t n_first, bool near_end) const {
        return n_max == 0 || ((n_tokens == n_first || n_tokens == n_start) && (points.empty() || near_end));
    }

    // tokens of the prompt at the first of them; without any n_tokens, which is where the batch ends
    int64_t first(int64_t n_tokens) const { return points.empty() ? n_tokens : points.front().n_tokens; }

    // whether n_tokens lie further than step behind the last checkpoint, made or to be made; true when there is none
    template <typename List> bool far(const List & made, int64_t n_tokens, int64_t step) const {
        if (!points.empty()) {
            return n_tokens > points.back().n_tokens + step;
        }
        return made.empty() || n_tokens > made.back().n_tokens + step;
    }

    // a part of the batch, of whose prompt n_tokens are left, has been computed: create(n_tokens, pos) for each that it reached
    template <typename Create> void make(int64_t n_tokens, const Create & create) {
        for (size_t i = 0; i < points.size(); ++i) {
            auto & point = points[i];
            if (point.made || point.n_tokens > n_tokens || !fn_inline_checkpoints_kept(ctx, i)) {
                continue;
            }
            fn_inline_checkpoints_show(ctx, i, true);
            create(point.n_tokens, point.pos);
            fn_inline_checkpoints_show(ctx, i, false);
            point.made = true;
        }
    }

private:
    struct point {
        int64_t   n_tokens;
        llama_pos pos;
        bool      made;
    };

    void want() {
        std::vector<llama_pos> pos;
        for (const auto & point : points) {
            pos.push_back(point.pos);
        }
        fn_inline_checkpoints_want(ctx, 0, pos.data(), pos.size());
    }

    llama_context *    ctx   = nullptr;
    int32_t            n_max = 0;
    int64_t            n_cut   = -1; // tokens of the prompt where add() ended this batch
    int64_t            n_start = -1; // and the one before
    std::vector<point> points; // ascending
};
