#pragma once

// Sparse attention of qwen4exp (QSA) in tiles of tokens inside the micro-batch: what is n_kv x n_tokens in the
// upstream graph (scores, masks, bias) becomes n_kv x tile. See README.md of the feature tiled-qsa.

#include <cstdint>
#include <map>

struct ggml_tensor;
struct llama_model;
struct llm_graph_context;
class  llama_memory_hybrid_idx_context;
class  llm_graph_input_attn_kv;
class  fn_tiled_qsa_input;

// FN_TILED_QSA = 0 | 1 (default 1), FN_TILED_QSA_TILE = tokens per tile (default 128)
// throws std::runtime_error on any other value: a typing error must not silently choose the other arm of a comparison
struct fn_tiled_qsa_settings {
    bool    enabled = true;
    int64_t tile    = 128;

    static fn_tiled_qsa_settings from_env();
};

// tiles of at most `tile` tokens, all within one token of each other: with two or more, each has at least tile/2
// (a short last tile would switch kernels, see README.md)
struct fn_tiles {
    fn_tiles(int64_t n_tokens, int64_t tile);

    int64_t count;

    int64_t begin(int64_t i) const { return i*n_tokens/count; }
    int64_t size (int64_t i) const { return begin(i + 1) - begin(i); }

private:
    int64_t n_tokens;
};

// what build_layer_attn has at hand, over the whole micro-batch
struct fn_tiled_qsa_layer {
    ggml_tensor * cur;      // [n_embd, n_tokens], block input: the indexer projects it
    ggml_tensor * inp_pos;
    ggml_tensor * q;        // [n_embd_head, n_head, n_tokens], roped; the result takes its place
    ggml_tensor * k;        // [n_embd_head, n_head_kv, n_tokens], roped
    ggml_tensor * v;        // [n_embd_head, n_head_kv, n_tokens]
    ggml_tensor * gate;     // used after the attention, computed before it: its source is twice as large
    int         * sections;
    float         kq_scale;
    int           il;
};

// one per graph under construction
class fn_tiled_qsa {
public:
    // whether this layer's attention is built here; the stock graph then builds no top-k for it
    bool applies(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx, int il) const;

    // [n_embd_head*n_head, n_tokens], as llama_model_qwen4exp::graph::build_attn_qsa returns it
    ggml_tensor * build(
            const llm_graph_context & g, const llama_model & model, const llama_memory_hybrid_idx_context * mctx,
            llm_graph_input_attn_kv * inp_attn, const fn_tiled_qsa_layer & layer);

private:
    fn_tiled_qsa_input * get_input(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx, uint32_t ratio);

    const fn_tiled_qsa_settings settings = fn_tiled_qsa_settings::from_env();

    // layers of one compress ratio share one set of inputs
    std::map<uint32_t, fn_tiled_qsa_input *> inputs;
};
