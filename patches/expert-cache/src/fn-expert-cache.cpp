#include "fn-expert-cache-impl.h"

#include "fn-cache-marker.h"
#include "fn-expert-switch.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <thread>

static constexpr int32_t FN_INSERTS_MAX = 64;

static bool fn_env_on(const char * name) {
    const char * value = getenv(name);
    return value && atoi(value) != 0;
}

fn_expert_cache::fn_expert_cache(llama_context & ctx, fn_expert_cache_params params) : ctx(ctx), params(params) {}

fn_expert_cache::~fn_expert_cache() {
    // the device may still be at a graph that reads the slots
    ctx.synchronize();
    if (core) {
        miss->finish();
        core->drain();
        fn_expert_cache_print_stats(this);
    }
}

int32_t fn_expert_cache::refuse(int32_t result, const std::string & reason) {
    LLAMA_LOG_ERROR("fn_expert_cache: %s\n", reason.c_str());

    std::string devices;
    if (result == FN_EXPERT_CACHE_NO_MEMORY) {
        int32_t n_fit = params.n_slots;
        for (const fn_slot_device & device : slots->devices) {
            n_fit = std::min(n_fit, device.n_fit);
            devices += std::string(devices.empty() ? "" : ",") + "{\"device\":" + fn_cache_json_string(ggml_backend_dev_name(device.dev)) +
                ",\"needed_bytes\":" + std::to_string(device.need_bytes) + ",\"free_bytes\":" + std::to_string(device.free_bytes) +
                ",\"largest_n\":" + std::to_string(device.n_fit) + "}";
            LLAMA_LOG_ERROR("fn_expert_cache:   %s: needs %zu bytes, has %zu free; largest --moe-expert-cache that fits: %d\n",
                    ggml_backend_dev_name(device.dev), device.need_bytes, device.free_bytes, device.n_fit);
        }
        devices = ",\"largest_n\":" + std::to_string(n_fit) + ",\"devices\":[" + devices + "]";
    }
    fn_cache_marker("refused", "{\"code\":" + std::to_string(result) + ",\"reason\":" + fn_cache_json_string(reason) +
            ",\"n_slots\":" + std::to_string(params.n_slots) + ",\"n_inserts\":" + std::to_string(params.n_inserts) + devices + "}");

    return result;
}

static bool fn_host_mat(const ggml_tensor * t, fn_expert_mat & mat) {
    // a repacked buffer is host memory by address and not by layout: it does not call itself host
    if (!t->buffer || !ggml_backend_buffer_is_host(t->buffer) || t->nb[0] != ggml_type_size(t->type)) {
        return false;
    }
    mat.data      = (const uint8_t *) t->data;
    mat.type      = t->type;
    mat.n_in      = t->ne[0];
    mat.n_out     = t->ne[1];
    mat.nb_row    = t->nb[1];
    mat.nb_expert = t->nb[2];
    return true;
}

int32_t fn_expert_cache::find_layers() {
    const llama_model   & model   = ctx.get_model();
    const llama_hparams & hparams = model.hparams;

    if (model.arch != LLM_ARCH_QWEN4EXP) {
        return refuse(FN_EXPERT_CACHE_BAD_MODEL, std::string("the cache is for qwen4exp, the model is ") + llm_arch_name(model.arch));
    }
    if (hparams.n_expert == 0) {
        return refuse(FN_EXPERT_CACHE_BAD_MODEL, "the model has no experts");
    }

    n_expert = (int32_t) hparams.n_expert;
    n_used   = (int32_t) hparams.n_expert_used(0);

    if (params.n_slots > n_expert) {
        return refuse(FN_EXPERT_CACHE_BAD_PARAMS, "--moe-expert-cache " + std::to_string(params.n_slots) +
                ": more slots than the " + std::to_string(n_expert) + " experts of a layer");
    }

    std::vector<fn_slot_layer> slot_layers;

    // layers beyond the trunk belong to the MTP head, which has no cache
    for (int32_t il = 0; il < (int32_t) hparams.n_layer(); ++il) {
        const llama_layer & l = model.layers[il];

        index.push_back(-1);
        if (!l.ffn_gate_inp) {
            continue;
        }

        const std::string where = "layer " + std::to_string(il) + ": ";

        if (!l.ffn_gate_exps || !l.ffn_up_exps || !l.ffn_down_exps ||
            l.ffn_gate_exps_s || l.ffn_up_exps_s || l.ffn_down_exps_s || hparams.swiglu_clamp_exp[il] > 1e-6f) {
            return refuse(FN_EXPERT_CACHE_BAD_MODEL, where + "only separate gate, up and down experts without scales and clamps are supported");
        }
        if ((int32_t) hparams.n_expert_used(il) != n_used) {
            return refuse(FN_EXPERT_CACHE_BAD_MODEL, where + "another number of experts per token than layer 0");
        }

        fn_cache_layer layer;
        layer.cache = this;
        layer.il    = il;
        layer.index = (int32_t) layers.size();

        fn_slot_layer slot;
        slot.src[0] = l.ffn_gate_exps;
        slot.src[1] = l.ffn_up_exps;
        slot.src[2] = l.ffn_down_exps;
        slot.dev    = model.dev_layer(il);

        fn_expert_mat * mats[3] = { &layer.host.gate, &layer.host.up, &layer.host.down };

        for (int i = 0; i < 3 && params.n_slots > 0; ++i) {
            const ggml_tensor * t = slot.src[i];
            if (!fn_host_mat(t, *mats[i])) {
                return refuse(FN_EXPERT_CACHE_BAD_PLACEMENT, std::string(t->name) + " is in " +
                        (t->buffer ? ggml_backend_buffer_name(t->buffer) : "no buffer") +
                        ": the cache needs every expert in plain host memory (-ot \"exps=CPU\" or a pinned host type, with --no-repack)");
            }
            if (!fn_expert_mat_supported(t->type)) {
                return refuse(FN_EXPERT_CACHE_BAD_MODEL, std::string(t->name) + ": the CPU has no dot product for " + ggml_type_name(t->type));
            }
        }
        if (params.n_slots > 0 && (!slot.dev || ggml_backend_dev_type(slot.dev) == GGML_BACKEND_DEVICE_TYPE_CPU)) {
            return refuse(FN_EXPERT_CACHE_BAD_PLACEMENT, where + "computed on the CPU: the cache needs a device for every layer (-ngl 99)");
        }

        index[il] = layer.index;
        layers.push_back(layer);
        slot_layers.push_back(slot);
    }

    if (params.n_slots > 0) {
        std::vector<ggml_backend_t> backends;
        for (auto & backend : ctx.backends) {
            backends.push_back(backend.get());
        }
        n_spare = fn_expert_lru::spare_needed(params.n_slots, n_used, params.n_inserts);

        slots.reset(new fn_expert_slots(
                std::move(slot_layers), backends, params.n_slots + n_spare, fn_expert_test_switch("FN_EXPERT_CACHE_TEST_LATE")));
    }
    return FN_EXPERT_CACHE_OK;
}

int32_t fn_expert_cache::init_switches() {
    if (const char * name = fn_expert_test_switch_refused()) {
        return refuse(FN_EXPERT_CACHE_BAD_SWITCH, std::string(name) + " is set; only a build for tests has it");
    }
    merge  = fn_expert_test_switch("FN_EXPERT_CACHE_MERGE") != 0;
    serial = fn_env_on("FN_EXPERT_CACHE_SERIAL");

    if (const char * path = getenv("FN_EXPERT_CACHE_ROUTING")) {
        std::string error;
        trace = fn_routing_trace::load(path, (int32_t) layers.size(), n_used, n_expert, error);
        if (!trace) {
            return refuse(FN_EXPERT_CACHE_BAD_SWITCH, "FN_EXPERT_CACHE_ROUTING: " + error);
        }
    }
    if (const char * path = getenv("FN_EXPERT_CACHE_DUMP")) {
        dump = fn_routing_dump::open(path, (int32_t) layers.size(), n_expert, n_used, params.n_slots, n_spare, params.n_inserts);
        if (!dump) {
            return refuse(FN_EXPERT_CACHE_BAD_SWITCH, std::string("FN_EXPERT_CACHE_DUMP: cannot write ") + path);
        }
    }
    return FN_EXPERT_CACHE_OK;
}

int32_t fn_expert_cache::init_memory() {
    if (!slots->plan(params.n_slots, n_used, params.n_inserts)) {
        return refuse(FN_EXPERT_CACHE_NO_MEMORY, "--moe-expert-cache " + std::to_string(params.n_slots) + " does not fit");
    }
    if (!slots->alloc()) {
        return refuse(FN_EXPERT_CACHE_NO_MEMORY, "--moe-expert-cache " + std::to_string(params.n_slots) +
                " was refused by a device although it reported enough free memory");
    }

    core.reset(new fn_expert_core((int32_t) layers.size(), n_expert, n_used, params.n_slots, params.n_inserts, *slots));

    // the thread that drives the graph helps, so it is one of the context's threads
    const int32_t n_threads = (int32_t) std::max<uint32_t>(1, ctx.n_threads());
    const char *  spin      = getenv("FN_EXPERT_CACHE_SPIN_US");
    // longer than a layer takes, so that workers sleep between steps and not between layers; never on cores that are
    // all taken
    const int32_t spin_us   = spin ? atoi(spin) : (int32_t) std::thread::hardware_concurrency() > n_threads ? 1000 : 0;

    miss.reset(new fn_expert_miss(n_threads - 1, spin_us));

    for (size_t i = 0; i < slots->devices.size(); ++i) {
        const fn_slot_device & device = slots->devices[i];
        size_bytes += slots->size_bytes((int32_t) i);
        LLAMA_LOG_INFO("fn_expert_cache: %s: %d slots in each of %zu layers, %.1f MiB of %.1f MiB free\n",
                ggml_backend_dev_name(device.dev), params.n_slots, device.layers.size(),
                slots->size_bytes((int32_t) i)/1048576.0, device.free_bytes/1048576.0);
    }
    return FN_EXPERT_CACHE_OK;
}

int32_t fn_expert_cache::init() {
    if (params.n_slots < 0 || params.n_inserts < 1 || params.n_inserts > FN_INSERTS_MAX) {
        return refuse(FN_EXPERT_CACHE_BAD_PARAMS, "slots have to be 0 or more, inserts 1.." + std::to_string(FN_INSERTS_MAX));
    }
    if (ctx.get_cparams().ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || ctx.get_cparams().ctx_other) {
        return refuse(FN_EXPERT_CACHE_BAD_CONTEXT, "a draft context has no expert cache");
    }

    int32_t result = find_layers();
    if (result == FN_EXPERT_CACHE_OK) {
        result = init_switches();
    }
    if (result == FN_EXPERT_CACHE_OK && params.n_slots > 0) {
        result = init_memory();
    }
    return result;
}

void fn_expert_cache::begin_step() {
    // an execution that was cut short may have left its misses
    miss->finish();
    core->begin_step();
    n_steps++;
}

void fn_expert_cache::invalidate_graphs() {
    for (auto & res : ctx.gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
    ctx.gf_res_prev_active = nullptr;
}

int32_t fn_expert_cache::quiesce() {
    if (!core || phase != FN_EXPERT_CACHE_READY) {
        return FN_EXPERT_CACHE_BAD_PHASE;
    }
    phase = FN_EXPERT_CACHE_QUIESCING;
    ctx.synchronize();
    miss->finish();
    core->drain();
    invalidate_graphs();
    phase = FN_EXPERT_CACHE_QUIESCENT;
    return FN_EXPERT_CACHE_OK;
}

int32_t fn_expert_cache::resume() {
    if (phase != FN_EXPERT_CACHE_QUIESCENT) {
        return FN_EXPERT_CACHE_BAD_PHASE;
    }
    invalidate_graphs();
    phase = FN_EXPERT_CACHE_READY;
    return FN_EXPERT_CACHE_OK;
}

int32_t fn_expert_cache::release() {
    if (may_release && !may_release()) {
        LLAMA_LOG_ERROR("fn_expert_cache: no release: the slots' memory is lent\n");
        return FN_EXPERT_CACHE_LENT;
    }
    if (phase == FN_EXPERT_CACHE_READY) {
        const int32_t result = quiesce();
        if (result != FN_EXPERT_CACHE_OK) {
            return result;
        }
    }
    if (phase != FN_EXPERT_CACHE_QUIESCENT) {
        return FN_EXPERT_CACHE_BAD_PHASE;
    }

    slots->free();
    size_bytes = 0;
    phase      = FN_EXPERT_CACHE_RELEASED;
    generation++;

    fn_cache_marker("released", "{\"generation\":" + std::to_string(generation) + "}");
    return FN_EXPERT_CACHE_OK;
}

int32_t fn_expert_cache::restore() {
    if (phase != FN_EXPERT_CACHE_RELEASED) {
        return FN_EXPERT_CACHE_BAD_PHASE;
    }
    phase = FN_EXPERT_CACHE_RESTORING;

    const bool fits = slots->plan(params.n_slots, n_used, params.n_inserts);
    if (!fits || !slots->alloc()) {
        phase = FN_EXPERT_CACHE_FAILED;
        const int32_t result = refuse(FN_EXPERT_CACHE_NO_MEMORY, "the slots could not be restored");
        fn_cache_marker("failed", "{\"generation\":" + std::to_string(generation) + ",\"reason\":\"restore\"}");
        return result;
    }

    core->reload();
    invalidate_graphs();

    for (size_t i = 0; i < slots->devices.size(); ++i) {
        size_bytes += slots->size_bytes((int32_t) i);
    }
    generation++;
    phase = FN_EXPERT_CACHE_READY;

    fn_cache_marker("restored", "{\"generation\":" + std::to_string(generation) + ",\"size_bytes\":" + std::to_string(size_bytes) + "}");
    return FN_EXPERT_CACHE_OK;
}

void fn_expert_cache_deleter::operator()(fn_expert_cache * cache) const {
    delete cache;
}

int32_t fn_expert_cache::attach(llama_context * ctx, fn_expert_cache_params params) {
    if (params.n_slots == 0 && !getenv("FN_EXPERT_CACHE_ROUTING")) {
        return FN_EXPERT_CACHE_OK;
    }
    if (ctx->fn_cache) {
        return FN_EXPERT_CACHE_BAD_CONTEXT;
    }

    fn_expert_cache_ptr cache(new fn_expert_cache(*ctx, params));

    const int32_t result = cache->init();
    if (result != FN_EXPERT_CACHE_OK) {
        return result;
    }

    ctx->fn_cache         = std::move(cache);
    ctx->cparams.fn_cache = ctx->fn_cache.get();

    // the graph for one token has other splits now
    try {
        ctx->sched_need_reserve = true;
        ctx->sched_reserve();
    } catch (const std::exception & e) {
        LLAMA_LOG_ERROR("fn_expert_cache: no memory for the graph beside the slots: %s\n", e.what());
        fn_cache_marker("refused", "{\"code\":" + std::to_string(FN_EXPERT_CACHE_NO_MEMORY) +
                ",\"reason\":\"no memory for the compute buffers beside the slots\",\"n_slots\":" + std::to_string(params.n_slots) + "}");
        ctx->cparams.fn_cache = nullptr;
        ctx->fn_cache.reset();
        return FN_EXPERT_CACHE_NO_MEMORY;
    }

    if (ctx->fn_cache->core) {
        fn_expert_cache_stats stats;
        fn_expert_cache_get_stats(ctx->fn_cache.get(), &stats);
        fn_cache_marker("attached", "{\"n_slots\":" + std::to_string(stats.n_slots) + ",\"n_inserts\":" + std::to_string(stats.n_inserts) +
                ",\"n_layers\":" + std::to_string(stats.n_layers) + ",\"n_devices\":" + std::to_string(stats.n_devices) +
                ",\"n_spare\":" + std::to_string(ctx->fn_cache->n_spare) +
                ",\"capacity\":" + std::to_string(stats.capacity) + ",\"size_bytes\":" + std::to_string(stats.size_bytes) + "}");
    }
    return FN_EXPERT_CACHE_OK;
}

fn_expert_cache * fn_expert_cache::of(llama_context * ctx) {
    return ctx->fn_cache && ctx->fn_cache->core ? ctx->fn_cache.get() : nullptr;
}

int32_t fn_expert_cache_attach(llama_context * ctx, fn_expert_cache_params params) {
    return fn_expert_cache::attach(ctx, params);
}

fn_expert_cache * fn_expert_cache_get(llama_context * ctx) {
    return fn_expert_cache::of(ctx);
}

int32_t fn_expert_cache_quiesce(fn_expert_cache * cache) { return cache->quiesce(); }
int32_t fn_expert_cache_resume (fn_expert_cache * cache) { return cache->resume();  }
int32_t fn_expert_cache_release(fn_expert_cache * cache) { return cache->release(); }
int32_t fn_expert_cache_restore(fn_expert_cache * cache) { return cache->restore(); }
