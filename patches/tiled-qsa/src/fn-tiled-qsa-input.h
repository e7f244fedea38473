#pragma once

#include "llama-graph.h"

class llama_memory_hybrid_idx_context;

// Inputs of the tiled attention: a value per cell, per block or per token, never per pair of them.
//
// Keys are exact integers below 2^24, those of cells and tokens scaled by 2^100 (exact too). A cell is visible to a
// token iff min(0, cell_key + tok_key) is 0; otherwise the sum is at most -2^100, which sorts below every score (they
// are rectified) and is -inf as an f16 mask.
class fn_tiled_qsa_input : public llm_graph_input_i {
public:
    fn_tiled_qsa_input(const llama_memory_hybrid_idx_context * mctx, uint32_t ratio, bool causal_attn) :
        mctx(mctx), ratio(ratio), causal_attn(causal_attn) {}
    virtual ~fn_tiled_qsa_input() = default;

    void build(ggml_context * ctx, const llama_ubatch & ubatch);

    void set_input(const llama_ubatch * ubatch) override;

    bool can_reuse(const llm_graph_params & params) override;

    ggml_tensor * k_idxs    = nullptr;   // I64 [n_tokens]
    ggml_tensor * cell_blk  = nullptr;   // I32 [n_kv]               block of each cell
    ggml_tensor * blk_cells = nullptr;   // I32 [ratio*n_blocks]     cells of each block
    ggml_tensor * blk_pos   = nullptr;   // I32 [4*n_blocks]         mrope position rows of each block's first token
    ggml_tensor * blk_start = nullptr;   // F32 [n_blocks]           position where each block starts
    ggml_tensor * cell_key  = nullptr;   // F32 [n_kv, n_seqs_unq]   minus the position of each cell, per sequence
    ggml_tensor * tok_key   = nullptr;   // F32 [1, n_tokens]        position of each token
    ggml_tensor * tok_tail  = nullptr;   // F32 [1, n_tokens]        last position before each token's incomplete block
    ggml_tensor * tok_row   = nullptr;   // I32 [n_tokens]           row of cell_key

private:
    const llama_memory_hybrid_idx_context * mctx;
    const uint32_t ratio;

    // part of the key for graph reuse (llm_graph_params::allow_reuse)
    const bool causal_attn;
};
