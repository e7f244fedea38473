#pragma once

#include "fn-inline-states.h"
#include "llama-graph.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <utility>

// A graph belongs to the states that it writes.
class fn_inline_input : public llm_graph_input_i {
public:
    explicit fn_inline_input(fn_inline_planes planes) : planes(std::move(planes)) {}

    void set_input(const llama_ubatch *) override {}

    bool can_reuse(const llm_graph_params & params) override {
        return static_cast<const llama_memory_hybrid_context *>(params.mctx)->get_recr()->fn_inline(params.ubatch) == planes;
    }

private:
    const fn_inline_planes planes;
};

// What one layer's delta rule is made from, of one sequence.
struct fn_inline_delta_inputs {
    ggml_tensor * q; // F32 [S_k, H_k, n_tokens]
    ggml_tensor * k; // F32 [S_k, H_k, n_tokens]
    ggml_tensor * v; // F32 [S_v, H_v, n_tokens]
    ggml_tensor * g; // F32 [1,   H_v, n_tokens]
    ggml_tensor * b; // F32 [1,   H_v, n_tokens]
    ggml_tensor * s; // F32 [S_v, S_v, H_v], the state before the first token
};

// The delta rule over the tokens part by part, each from the state that the one before has left in its plane of states_all
// (F32 [S_v*S_v*H_v, rows]). Returns F32 [S_v, H_v, n_tokens].
ggml_tensor * fn_inline_delta_net(
        ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, const fn_inline_planes & planes,
        const llama_memory_recurrent_context * mctx, ggml_tensor * states_all, const fn_inline_delta_inputs & in, int il);
