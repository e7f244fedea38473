#include "fn-expert-graph.h"

#include "fn-expert-cache-impl.h"

#include "llama-cparams.h"
#include "llama-graph.h"

#include "ggml.h"
#include "ggml-backend.h"

#include <cstring>

// How a layer runs (one split of the scheduler per line):
//
//   device  router, ...                     -> pack   [n_embd + 2*n_used, n_tokens] hidden row, weights, ids
//   CPU     stage: look up, start the misses -> staged [n_used, n_tokens, 2]        slot ids, weights of the hits
//   device  experts of the hits over the slots, shared expert
//   CPU     join: start the uploads, wait for the misses
//   device  sum of both
//
// One tensor each way: every copy between backends costs a synchronization.

// begins a step before the graph runs, and keeps a graph from being used again after the slots have moved
class fn_graph_input_cache : public llm_graph_input_i {
public:
    explicit fn_graph_input_cache(fn_expert_cache & cache) : cache(cache), generation(cache.generation) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);
        cache.begin_step();
    }

    bool can_reuse(const llm_graph_params & params) override {
        GGML_UNUSED(params);
        return cache.phase == FN_EXPERT_CACHE_READY && cache.generation == generation;
    }

private:
    fn_expert_cache & cache;
    const uint64_t    generation;
};

class fn_graph_input_routing : public llm_graph_input_i {
public:
    explicit fn_graph_input_routing(fn_expert_cache & cache) : cache(cache) {}

    void set_input(const llama_ubatch * ubatch) override {
        const fn_routing_trace & trace = *cache.trace;
        for (size_t i = 0; i < ids.size(); ++i) {
            const int64_t n_rows = ids[i]->ne[1];
            for (int64_t t = 0; t < n_rows; ++t) {
                ggml_backend_tensor_set(ids[i], trace.row(cache.n_trace + t, index[i]), t*ids[i]->nb[1], trace.n_used*sizeof(int32_t));
            }
        }
        cache.n_trace += ubatch->n_tokens;
    }

    bool can_reuse(const llm_graph_params & params) override {
        GGML_UNUSED(params);
        return true; // the graph's own parameters fix the number of rows
    }

    std::vector<ggml_tensor *> ids;
    std::vector<int32_t>       index;

private:
    fn_expert_cache & cache;
};

static bool fn_batch_admitted(const llm_graph_context & graph) {
    return !graph.cparams.warmup && graph.ubatch.n_tokens <= FN_EXPERT_CACHE_MAX_TOKENS && graph.loras->empty();
}

ggml_tensor * fn_expert_routing_override(const llm_graph_context & graph, int64_t n_rows, int il) {
    fn_expert_cache * cache = graph.cparams.fn_cache;
    if (!cache || !cache->trace || !fn_batch_admitted(graph) || cache->index_of(il) < 0 || n_rows == 0) {
        return nullptr;
    }

    fn_graph_input_routing * input = nullptr;
    for (auto & other : graph.res->inputs) {
        input = dynamic_cast<fn_graph_input_routing *>(other.get());
        if (input) {
            break;
        }
    }
    if (!input) {
        input = (fn_graph_input_routing *) graph.res->add_input(llm_graph_input_ptr(new fn_graph_input_routing(*cache)));
    }

    ggml_tensor * ids = ggml_new_tensor_2d(graph.ctx0, GGML_TYPE_I32, cache->trace->n_used, n_rows);
    ggml_set_input(ids);

    input->ids  .push_back(ids);
    input->index.push_back(cache->index_of(il));

    return ids;
}

static void fn_op_stage(ggml_tensor * dst, int ith, int nth, void * userdata) {
    GGML_ASSERT(ith == 0 && nth == 1);

    const fn_cache_layer & layer = *(const fn_cache_layer *) userdata;
    fn_expert_cache & cache = *layer.cache;

    const ggml_tensor * pack = dst->src[0];

    const int64_t n_used   = dst->ne[0];
    const int64_t n_tokens = dst->ne[1];
    const int64_t n_embd   = pack->ne[0] - 2*n_used;
    const int64_t stride   = pack->nb[1]/sizeof(float);

    const float * rows = (const float *) pack->data;

    cache.ids     .resize(n_used*n_tokens);
    cache.slot_ids.resize(n_used*n_tokens);
    cache.hits    .resize(n_used*n_tokens);
    cache.weights .resize(n_used*n_tokens);

    for (int64_t t = 0; t < n_tokens; ++t) {
        const float * tail = rows + t*stride + n_embd;
        memcpy(cache.weights.data() + t*n_used, tail,          n_used*sizeof(float));
        memcpy(cache.ids    .data() + t*n_used, tail + n_used, n_used*sizeof(int32_t));
    }
    for (const int32_t id : cache.ids) {
        GGML_ASSERT(id >= 0 && id < cache.n_expert);
    }

    cache.core->route(layer.index, cache.ids.data(), (int32_t) n_tokens, cache.slot_ids.data(), cache.hits.data());

    cache.miss->start(layer.host, rows, stride, cache.ids.data(), cache.hits.data(), (int32_t) n_used, (int32_t) n_tokens, cache.serial);

    memcpy(dst->data, cache.slot_ids.data(), n_used*n_tokens*sizeof(int32_t));

    float * masked = (float *) dst->data + n_used*n_tokens;
    for (int64_t i = 0; i < n_used*n_tokens; ++i) {
        masked[i] = cache.hits[i] ? cache.weights[i] : 0.0f;
    }

    if (cache.dump) {
        cache.dump->write(cache.n_steps, layer.index, (int32_t) n_used, (int32_t) n_tokens,
                cache.ids.data(), cache.slot_ids.data(), cache.hits.data(), cache.core->lru(layer.index).inserts());
    }
}

static void fn_op_join(ggml_tensor * dst, int ith, int nth, void * userdata) {
    GGML_ASSERT(ith == 0 && nth == 1);

    const fn_cache_layer & layer = *(const fn_cache_layer *) userdata;
    fn_expert_cache & cache = *layer.cache;

    // the device has its work: time to queue the copies, which the misses hide
    cache.core->start_uploads(layer.index);
    cache.miss->finish();

    const int64_t n_embd = dst->ne[0];
    const int64_t n_used = dst->src[0]->ne[0];

    float * out = (float *) dst->data;
    memset(out, 0, ggml_nbytes(dst));

    for (int32_t i = 0; i < cache.miss->n_rows(); ++i) {
        const int32_t lane = cache.miss->row_lane(i);
        const float * y    = cache.miss->row_out(i);
        const float   w    = cache.weights[lane];

        // rows are ordered by token and lane: the sum has one order whatever the threads did
        float * o = out + (cache.merge ? lane : lane/n_used)*n_embd;
        for (int64_t k = 0; k < n_embd; ++k) {
            o[k] += y[k]*w;
        }
    }
}

// sum over the lanes in the order of the stock graph
static ggml_tensor * fn_sum_lanes(const llm_graph_context & graph, ggml_tensor * experts, int64_t n_used) {
    ggml_context * ctx0 = graph.ctx0;

    ggml_build_forward_expand(graph.gf, experts);

    ggml_tensor * lanes[LLAMA_MAX_EXPERTS] = {};
    for (int64_t i = 0; i < n_used; ++i) {
        lanes[i] = ggml_view_2d(ctx0, experts, experts->ne[0], experts->ne[2], experts->nb[2], i*experts->nb[1]);
        ggml_build_forward_expand(graph.gf, lanes[i]);
    }
    ggml_tensor * sum = lanes[0];
    for (int64_t i = 1; i < n_used; ++i) {
        sum = ggml_add(ctx0, sum, lanes[i]);
        ggml_build_forward_expand(graph.gf, sum);
    }
    return n_used > 1 ? sum : ggml_cont(ctx0, sum);
}

ggml_tensor * fn_expert_cache_build(const llm_graph_context & graph, ggml_tensor * cur, ggml_tensor * ids, ggml_tensor * weights, int il) {
    fn_expert_cache * cache = graph.cparams.fn_cache;
    if (!cache || !cache->core || cache->phase != FN_EXPERT_CACHE_READY || !fn_batch_admitted(graph)) {
        return nullptr;
    }

    const int32_t index = cache->index_of(il);

    const int64_t n_embd   = cur->ne[0];
    const int64_t n_tokens = cur->ne[1];
    const int64_t n_used   = ids->ne[0];

    // the last layer computes only the rows that are asked for, which may be none
    if (index < 0 || n_tokens == 0) {
        return nullptr;
    }
    GGML_ASSERT(n_used == cache->n_used);

    fn_cache_layer      & layer = cache->layers[index];
    const fn_slot_layer & slots = cache->slots->layers[index];

    ggml_context * ctx0 = graph.ctx0;
    ggml_cgraph  * gf   = graph.gf;

    if (index == 0) {
        graph.res->add_input(llm_graph_input_ptr(new fn_graph_input_cache(*cache)));
    }

    // the ids travel as floats by bit pattern: every operation on them is a copy
    ggml_tensor * ids_f32 = ggml_view_2d(ctx0, ids, n_used, n_tokens, ids->nb[1], 0);
    ids_f32->type = GGML_TYPE_F32;

    ggml_tensor * pack = ggml_concat(ctx0, ggml_reshape_2d(ctx0, cur, n_embd, n_tokens), ggml_reshape_2d(ctx0, weights, n_used, n_tokens), 0);
    pack = ggml_concat(ctx0, pack, ids_f32, 0);
    graph.cb(pack, "fn_cache_pack", il);

    ggml_tensor * staged = ggml_custom_4d(ctx0, GGML_TYPE_F32, n_used, n_tokens, 2, 1, &pack, 1, fn_op_stage, 1, &layer);
    graph.cb(staged, "fn_cache_stage", il);
    ggml_backend_sched_set_tensor_backend(graph.sched, staged, graph.backend_cpu);

    // one copy to the device, views there
    ggml_tensor * lanes = ggml_cont(ctx0, staged);
    graph.cb(lanes, "fn_cache_lanes", il);

    ggml_tensor * slot_ids = ggml_view_2d(ctx0, lanes, n_used, n_tokens, lanes->nb[1], 0);
    slot_ids->type = GGML_TYPE_I32;

    ggml_tensor * masked = ggml_view_3d(ctx0, lanes, 1, n_used, n_tokens, lanes->nb[0], lanes->nb[1], lanes->nb[2]);

    ggml_tensor * x = ggml_reshape_3d(ctx0, cur, n_embd, 1, n_tokens);

    ggml_tensor * up = graph.build_lora_mm_id(slots.dst[1], x, slot_ids);
    graph.cb(up, "fn_cache_up", il);

    ggml_tensor * gate = graph.build_lora_mm_id(slots.dst[0], x, slot_ids);
    graph.cb(gate, "fn_cache_gate", il);

    ggml_tensor * experts = graph.build_lora_mm_id(slots.dst[2], ggml_swiglu_split(ctx0, gate, up), slot_ids);
    graph.cb(experts, "fn_cache_down", il);

    experts = ggml_mul(ctx0, experts, masked);
    graph.cb(experts, "fn_cache_hits", il);

    const int64_t ne_join[3] = { n_embd, cache->merge ? n_used : n_tokens, cache->merge ? n_tokens : 1 };

    ggml_tensor * join = ggml_custom_4d(ctx0, GGML_TYPE_F32, ne_join[0], ne_join[1], ne_join[2], 1, &staged, 1, fn_op_join, 1, &layer);
    graph.cb(join, "fn_cache_join", il);
    ggml_backend_sched_set_tensor_backend(graph.sched, join, graph.backend_cpu);

    if (cache->merge) {
        // the join comes after the hits in the graph: it is their turn on the device first
        ggml_build_forward_expand(gf, experts);
        return fn_sum_lanes(graph, ggml_add(ctx0, experts, join), n_used);
    }

    ggml_tensor * sum = fn_sum_lanes(graph, experts, n_used);
    ggml_build_forward_expand(gf, sum);

    // not expanded here: what the model adds before it uses the sum (the shared expert) runs beside the misses
    return ggml_add(ctx0, sum, join);
}
