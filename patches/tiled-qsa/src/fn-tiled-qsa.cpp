#include "fn-tiled-qsa.h"
#include "fn-tiled-qsa-input.h"

#include "llama-impl.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-model.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

// decode and verify batches keep the stock graph
constexpr int64_t MIN_TOKENS = 9;

// ggml_set takes an offset below 1 GiB
constexpr int64_t MAX_QUERY_BYTES = int64_t(1) << 30;

// upper bound of the graph nodes of one tile, views included
constexpr int64_t NODES_PER_TILE = 64;

// larger than any score, as in the stock bias
constexpr float BLOCK_FORCED = 1e9f;

bool is_qsa(const llm_graph_context & g, int il) {
    return !g.hparams.is_recr(il) && g.hparams.dsv4_compress_ratios[il] > 0;
}

// a graph has room for so many nodes; half of it is for everything else
int64_t max_tiles(const llm_graph_context & g) {
    int64_t n_qsa = 0;
    for (int il = 0; il < g.n_layer; ++il) {
        n_qsa += is_qsa(g, il);
    }
    return std::max<int64_t>(1, ggml_graph_size(g.gf)/2/(NODES_PER_TILE*std::max<int64_t>(1, n_qsa)));
}

// rope as the stock graph applies it to the keys and queries of the indexer
ggml_tensor * rope(const llm_graph_context & g, ggml_tensor * x, ggml_tensor * pos, int * sections) {
    return ggml_rope_multi(g.ctx0, x, pos, nullptr,
            g.n_rot, sections, g.rope_type, g.n_ctx_orig, g.freq_base, g.freq_scale,
            g.ext_factor, g.attn_factor, g.beta_fast, g.beta_slow);
}

// [idx_dim, n_blocks]: mean over the cached raw keys of each block, normed, roped
ggml_tensor * pool_keys(
        const llm_graph_context & g, const llama_layer & weights, const fn_tiled_qsa_input & inp, ggml_tensor * k_all,
        int * sections, int il) {
    ggml_context * ctx0 = g.ctx0;

    const int64_t idx_dim  = k_all->ne[0];
    const int64_t n_blocks = inp.blk_start->ne[0];
    const int64_t r        = inp.blk_cells->ne[0]/n_blocks;

    ggml_tensor * members = ggml_reshape_3d(ctx0, ggml_get_rows(ctx0, k_all, inp.blk_cells), idx_dim, r, n_blocks);

    // the order of the sum is the stock order: it decides the last bit
    ggml_tensor * pooled = nullptr;
    for (int64_t i = 0; i < r; ++i) {
        ggml_tensor * slice = ggml_cont(ctx0,
                ggml_view_2d(ctx0, members, idx_dim, n_blocks, members->nb[2], i*members->nb[1]));
        pooled = pooled ? ggml_add(ctx0, pooled, slice) : slice;
    }
    pooled = ggml_scale(ctx0, pooled, 1.0f/(float) r);
    pooled = g.build_norm(pooled, weights.index_k_norm, nullptr, LLM_NORM_RMS, il);
    pooled = rope(g, ggml_reshape_3d(ctx0, pooled, idx_dim, 1, n_blocks), inp.blk_pos, sections);
    pooled = ggml_reshape_2d(ctx0, pooled, idx_dim, n_blocks);
    g.cb(pooled, "indexer_k", il);

    return pooled;
}

// The parts of one layer that its tiles share, all of them in the graph before the first tile. Values per token come as
// nodes: a view of an input would be copied to the device once per view.
struct shared {
    ggml_tensor * pooled;    // [idx_dim, n_blocks]
    ggml_tensor * q_idx;     // [idx_dim, n_idx_head, n_tokens]
    ggml_tensor * tok_key;   // [1, n_tokens]
    ggml_tensor * tok_tail;  // [1, n_tokens]
    ggml_tensor * tok_row;   // [n_tokens]
    ggml_tensor * k;
    ggml_tensor * v;
};

// the keys and values of the micro-batch into the cache; returns the queries as the cache wants them
ggml_tensor * store_kv(const llm_graph_context & g, llm_graph_input_attn_kv * inp_attn, const fn_tiled_qsa_layer & layer, shared & sh) {
    ggml_context * ctx0 = g.ctx0;
    ggml_cgraph  * gf   = g.gf;

    const llama_kv_cache_context * mctx = inp_attn->mctx;

    ggml_tensor * q = layer.q;
    ggml_tensor * k = layer.k;
    ggml_tensor * v = layer.v;

    if (inp_attn->self_k_rot) {
        q = llama_mul_mat_hadamard(ctx0, q, inp_attn->self_k_rot);
        k = llama_mul_mat_hadamard(ctx0, k, inp_attn->self_k_rot);
    }
    if (inp_attn->self_v_rot) {
        v = llama_mul_mat_hadamard(ctx0, v, inp_attn->self_v_rot);
    }

    ggml_build_forward_expand(gf, q);
    ggml_build_forward_expand(gf, layer.gate);
    ggml_build_forward_expand(gf, v);
    ggml_build_forward_expand(gf, k);
    ggml_build_forward_expand(gf, mctx->cpy_k(ctx0, k, inp_attn->get_k_idxs(), layer.il));
    ggml_build_forward_expand(gf, mctx->cpy_v(ctx0, v, inp_attn->get_v_idxs(), layer.il));

    sh.k = mctx->get_k(ctx0, layer.il);
    sh.v = mctx->get_v(ctx0, layer.il);

    return q;
}

// the indexer's keys into its cache, the pooled keys of all blocks, the indexer's queries
void build_indexer(
        const llm_graph_context & g, const llama_layer & weights, const llama_kv_cache_context * mctx,
        const fn_tiled_qsa_input & inp, const fn_tiled_qsa_layer & layer, shared & sh) {
    ggml_context * ctx0 = g.ctx0;
    ggml_cgraph  * gf   = g.gf;

    const int64_t idx_dim = g.hparams.indexer_head_size;

    ggml_tensor * k_raw = g.build_lora_mm(weights.index_k_proj, layer.cur);
    k_raw = ggml_reshape_3d(ctx0, k_raw, idx_dim, 1, g.n_tokens);
    ggml_build_forward_expand(gf, mctx->cpy_k(ctx0, k_raw, inp.k_idxs, layer.il));

    ggml_tensor * k_all = mctx->get_k(ctx0, layer.il);
    k_all = ggml_view_2d(ctx0, k_all, idx_dim, inp.cell_blk->ne[0], k_all->nb[2], 0);

    sh.pooled = pool_keys(g, weights, inp, k_all, layer.sections, layer.il);
    ggml_build_forward_expand(gf, sh.pooled);

    sh.q_idx = ggml_reshape_3d(ctx0, g.build_lora_mm(weights.index_q_proj, layer.cur), idx_dim, g.hparams.indexer_n_head, g.n_tokens);
    sh.q_idx = g.build_norm(sh.q_idx, weights.index_q_norm, nullptr, LLM_NORM_RMS, layer.il);
    sh.q_idx = rope(g, sh.q_idx, layer.inp_pos, layer.sections);
    g.cb(sh.q_idx, "indexer_q", layer.il);
    ggml_build_forward_expand(gf, sh.q_idx);

    sh.tok_key  = ggml_cont(ctx0, inp.tok_key);
    sh.tok_tail = ggml_cont(ctx0, inp.tok_tail);
    sh.tok_row  = ggml_cont(ctx0, inp.tok_row);
    ggml_build_forward_expand(gf, sh.tok_key);
    ggml_build_forward_expand(gf, sh.tok_tail);
    ggml_build_forward_expand(gf, sh.tok_row);
}

ggml_tensor * tile_cols(ggml_context * ctx0, ggml_tensor * t, int64_t begin, int64_t n) {
    return ggml_view_2d(ctx0, t, t->ne[0], n, t->nb[1], begin*t->nb[1]);
}

// [n_blocks, n]: head scores rectified and summed, blocks at or after a token's tail forced
ggml_tensor * tile_scores(const llm_graph_context & g, const fn_tiled_qsa_input & inp, const shared & sh, int64_t begin, int64_t n) {
    ggml_context * ctx0 = g.ctx0;

    const int64_t n_blocks = inp.blk_start->ne[0];
    const int64_t n_head   = sh.q_idx->ne[1];

    ggml_tensor * q = ggml_view_2d(ctx0, sh.q_idx, sh.q_idx->ne[0], n_head*n, sh.q_idx->nb[1], begin*sh.q_idx->nb[2]);

    ggml_tensor * heads = ggml_reshape_3d(ctx0, ggml_mul_mat(ctx0, sh.pooled, q), n_blocks, n_head, n);
    heads = ggml_relu(ctx0, heads);

    ggml_tensor * score = nullptr;
    for (int64_t h = 0; h < n_head; ++h) {
        ggml_tensor * slice = ggml_view_2d(ctx0, heads, n_blocks, n, heads->nb[2], h*heads->nb[1]);
        score = score ? ggml_add(ctx0, score, slice) : ggml_cont(ctx0, slice);
    }

    ggml_tensor * forced = ggml_repeat_4d(ctx0, inp.blk_start, n_blocks, n, 1, 1);
    forced = ggml_sub  (ctx0, forced, tile_cols(ctx0, sh.tok_tail, begin, n));
    forced = ggml_step (ctx0, forced);
    forced = ggml_scale(ctx0, forced, BLOCK_FORCED);

    return ggml_add(ctx0, score, forced);
}

// mask of the tile [n_kv, n, 1, 1], f16 for flash attention: 0 where selected and visible
ggml_tensor * tile_mask(
        const llm_graph_context & g, const fn_tiled_qsa_input & inp, const shared & sh, int64_t begin, int64_t n, int64_t width, int il) {
    ggml_context * ctx0 = g.ctx0;

    const int64_t n_kv = inp.cell_blk->ne[0];

    ggml_tensor * score = tile_scores(g, inp, sh, begin, n);

    // every cell of a block gets the score of the block
    score = ggml_get_rows(ctx0, ggml_cont(ctx0, ggml_transpose(ctx0, score)), inp.cell_blk);
    score = ggml_cont(ctx0, ggml_transpose(ctx0, score));
    ggml_build_forward_expand(g.gf, score); // only then the mask: two rows of n_kv values per token at any time

    ggml_tensor * row = ggml_view_1d(ctx0, sh.tok_row, n, begin*sh.tok_row->nb[0]);
    ggml_tensor * hidden = ggml_get_rows(ctx0, inp.cell_key, row);
    hidden = ggml_add(ctx0, hidden, tile_cols(ctx0, sh.tok_key, begin, n));
    hidden = ggml_clamp_inplace(ctx0, hidden, -INFINITY, 0.0f);
    g.cb(hidden, "fn_qsa_hidden", il);

    ggml_tensor * top_k = ggml_cont(ctx0, ggml_top_k(ctx0, ggml_add(ctx0, score, hidden), width));
    g.cb(top_k, "indexer_top_k", il);
    ggml_build_forward_expand(g.gf, top_k);

    // fill takes the shape of its source alone
    ggml_tensor * zeros = ggml_view_3d(ctx0, hidden, 1, width, n, hidden->nb[0], width*hidden->nb[0], 0);
    zeros = ggml_fill(ctx0, zeros, 0.0f);

    if (g.cparams.flash_attn) {
        hidden = ggml_cast(ctx0, hidden, GGML_TYPE_F16);
    }

    ggml_tensor * mask = ggml_fill(ctx0, hidden, -INFINITY);
    mask = ggml_set_rows(ctx0, ggml_reshape_3d(ctx0, mask, 1, n_kv, n), zeros, top_k);
    mask = ggml_add(ctx0, ggml_reshape_2d(ctx0, mask, n_kv, n), hidden);
    g.cb(mask, "fn_qsa_mask", il);

    return mask;
}

} // namespace

fn_tiled_qsa_settings fn_tiled_qsa_settings::from_env() {
    fn_tiled_qsa_settings res;

    if (const char * value = std::getenv("FN_TILED_QSA")) {
        const std::string text = value;
        if (text != "0" && text != "1") {
            throw std::runtime_error("FN_TILED_QSA must be 0 or 1, got '" + text + "'");
        }
        res.enabled = text == "1";
    }

    if (const char * value = std::getenv("FN_TILED_QSA_TILE")) {
        char * end = nullptr;
        res.tile = std::strtoll(value, &end, 10);
        if (end == value || *end != '\0' || res.tile < 1 || res.tile > 65536) {
            throw std::runtime_error(std::string("FN_TILED_QSA_TILE must be a number of tokens from 1 to 65536, got '") + value + "'");
        }
    }

    return res;
}

fn_tiles::fn_tiles(int64_t n_tokens, int64_t tile) : count((n_tokens + tile - 1)/tile), n_tokens(n_tokens) {
    GGML_ASSERT(n_tokens > 0 && tile > 0);
}

bool fn_tiled_qsa::applies(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx, int il) const {
    return settings.enabled &&
        mctx != nullptr && mctx->get_idx() != nullptr && is_qsa(g, il) &&
        g.n_tokens >= MIN_TOKENS &&
        mctx->get_n_stream() == 1 &&
        !g.hparams.use_alibi &&
        g.n_tokens*g.n_head*g.n_embd_head_k*(int64_t) sizeof(float) < MAX_QUERY_BYTES;
}

fn_tiled_qsa_input * fn_tiled_qsa::get_input(
        const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx, uint32_t ratio) {
    fn_tiled_qsa_input *& inp = inputs[ratio];
    if (inp == nullptr) {
        auto owned = std::make_unique<fn_tiled_qsa_input>(mctx, ratio, g.cparams.causal_attn);
        owned->build(g.ctx0, g.ubatch);
        inp = owned.get();
        g.res->add_input(std::move(owned));
    }
    return inp;
}

ggml_tensor * fn_tiled_qsa::build(
        const llm_graph_context & g, const llama_model & model, const llama_memory_hybrid_idx_context * mctx,
        llm_graph_input_attn_kv * inp_attn, const fn_tiled_qsa_layer & layer) {
    ggml_context * ctx0 = g.ctx0;
    ggml_cgraph  * gf   = g.gf;

    const auto & weights = model.layers[layer.il];
    const int    il      = layer.il;

    const llama_kv_cache_context * mctx_idx = mctx->get_idx();

    const int64_t n_tokens = g.n_tokens;
    const int64_t ratio    = g.hparams.dsv4_compress_ratios[il];
    const int64_t n_kv     = mctx_idx->get_n_kv();
    const int64_t width    = std::min<int64_t>(n_kv, (int64_t) g.hparams.indexer_top_k + ratio - 1);

    const fn_tiled_qsa_input & inp = *get_input(g, mctx, (uint32_t) ratio);

    shared sh;

    // In this order: with the queries first, the reserve for 2048 tokens is 32 MiB smaller, but micro-batches of 1902 to
    // 2047 tokens do not fit into it (the allocator's gaps differ), and one of them would grow the buffer in mid-prompt.
    build_indexer(g, weights, mctx_idx, inp, layer, sh);
    ggml_tensor * q = store_kv(g, inp_attn, layer, sh);

    // Each tile's result takes the place of its own queries, which nothing reads after it. The chain of sets needs no
    // other buffer and holds the tiles in order.
    const int64_t n_embd_head = q->ne[0];
    const int64_t n_head      = q->ne[1];

    GGML_ASSERT(ggml_is_contiguous(q));
    ggml_tensor * out = ggml_reshape_2d(ctx0, q, n_embd_head*n_head, n_tokens);

    const fn_tiles tiles(n_tokens, std::max(settings.tile, (n_tokens + max_tiles(g) - 1)/max_tiles(g)));

    for (int64_t i = 0; i < tiles.count; ++i) {
        const int64_t begin = tiles.begin(i);
        const int64_t n     = tiles.size(i);

        const int n_nodes = ggml_graph_n_nodes(gf);

        ggml_tensor * mask = tile_mask(g, inp, sh, begin, n, width, il);

        ggml_tensor * q_tile = ggml_view_3d(ctx0, out, n_embd_head, n_head, n,
                ggml_row_size(out->type, n_embd_head), out->nb[1], begin*out->nb[1]);

        ggml_tensor * cur = g.build_attn_mha(q_tile, sh.k, sh.v, nullptr, mask, nullptr, nullptr, width, layer.kq_scale, il);
        g.cb(cur, "kqv_out", il);

        if (inp_attn->self_v_rot) {
            cur = llama_mul_mat_hadamard(ctx0, cur, inp_attn->self_v_rot);
        }

        out = ggml_set_2d_inplace(ctx0, out, cur, out->nb[1], begin*out->nb[1]);
        ggml_build_forward_expand(gf, out);

        GGML_ASSERT(ggml_graph_n_nodes(gf) - n_nodes <= NODES_PER_TILE);
    }

    LLAMA_LOG_DEBUG("fn_tiled_qsa: layer %d, %" PRId64 " tokens in %" PRId64 " tiles, n_kv %" PRId64 ", %d nodes so far\n",
            il, n_tokens, tiles.count, n_kv, ggml_graph_n_nodes(gf));

    return out;
}
