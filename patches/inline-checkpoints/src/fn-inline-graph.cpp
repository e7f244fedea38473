#include "fn-inline-graph.h"

#include <vector>

static ggml_tensor * fn_inline_tokens(ggml_context * ctx, ggml_tensor * t, int64_t begin, int64_t end) {
    return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], end - begin, 1, t->nb[1], t->nb[2], t->nb[3], begin*t->nb[2]);
}

ggml_tensor * fn_inline_delta_net(
        ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, const fn_inline_planes & planes,
        const llama_memory_recurrent_context * mctx, ggml_tensor * states_all, const fn_inline_delta_inputs & in, int il) {
    const int64_t S_v      = in.v->ne[0];
    const int64_t H_v      = in.v->ne[1];
    const int64_t n_tokens = in.v->ne[2];
    const int64_t D        = S_v*S_v*H_v;

    GGML_ASSERT(states_all->type == GGML_TYPE_F32 && states_all->ne[0] == D);

    const auto row = [&](int64_t plane) {
        return ggml_view_1d(ctx, states_all, D, (plane*mctx->get_size() + mctx->get_head())*states_all->nb[1]);
    };

    std::vector<ggml_tensor *> outputs;
    ggml_tensor * state = in.s;
    int64_t       begin = 0;

    const auto add_part = [&](int64_t end, int64_t plane) {
        const auto part = [&](ggml_tensor * t) { return fn_inline_tokens(ctx, t, begin, end); };

        ggml_tensor * net = ggml_gated_delta_net(ctx, part(in.q), part(in.k), part(in.v), part(in.g), part(in.b), state, /*K=*/1);
        res->add_fused_node({ end - begin > 1 ? LLM_FUSED_OP_GDN_CH : LLM_FUSED_OP_GDN_AR, net, il });

        const size_t row_size = ggml_row_size(net->type, S_v);
        outputs.push_back(ggml_view_4d(ctx, net, S_v, H_v, end - begin, 1, row_size, row_size*H_v, row_size*H_v*(end - begin), 0));

        // The next part reads the plane and not the tail of this node: a backend that fuses the two writes the plane alone.
        ggml_tensor * kept = ggml_cpy(ctx, ggml_view_1d(ctx, net, D, row_size*H_v*(end - begin)), row(plane));
        ggml_build_forward_expand(gf, kept);
        state = ggml_reshape_4d(ctx, kept, S_v, S_v, H_v, 1);
        begin = end;
    };

    for (const auto & keep : planes.states) {
        add_part(keep.n_tokens, keep.plane);
    }
    if (begin < n_tokens) {
        add_part(n_tokens, 0);
    } else {
        ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_reshape_1d(ctx, state, D), row(0)));
    }

    ggml_tensor * output = outputs.back();
    for (size_t i = outputs.size() - 1; i-- > 0; ) { // the longest, which is the first as a rule, is copied once
        output = ggml_concat(ctx, outputs[i], output, 2);
    }
    return output;
}
