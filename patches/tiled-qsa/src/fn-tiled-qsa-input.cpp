#include "fn-tiled-qsa-input.h"

#include "llama-batch.h"
#include "llama-memory-hybrid-idx.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

const float KEY_SCALE   = std::ldexp(1.0f, 100);
const float KEY_FOREIGN = std::ldexp(1.0f, 127); // above every token's key, also above KEY_ALL
const float KEY_ALL     = std::ldexp(1.0f, 125); // a token that sees every cell of its sequence

// starts and tails are not scaled
const float START_UNPOOLED = std::ldexp(1.0f, 26); // cells that no whole block holds: always selected
const float TAIL_NONE      = std::ldexp(1.0f, 25); // a token that forces no whole block

constexpr int64_t KEY_MAX = int64_t(1) << 24;

// The cells of one sequence in the order that the causal mask follows: by position, and where an image repeats a
// position, by row and column. A cell's key is its position, or its rank if the positions do not tell cells apart.
class seq_order {
public:
    seq_order(const llama_kv_cells & cells, llama_seq_id seq, int64_t n_kv, int64_t n_pos, bool is_2d) : cells(cells) {
        std::vector<bool> seen(n_pos, false);

        for (int64_t j = 0; j < n_kv; ++j) {
            if (cells.is_empty(j) || !cells.seq_has(j, seq)) {
                continue;
            }

            const llama_pos p = cells.pos_get(j);
            GGML_ASSERT(p < n_pos && p < KEY_MAX && "tiled-qsa: cell position runs past the cell window");

            ranked |= is_2d && seen[p];
            seen[p] = true;

            order.push_back((uint32_t) j);
        }

        if (ranked) {
            std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
                const auto & ea = cells.ext_get(a);
                return cells.pos_get(a) != cells.pos_get(b) ?
                    cells.pos_get(a) < cells.pos_get(b) : cells.ext_get(b).is_2d_gt(ea.x, ea.y);
            });
        }
    }

    bool is_ranked() const { return ranked; }

    // f(cell, key)
    template<typename F>
    void for_each(F && f) const {
        for (size_t i = 0; i < order.size(); ++i) {
            f(order[i], ranked ? (int64_t) i : (int64_t) cells.pos_get(order[i]));
        }
    }

    // the key of the last cell that a token of the ubatch sees
    int64_t token(const llama_ubatch & ubatch, int64_t i) const {
        const llama_pos p = ubatch.pos[i];
        if (!ranked) {
            return p;
        }

        const llama_pos y = ubatch.pos[i + ubatch.n_tokens];
        const llama_pos x = ubatch.pos[i + ubatch.n_tokens*2];

        const auto end = std::partition_point(order.begin(), order.end(), [&](uint32_t j) { return is_before(j, p, x, y); });

        return (end - order.begin()) - 1;
    }

private:
    // at or before (p, y, x)
    bool is_before(uint32_t j, llama_pos p, llama_pos x, llama_pos y) const {
        const llama_pos pj = cells.pos_get(j);
        return pj < p || (pj == p && !cells.ext_get(j).is_2d_gt(x, y));
    }

    const llama_kv_cells & cells;

    bool ranked = false;

    std::vector<uint32_t> order;
};

bool has_one_seq(const llama_kv_cells & cells) {
    int n = 0;
    for (int s = 0; s < LLAMA_MAX_SEQ && n < 2; ++s) {
        n += cells.seq_pos_min(s) >= 0;
    }
    return n < 2;
}

template<typename T>
T * host_data(ggml_tensor * t) {
    GGML_ASSERT(ggml_backend_buffer_is_host(t->buffer));
    return (T *) t->data;
}

} // namespace

void fn_tiled_qsa_input::build(ggml_context * ctx, const llama_ubatch & ubatch) {
    const int64_t n_tokens = ubatch.n_tokens;
    const int64_t n_kv     = mctx->get_idx()->get_n_kv();
    const int64_t n_blocks = (n_kv + ratio - 1)/ratio;

    k_idxs    = mctx->get_idx()->build_input_k_idxs(ctx, ubatch);
    cell_blk  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_kv);
    blk_cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, ratio*n_blocks);
    blk_pos   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 4*n_blocks);
    blk_start = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_blocks);
    cell_key  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_kv, ubatch.n_seqs_unq);
    tok_key   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, n_tokens);
    tok_tail  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, n_tokens);
    tok_row   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);

    for (auto * t : { cell_blk, blk_cells, blk_pos, blk_start, cell_key, tok_key, tok_tail, tok_row }) {
        ggml_set_input(t);
    }
}

bool fn_tiled_qsa_input::can_reuse(const llm_graph_params & params) {
    mctx = static_cast<const llama_memory_hybrid_idx_context *>(params.mctx);

    const auto * idx = mctx->get_idx();

    return idx != nullptr && mctx->get_n_stream() == 1 &&
        k_idxs->ne[0]   == params.ubatch.n_tokens &&
        cell_blk->ne[0] == idx->get_n_kv() &&
        cell_key->ne[1] == params.ubatch.n_seqs_unq;
}

void fn_tiled_qsa_input::set_input(const llama_ubatch * ubatch) {
    mctx->get_idx()->set_input_k_idxs(k_idxs, ubatch);

    const int64_t n_tokens = ubatch->n_tokens;
    const int64_t n_kv     = cell_blk->ne[0];
    const int64_t n_blocks = blk_start->ne[0];
    const int64_t r        = ratio;

    // The layout of the blocks is upstream's. Asked for one token without a causal rule, its bias is one row that is
    // positive at the block of the unpooled cells alone (it has none if every cell sits in a whole block).
    std::vector<float> bias(n_blocks);
    {
        ggml_tensor row = {};
        row.data = bias.data();

        llama_ubatch one = *ubatch;
        one.n_tokens = 1;

        mctx->set_input_qsa(cell_blk, blk_cells, blk_pos, &row, &one, ratio, /*blk_bias=*/ true, /*causal_attn=*/ false);
    }

    const auto & cells   = mctx->fn_mem()->get_mem_idx()->get_cells(ubatch->seq_id[0][0]);
    const bool   one_seq = has_one_seq(cells);

    std::vector<seq_order> seqs;
    seqs.reserve(ubatch->n_seqs_unq);

    float * dst_cell = host_data<float>(cell_key);
    std::fill(dst_cell, dst_cell + ggml_nelements(cell_key), -KEY_FOREIGN);

    for (uint32_t s = 0; s < ubatch->n_seqs_unq; ++s) {
        seqs.emplace_back(cells, ubatch->seq_id_unq[s], n_kv, n_blocks*r, ubatch->is_pos_2d());
        seqs.back().for_each([&](uint32_t j, int64_t key) { dst_cell[s*n_kv + j] = -KEY_SCALE*(float) key; });
    }

    // upstream counts blocks by rank under this condition, otherwise by position
    const bool blk_ranked = one_seq && seqs[0].is_ranked();

    float * dst_start = host_data<float>(blk_start);
    {
        const int32_t * pos     = host_data<int32_t>(blk_pos);
        const int32_t * members = host_data<int32_t>(blk_cells);

        for (int64_t b = 0; b < n_blocks; ++b) {
            const float start = blk_ranked ? -dst_cell[members[b*r]]/KEY_SCALE : (float) pos[b];
            dst_start[b] = bias[b] > 0.0f ? START_UNPOOLED : start;
        }
    }

    float   * dst_key  = host_data<float>  (tok_key);
    float   * dst_tail = host_data<float>  (tok_tail);
    int32_t * dst_row  = host_data<int32_t>(tok_row);

    for (int64_t i = 0; i < n_tokens; ++i) {
        dst_row[i] = ubatch->seq_idx[ubatch->seq_id[i][0]];

        const int64_t key  = seqs[dst_row[i]].token(*ubatch, i);
        const int64_t tail = ((blk_ranked ? key : (int64_t) ubatch->pos[i]) + 1)/r*r;

        dst_key [i] = causal_attn ? KEY_SCALE*(float) key : KEY_ALL;
        dst_tail[i] = causal_attn ? (float) (tail - 1)    : TAIL_NONE;
    }
}
