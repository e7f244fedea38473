#include "fn-mtp-qwen4exp.h"

#include "llama-impl.h"
#include "llama-model-loader.h"

// the first tensor of any trunk: a file without it is a head
static bool fn_mtp_is_head_only(const llama_model_qwen4exp & model) {
    return model.hparams.n_layer_nextn > 0 &&
        model.ml->get_weight(model.tn(LLM_TENSOR_HC_ATTN_NORM, "weight", 0).str().c_str()) == nullptr;
}

static void fn_mtp_load_block(llama_model_qwen4exp & m, int il, int flags) {
    const auto & hparams = m.hparams;

    const int64_t n_embd  = hparams.n_embd;
    const int64_t hc      = hparams.dsv4_hc_mult;
    const int64_t hc_dim  = hc * n_embd;
    const int64_t hc_lr   = hparams.hc_low_rank;
    const int64_t hd      = hparams.n_embd_head_k(il);
    const int64_t n_head  = hparams.n_head(il);
    const int64_t idx_dim = hparams.indexer_head_size;
    const int64_t n_expert   = hparams.n_expert;
    const int64_t n_ff_exp   = hparams.n_ff_exp(il);
    const int64_t n_ff_shexp = hparams.n_ff_shexp;

    // a gamma over the streams loads as [n_embd, hc], so that the norm of one stream multiplies it without a reshape
    const int gamma = flags | m.TENSOR_ALLOW_RESHAPE;

    auto & layer = m.layers[il];
    auto & nextn = layer.nextn;

    auto get = [&](llm_tensor t, const std::initializer_list<int64_t> & ne, int fl) {
        return m.create_tensor(m.tn(t, "weight", il), ne, fl);
    };

    layer.hc_attn_norm   = get(LLM_TENSOR_HC_ATTN_NORM,   { n_embd, hc }, gamma);
    layer.hc_attn_down   = get(LLM_TENSOR_HC_ATTN_DOWN,   { hc_dim, hc_lr }, flags);
    layer.hc_attn_up     = get(LLM_TENSOR_HC_ATTN_UP,     { hc_lr, hc_dim }, flags);
    layer.hc_attn_inject = get(LLM_TENSOR_HC_ATTN_INJECT, { hc_dim, hc }, flags);
    layer.hc_ffn_norm    = get(LLM_TENSOR_HC_FFN_NORM,    { n_embd, hc }, gamma);
    layer.hc_ffn_down    = get(LLM_TENSOR_HC_FFN_DOWN,    { hc_dim, hc_lr }, flags);
    layer.hc_ffn_up      = get(LLM_TENSOR_HC_FFN_UP,      { hc_lr, hc_dim }, flags);
    layer.hc_ffn_inject  = get(LLM_TENSOR_HC_FFN_INJECT,  { hc_dim, hc }, flags);

    // attn_q holds [q|gate] interleaved per head; the graph uses the split projections only
    layer.wq          = get(LLM_TENSOR_ATTN_Q,      { n_embd, hd * n_head * 2 }, flags);
    layer.wk          = get(LLM_TENSOR_ATTN_K,      { n_embd, hparams.n_embd_k_gqa(il) }, flags);
    layer.wv          = get(LLM_TENSOR_ATTN_V,      { n_embd, hparams.n_embd_v_gqa(il) }, flags);
    layer.wo          = get(LLM_TENSOR_ATTN_OUT,    { hd * n_head, n_embd }, flags);
    layer.attn_q_norm = get(LLM_TENSOR_ATTN_Q_NORM, { hd }, flags);
    layer.attn_k_norm = get(LLM_TENSOR_ATTN_K_NORM, { hd }, flags);

    // idle when the block's compress ratio is 0, but the published files carry them either way
    layer.index_q_proj = get(LLM_TENSOR_INDEXER_Q_PROJ, { n_embd, hparams.indexer_n_head * idx_dim }, flags);
    layer.index_k_proj = get(LLM_TENSOR_INDEXER_K_PROJ, { n_embd, idx_dim }, flags);
    layer.index_q_norm = get(LLM_TENSOR_INDEXER_Q_NORM, { idx_dim }, flags);
    layer.index_k_norm = get(LLM_TENSOR_INDEXER_K_NORM, { idx_dim }, flags);

    layer.ffn_gate_inp  = get(LLM_TENSOR_FFN_GATE_INP,  { n_embd, n_expert }, flags);
    layer.ffn_down_exps = get(LLM_TENSOR_FFN_DOWN_EXPS, { n_ff_exp, n_embd, n_expert }, flags);
    m.create_tensor_gate_up_exps(layer, il, n_embd, n_ff_exp, n_expert, flags);

    layer.ffn_gate_inp_shexp = get(LLM_TENSOR_FFN_GATE_INP_SHEXP, { n_embd }, flags);
    layer.ffn_gate_shexp     = get(LLM_TENSOR_FFN_GATE_SHEXP,     { n_embd, n_ff_shexp }, flags);
    layer.ffn_up_shexp       = get(LLM_TENSOR_FFN_UP_SHEXP,       { n_embd, n_ff_shexp }, flags);
    layer.ffn_down_shexp     = get(LLM_TENSOR_FFN_DOWN_SHEXP,     { n_ff_shexp, n_embd }, flags);

    nextn.eh_proj      = get(LLM_TENSOR_NEXTN_EH_PROJ,      { 2 * n_embd, n_embd }, flags);
    nextn.enorm        = get(LLM_TENSOR_NEXTN_ENORM,        { n_embd }, flags);
    nextn.hnorm        = get(LLM_TENSOR_NEXTN_HNORM,        { n_embd, hc }, gamma);
    nextn.hc_head_norm = get(LLM_TENSOR_NEXTN_HC_HEAD_NORM, { n_embd, hc }, gamma);
    nextn.hc_head_down = get(LLM_TENSOR_NEXTN_HC_HEAD_DOWN, { hc_dim, hc_lr }, flags);
    nextn.hc_head_up   = get(LLM_TENSOR_NEXTN_HC_HEAD_UP,   { hc_lr, hc_dim }, flags);
}

bool fn_mtp_qwen4exp_load_tensors(llama_model_qwen4exp & m) {
    const auto & hparams = m.hparams;

    if (hparams.n_layer_nextn == 0) {
        return false;
    }
    if (hparams.n_layer_nextn != 1) {
        throw std::runtime_error(format("%s: one MTP block is supported, the file has %u", __func__, hparams.n_layer_nextn));
    }

    const bool head_only = fn_mtp_is_head_only(m);
    const int  il        = hparams.n_layer();

    // a trunk may announce the block and not carry it: as at the pin, that matters only where MTP is asked for
    if (!head_only && !m.ml->load_mtp && m.ml->get_weight(m.tn(LLM_TENSOR_NEXTN_EH_PROJ, "weight", il).str().c_str()) == nullptr) {
        return false;
    }

    if (head_only) {
        const int64_t n_embd  = hparams.n_embd;
        const int64_t n_vocab = m.vocab.n_tokens();

        // absent in the shared form: the graph borrows them from the target
        m.tok_embd = m.create_tensor(m.tn(LLM_TENSOR_TOKEN_EMBD, "weight"), { n_embd, n_vocab }, m.TENSOR_NOT_REQUIRED);
        m.output   = m.create_tensor(m.tn(LLM_TENSOR_OUTPUT,     "weight"), { n_embd, n_vocab }, m.TENSOR_NOT_REQUIRED);
    }

    // a head that was loaded on its own is wanted; the one inside an embedded file only if MTP was asked for
    const int flags = head_only || m.ml->load_mtp ? 0 : m.TENSOR_SKIP;

    fn_mtp_load_block(m, il, flags);

    return head_only;
}
