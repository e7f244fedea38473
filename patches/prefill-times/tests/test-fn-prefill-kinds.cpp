// What the nodes of a graph are taken for, on graphs as the model's builder and the scheduler leave them.

#include "fn-prefill-kinds.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

struct builder {
    ggml_context * ctx = ggml_init({ 4u << 20, nullptr, true });
    ggml_cgraph *  gf  = ggml_new_graph(ctx);

    ~builder() {
        ggml_free(ctx);
    }

    ggml_tensor * leaf(const char * name) {
        return ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 8, 8), name);
    }

    ggml_tensor * mm(const char * weight, ggml_tensor * x, const char * name = "") {
        return ggml_set_name(ggml_mul_mat(ctx, leaf(weight), x), name);
    }

    // "kind kind ...", a copy before a piece as +, an upload as ^
    std::string pieces(const ggml_tensor * other_device = nullptr) {
        std::string out;
        int last = -1;
        for (const fn_prefill_piece & p : fn_prefill_pieces(gf, [](int il) { return il == 0; },
                [&](ggml_tensor * t) { return t == other_device ? (const void *) this : nullptr; })) {
            CHECK(p.begin > last);
            last = p.begin;
            out += std::string(out.empty() ? "" : " ") + (p.copies == FN_PREFILL_COPY ? "+" : p.copies == FN_PREFILL_COPY_WEIGHTS ? "^" : "") +
                fn_prefill_kind_name(p.kind);
        }
        return out;
    }
};

// layer 0 has linear attention, every other one full attention: the same names mean either
static void test_layers() {
    for (const int il : { 0, 3 }) {
        builder b;
        const std::string n = std::to_string(il), blk = "blk." + n + ".";
        ggml_tensor * x = b.leaf("inp_embd");

        ggml_tensor * norm = ggml_rms_norm(b.ctx, x, 1e-6f); // unnamed: for what reads it
        ggml_tensor * mix  = b.mm((blk + "hc_attn_down.weight").c_str(), norm, ("hc_mixed-" + n).c_str());

        ggml_tensor * q = b.mm((blk + "attn_q.weight").c_str(), mix);
        q = ggml_set_name(ggml_rms_norm(b.ctx, q, 1e-6f), ("norm-" + n).c_str());
        ggml_tensor * out = ggml_set_name(ggml_silu(b.ctx, q), ("attn_output-" + n).c_str());

        out = b.mm((blk + "ffn_gate_inp.weight").c_str(), out, ("ffn_moe_logits-" + n).c_str());
        out = ggml_soft_max(b.ctx, out);
        out = ggml_set_name(ggml_silu(b.ctx, out), ("ffn_out-" + n).c_str());
        ggml_build_forward_expand(b.gf, b.mm("output.weight", out, "result_output"));

        CHECK(b.pieces() == std::string("+residual ") + (il == 0 ? "linear_attention" : "attention") + " experts other");
    }
}

static void test_sparse_attention() {
    builder b;
    ggml_tensor * x = b.leaf("inp_embd");
    ggml_tensor * score = b.mm("blk.3.indexer.q_proj.weight", x);
    score = ggml_set_name(ggml_rms_norm(b.ctx, score, 1e-6f), "norm-3");
    score = ggml_set_name(ggml_relu(b.ctx, score), "indexer_score-3");

    // the cache's store has no reader
    ggml_tensor * cache = b.leaf("cache_k_l3");
    ggml_build_forward_expand(b.gf, score);
    ggml_build_forward_expand(b.gf, ggml_cpy(b.ctx, ggml_relu(b.ctx, x), ggml_view_1d(b.ctx, cache, 64, 0)));

    ggml_tensor * sel = ggml_set_name(ggml_cont(b.ctx, ggml_top_k(b.ctx, score, 2)), "indexer_top_k-3");
    ggml_build_forward_expand(b.gf, sel);
    ggml_tensor * mask = ggml_fill(b.ctx, b.leaf("self_kq_mask"), 0.0f);
    ggml_build_forward_expand(b.gf, ggml_set_name(ggml_silu(b.ctx, mask), "kq-3"));

    CHECK(b.pieces() == "+indexer attention top_k attention");
}

// as after the scheduler: sources replaced by copies
static void test_copies() {
    builder b;
    ggml_tensor * x = ggml_set_name(ggml_relu(b.ctx, b.leaf("inp_embd")), "ffn_norm-0");
    ggml_tensor * up = b.mm("CUDA0#blk.0.ffn_up_exps.weight#0", x, "ffn_moe_up-0");
    ggml_tensor * gate = b.mm("CUDA0#blk.0.ffn_gate_exps.weight#0", up, "ffn_moe_gate-0");
    ggml_tensor * stop = ggml_set_name(ggml_relu(b.ctx, gate), "fn_lean_stop-0");
    ggml_tensor * copy = b.leaf("CUDA0#fn_lean_stop-0#0");
    ggml_tensor * down = ggml_set_name(ggml_add(b.ctx, stop, copy), "ffn_moe_down-0");
    ggml_tensor * same = ggml_set_name(ggml_add(b.ctx, down, copy), "l_last-0"); // the copy is there already
    ggml_build_forward_expand(b.gf, same);

    CHECK(b.pieces(stop) == "+experts ^experts ^experts +wait +experts residual");
    CHECK(b.pieces()     == "+experts ^experts ^experts wait experts residual");
}

// both convolutions of a layer keep their history alike: the store says whose it is
static void test_stores() {
    builder b;
    for (const char * name : { "cache_ple_r_l0", "cache_r_l0", "cache_s_l0", "cache_v_l3", "cache_idx_k_l3" }) {
        ggml_tensor * rows = ggml_set_name(ggml_relu(b.ctx, b.leaf("x")), "conv_state_at-0");
        ggml_build_forward_expand(b.gf, ggml_cpy(b.ctx, rows, ggml_view_1d(b.ctx, b.leaf(name), 64, 0)));
    }
    CHECK(b.pieces() == "+other linear_attention attention indexer");
}

static void test_views_begin_nothing() {
    builder b;
    ggml_tensor * x = ggml_set_name(ggml_relu(b.ctx, b.leaf("inp_embd")), "ffn_out-0");
    ggml_tensor * view = ggml_set_name(ggml_reshape_1d(b.ctx, x, 64), "z-0");
    ggml_build_forward_expand(b.gf, ggml_set_name(ggml_relu(b.ctx, view), "ffn_out-1"));
    CHECK(b.pieces() == "+experts");

    builder empty;
    CHECK(empty.pieces().empty());
}

int main() {
    test_layers();
    test_sparse_attention();
    test_copies();
    test_stores();
    test_views_begin_nothing();
    printf("ok\n");
    return 0;
}
