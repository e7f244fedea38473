#include "fn-mtp-qwen4exp.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-memory-hybrid-idx.h"

#include <cstdlib>
#include <cstring>

// Whole-row or per-stream RMS norm of the hidden row: the reference code and the one public measurement disagree, see
// the feature's README. It changes drafts only, never the text.
static bool fn_mtp_hnorm_whole_row() {
    const char * env = getenv("FN_MTP_HNORM");

    if (env == nullptr || strcmp(env, "stream") == 0) {
        return false;
    }
    if (strcmp(env, "row") == 0) {
        return true;
    }

    throw std::runtime_error(format("FN_MTP_HNORM must be 'stream' or 'row', got '%s'", env));
}

// derives from the trunk's graph for its layer builders; the trunk itself is not built
struct fn_graph_mtp_qwen4exp : public llama_model_qwen4exp::graph {
    fn_graph_mtp_qwen4exp(const llama_model & model, const llm_graph_params & params);

    // token embedding and hidden row in, projected residual [n_embd, hc, n_tokens] out
    ggml_tensor * build_inp_residual(int il);

    ggml_tensor * build_attention(ggml_tensor * cur, int il);

    // keeps an input allocated that no node reads, for input objects that fill it all the same
    void build_keep(ggml_tensor * inp);

    // the part of the attention that a batch without outputs leaves behind: its rows in the caches
    void build_store(ggml_tensor * cur, int il);
};

// where the indexer's keys of a batch go; the trunk's input object for it belongs to the selection, which a store skips
class fn_graph_input_index_store : public llm_graph_input_i {
public:
    explicit fn_graph_input_index_store(const llama_memory_hybrid_idx_context * mctx) : mctx(mctx) {}

    void set_input(const llama_ubatch * ubatch) override {
        mctx->get_idx()->set_input_k_idxs(k_idxs, ubatch);
    }

    bool can_reuse(const llm_graph_params & params) override {
        mctx = static_cast<const llama_memory_hybrid_idx_context *>(params.mctx);

        return k_idxs->ne[0] == params.ubatch.n_tokens;
    }

    ggml_tensor * k_idxs = nullptr; // [n_tokens]

    const llama_memory_hybrid_idx_context * mctx;
};

ggml_tensor * fn_graph_mtp_qwen4exp::build_inp_residual(int il) {
    const auto & nextn = model.layers[il].nextn;

    const int64_t hc     = hparams.dsv4_hc_mult;
    const int64_t hc_dim = hc * n_embd;

    auto inp = std::make_unique<llm_graph_input_embd_h>(hc_dim);

    inp->tokens = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_tokens);
    ggml_set_input(inp->tokens);

    inp->embd = ggml_new_tensor_2d(ctx0, GGML_TYPE_F32, hc_dim, n_tokens);
    ggml_set_input(inp->embd);

    inp->h = ggml_new_tensor_2d(ctx0, GGML_TYPE_F32, hc_dim, n_tokens);
    ggml_set_input(inp->h);
    ggml_set_name(inp->h, "mtp_h_input");

    ggml_tensor * tokens = inp->tokens;
    ggml_tensor * h      = inp->h;
    res->add_input(std::move(inp));

    const llama_model * embd_owner = model.tok_embd ? &model : cparams.fn_mtp_target;
    GGML_ASSERT(embd_owner && embd_owner->tok_embd && "the MTP head has no token embeddings");

    ggml_tensor * e = ggml_get_rows(ctx0, embd_owner->tok_embd, tokens);
    e = build_norm(e, nextn.enorm, nullptr, LLM_NORM_RMS, il);
    e = ggml_repeat_4d(ctx0, ggml_reshape_3d(ctx0, e, n_embd, 1, n_tokens), n_embd, hc, n_tokens, 1);
    cb(e, "mtp_enorm", il);

    if (fn_mtp_hnorm_whole_row()) {
        h = ggml_rms_norm(ctx0, h, hparams.f_norm_rms_eps);
        h = ggml_reshape_3d(ctx0, h, n_embd, hc, n_tokens);
    } else {
        h = ggml_reshape_3d(ctx0, h, n_embd, hc, n_tokens);
        h = ggml_rms_norm(ctx0, h, hparams.f_norm_rms_eps);
    }
    h = ggml_mul(ctx0, h, nextn.hnorm);
    cb(h, "mtp_hnorm", il);

    // embedding columns first; one matmul over all streams of all tokens
    ggml_tensor * eh = ggml_concat(ctx0, e, h, 0);
    eh = ggml_reshape_2d(ctx0, eh, 2*n_embd, hc*n_tokens);

    ggml_tensor * cur = build_lora_mm(nextn.eh_proj, eh, nextn.eh_proj_s);
    cb(cur, "mtp_eh_proj", il);

    return ggml_reshape_3d(ctx0, cur, n_embd, hc, n_tokens);
}

void fn_graph_mtp_qwen4exp::build_keep(ggml_tensor * inp) {
    // a view and not the bare input: the allocator notices a leaf that has grown through a node that reads it only
    ggml_build_forward_expand(gf, ggml_view_1d(ctx0, inp, 1, 0));
}

ggml_tensor * fn_graph_mtp_qwen4exp::build_attention(ggml_tensor * cur, int il) {
    int sections[4];
    std::copy(std::begin(hparams.rope_sections), std::begin(hparams.rope_sections) + 4, sections);

    ggml_tensor * inp_pos = build_inp_pos();

    if (hparams.dsv4_compress_ratios[il] == 0) {
        return build_layer_attn(build_attn_inp_kv(), nullptr, cur, inp_pos, sections, il);
    }

    auto * inp = build_inp_mem_hybrid();

    build_keep(inp->get_recr()->s_copy); // there is no recurrent layer

    return build_layer_attn(inp->get_attn(), static_cast<const llama_memory_hybrid_idx_context *>(inp->mctx), cur, inp_pos, sections, il);
}

void fn_graph_mtp_qwen4exp::build_store(ggml_tensor * cur, int il) {
    const auto & layer = model.layers[il];

    const int64_t hd     = hparams.n_embd_head_k(il);
    const int64_t n_kv_h = hparams.n_head_kv(il);

    int sections[4];
    std::copy(std::begin(hparams.rope_sections), std::begin(hparams.rope_sections) + 4, sections);

    llm_graph_input_attn_kv * inp = nullptr;

    if (hparams.dsv4_compress_ratios[il] == 0) {
        inp = build_attn_inp_kv();
    } else {
        auto * inp_hyb = build_inp_mem_hybrid();
        inp = inp_hyb->get_attn();

        build_keep(inp_hyb->get_recr()->s_copy);
        build_keep(inp->self_kq_mask);

        const auto * mctx_hyb = static_cast<const llama_memory_hybrid_idx_context *>(inp_hyb->mctx);

        auto store = std::make_unique<fn_graph_input_index_store>(mctx_hyb);
        store->k_idxs = mctx_hyb->get_idx()->build_input_k_idxs(ctx0, ubatch);

        ggml_tensor * k_raw = build_lora_mm(layer.index_k_proj, cur);
        k_raw = ggml_reshape_3d(ctx0, k_raw, hparams.indexer_head_size, 1, n_tokens);
        ggml_build_forward_expand(gf, mctx_hyb->get_idx()->cpy_k(ctx0, k_raw, store->k_idxs, il));

        res->add_input(std::move(store));
    }

    ggml_tensor * k = build_lora_mm(layer.wk, cur, layer.wk_s);
    k = ggml_reshape_3d(ctx0, k, hd, n_kv_h, n_tokens);
    k = build_norm(k, layer.attn_k_norm, nullptr, LLM_NORM_RMS, il);
    k = ggml_rope_multi(ctx0, k, build_inp_pos(), nullptr, n_rot, sections, rope_type, n_ctx_orig, freq_base, freq_scale,
            ext_factor, attn_factor, beta_fast, beta_slow);

    ggml_tensor * v = build_lora_mm(layer.wv, cur, layer.wv_s);
    v = ggml_reshape_3d(ctx0, v, hd, n_kv_h, n_tokens);

    // a quantised cache stores rotated rows
    if (inp->self_k_rot) {
        k = llama_mul_mat_hadamard(ctx0, k, inp->self_k_rot);
    }
    if (inp->self_v_rot) {
        v = llama_mul_mat_hadamard(ctx0, v, inp->self_v_rot);
    }

    ggml_build_forward_expand(gf, inp->mctx->cpy_k(ctx0, k, inp->get_k_idxs(), il));
    ggml_build_forward_expand(gf, inp->mctx->cpy_v(ctx0, v, inp->get_v_idxs(), il));
}

fn_graph_mtp_qwen4exp::fn_graph_mtp_qwen4exp(const llama_model & model, const llm_graph_params & params) :
    llama_model_qwen4exp::graph(model, params, nullptr) {
    const int    il    = hparams.n_layer();
    const auto & layer = model.layers[il];
    const auto & nextn = layer.nextn;

    GGML_ASSERT(nextn.eh_proj && "the MTP block was not loaded");
    GGML_ASSERT(ubatch.token  && "an MTP step needs tokens beside the hidden rows");

    const int64_t hc = hparams.dsv4_hc_mult;

    ggml_tensor * res_hc = build_inp_residual(il);
    ggml_build_forward_expand(gf, res_hc);

    ggml_tensor * inject = nullptr;
    ggml_tensor * cur = build_hc_mix(res_hc, layer.hc_attn_norm, layer.hc_attn_down, layer.hc_attn_up, layer.hc_attn_inject, &inject, il);

    // catch-up over a prompt or a verified batch: nothing is sampled
    if (n_outputs == 0) {
        build_store(cur, il);
        return;
    }

    cur = build_attention(cur, il);

    ggml_tensor * inp_out_ids = build_inp_out_ids();

    // below the attention everything is per token
    cur    = ggml_get_rows(ctx0, cur,    inp_out_ids);
    inject = ggml_get_rows(ctx0, inject, inp_out_ids);
    res_hc = ggml_get_rows(ctx0, ggml_reshape_2d(ctx0, res_hc, n_embd*hc, n_tokens), inp_out_ids);
    res_hc = ggml_reshape_3d(ctx0, res_hc, n_embd, hc, n_outputs);

    res_hc = build_hc_combine(res_hc, cur, inject, il);

    cur = build_hc_mix(res_hc, layer.hc_ffn_norm, layer.hc_ffn_down, layer.hc_ffn_up, layer.hc_ffn_inject, &inject, il);
    cur = build_layer_ffn(cur, il);

    res_hc = build_hc_combine(res_hc, cur, inject, il);

    // the next draft step takes this row as its hidden input
    res->t_h_nextn = res_hc;
    cb(res_hc, "h_nextn", -1);

    cur = build_hc_mix(res_hc, nextn.hc_head_norm, nextn.hc_head_down, nextn.hc_head_up, nullptr, nullptr, -1);
    cb(cur, "result_norm", -1);
    res->t_embd = cur;

    const llama_model * output_owner = model.output ? &model : cparams.fn_mtp_target;
    GGML_ASSERT(output_owner && output_owner->output && "the MTP head has no output projection");

    cur = build_lora_mm(output_owner->output, cur, output_owner->output_s);
    cb(cur, "result_output", -1);
    res->t_logits = cur;

    ggml_build_forward_expand(gf, cur);
}

std::unique_ptr<llm_graph_context> fn_mtp_qwen4exp_build_graph(const llama_model_qwen4exp & model, const llm_graph_params & params) {
    return std::make_unique<fn_graph_mtp_qwen4exp>(model, params);
}

bool fn_mtp_qwen4exp_keeps_rows(const llama_cparams & cparams) {
    return cparams.embeddings_nextn && !cparams.embeddings_nextn_masked;
}

bool fn_mtp_qwen4exp_exports(const llama_model & model, const llama_cparams & cparams) {
    return model.arch == LLM_ARCH_QWEN4EXP && cparams.ctx_type == LLAMA_CONTEXT_TYPE_DEFAULT && cparams.embeddings_nextn;
}

ggml_tensor * fn_mtp_qwen4exp_export(llm_graph_result * res, ggml_context * ctx0, const llama_cparams & cparams,
        ggml_tensor * res_hc, ggml_tensor * inp_out_ids) {
    if (!cparams.embeddings_nextn) {
        return res_hc;
    }

    // the tensor itself and not a view of it: the allocator keeps what is marked as an output, and would give the memory
    // behind a view to the nodes that follow
    res->t_h_nextn = res_hc;
    ggml_set_name(res_hc, "h_nextn");

    if (!fn_mtp_qwen4exp_keeps_rows(cparams) || inp_out_ids == nullptr) {
        return res_hc;
    }

    const int64_t n_embd = res_hc->ne[0];
    const int64_t hc     = res_hc->ne[1];

    ggml_tensor * rows = ggml_reshape_2d(ctx0, res_hc, n_embd*hc, res_hc->ne[2]);
    rows = ggml_get_rows(ctx0, rows, inp_out_ids);

    return ggml_reshape_3d(ctx0, rows, n_embd, hc, rows->ne[1]);
}
