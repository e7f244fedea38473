#include "fn-lean-graph.h"

#include "fn-lean-impl.h"

#include "llama-cparams.h"
#include "llama-graph.h"

#include <cstring>

// A layer's splits:
//
//   device  router                      -> ids, made contiguous
//   CPU     stop: waits for the experts -> ids
//   device  the experts from staging memory

// tells the rings what a graph will read before it runs
class fn_graph_input_lean : public llm_graph_input_i {
public:
    explicit fn_graph_input_lean(fn_lean & lean) : lean(lean) {
        for (const auto & device : lean.devices) {
            next.push_back(device->ring->first_place());
        }
        first = next;
    }

    void set_input(const llama_ubatch * ubatch) override {
        lean.begin_pass(uses, ubatch->n_tokens);
    }

    // the places go round from one pass to the next
    bool can_reuse(const llm_graph_params & params) override {
        GGML_UNUSED(params);
        for (size_t i = 0; !uses.empty() && i < first.size(); ++i) {
            if (lean.devices[i]->ring->first_place() != first[i]) {
                return false;
            }
        }
        return true;
    }

    int32_t add(int32_t layer, bool whole) {
        int32_t & at = next[lean.layers[layer]->device];
        const int32_t place = lean.layers[layer]->own_place >= 0 ? lean.layers[layer]->own_place : at;
        at = (at + 1) % lean.n_ring;
        uses.push_back({ layer, place, whole });
        return place;
    }

private:
    fn_lean & lean;

    std::vector<fn_lean_use> uses;
    std::vector<int32_t>     next;  // per device
    std::vector<int32_t>     first; // per device
};

static fn_graph_input_lean & fn_lean_input(const llm_graph_context & graph, fn_lean & lean) {
    for (auto & other : graph.res->inputs) {
        if (auto * input = dynamic_cast<fn_graph_input_lean *>(other.get())) {
            return *input;
        }
    }
    return *(fn_graph_input_lean *) graph.res->add_input(llm_graph_input_ptr(new fn_graph_input_lean(lean)));
}

static void fn_op_lean_stop(ggml_tensor * dst, int ith, int nth, void * userdata) {
    GGML_ASSERT(ith == 0 && nth == 1);

    const int64_t t_reached = ggml_time_us();

    const fn_lean_stop & stop = *(const fn_lean_stop *) userdata;
    memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
    stop.lean->reach(stop, (const int32_t *) dst->data, ggml_nelements(dst), t_reached);
}

void fn_lean_build(const llm_graph_context & graph, int64_t n_rows, ggml_tensor *& ids, ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& down, int il) {
    fn_lean * lean = graph.cparams.fn_staging;
    if (!lean || graph.cparams.warmup) {
        return;
    }
    const int32_t index = lean->index_of(il);
    if (index < 0) {
        return;
    }
    // also without a layer for it: a plain micro-batch is counted, and has to see the slots at rest
    fn_graph_input_lean & input = fn_lean_input(graph, *lean);

    // the last layer may have fewer rows than the micro-batch has tokens; adapters are found by the stock tensor
    if (!lean->takes(graph.ubatch.n_tokens) || n_rows < lean->min_tokens || !graph.loras->empty() || ids->ne[0] != lean->n_used) {
        return;
    }
    const int32_t place = input.add(index, lean->whole(n_rows));

    // ids travel as floats by bit pattern: every operation on them is a copy
    ggml_tensor * ids_f32 = ggml_view_2d(graph.ctx0, ids, ids->ne[0], ids->ne[1], ids->nb[1], 0);
    ids_f32->type = GGML_TYPE_F32;
    ids_f32 = ggml_cont(graph.ctx0, ids_f32);
    graph.cb(ids_f32, "fn_lean_ids", il);

    ids = ggml_custom_4d(graph.ctx0, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, &ids_f32, 1, fn_op_lean_stop, 1, lean->stops[index*lean->n_ring + place].get());
    graph.cb(ids, "fn_lean_stop", il);
    ggml_backend_sched_set_tensor_backend(graph.sched, ids, graph.backend_cpu);

    const fn_lean_layer & layer = *lean->layers[index];
    gate = layer.dst[0][place];
    up   = layer.dst[1][place];
    down = layer.dst[2][place];
}
