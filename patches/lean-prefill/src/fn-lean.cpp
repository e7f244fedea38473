#include "fn-lean-impl.h"

#include "fn-cache-marker.h"
#include "fn-expert-cache-impl.h"
#include "fn-lean-marker.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>

static constexpr int32_t FN_LEAN_RING_MAX = 8;

// what llama_n_ubatch() says: the server cuts prompts and places checkpoints by it
static constexpr uint32_t FN_LEAN_UBATCH_SEEN = 512;

static bool fn_lean_env(const char * name, int32_t min, int32_t max, int32_t & value, std::string & error) {
    const char * text = getenv(name);
    if (!text) {
        return true;
    }
    char * end = nullptr;
    errno = 0;
    const long n = strtol(text, &end, 10);
    if (errno || end == text || *end || n < min || n > max) {
        error = std::string(name) + "=" + text + ": not a number from " + std::to_string(min) + " to " + std::to_string(max);
        return false;
    }
    value = (int32_t) n;
    return true;
}

fn_lean::fn_lean(llama_context & ctx, int32_t n_chunk) : ctx(ctx), requested(n_chunk) {}

fn_lean::~fn_lean() {
    // the device may still read what is staged
    ctx.synchronize();
    if (ctx.fn_cache) {
        ctx.fn_cache->may_release = nullptr;
    }
    if (prompt.n_passes > 0) {
        end_prompt();
    }
    for (auto & device : devices) {
        if (timeline) {
            write_timeline(*device);
        }
    }
}

int32_t fn_lean::refuse(int32_t result, const std::string & reason) {
    LLAMA_LOG_ERROR("fn_lean: %s\n", reason.c_str());
    std::string list;
    for (const auto & device : devices) {
        size_t free_bytes = 0, total = 0;
        ggml_backend_dev_memory(device->stage->dev, &free_bytes, &total);
        list += std::string(list.empty() ? "" : ",") + "{\"device\":" + fn_cache_json_string(ggml_backend_dev_name(device->stage->dev)) +
            ",\"ring_bytes\":" + std::to_string(device->stage->need_bytes()) + ",\"free_bytes\":" + std::to_string(free_bytes) + "}";
    }
    fn_lean_marker("refused", "{\"code\":" + std::to_string(result) + ",\"reason\":" + fn_cache_json_string(reason) +
            ",\"requested\":" + std::to_string(requested) + (choice.empty() ? "" : ",\"tried\":" + choice) + ",\"devices\":[" + list + "]}");
    return result;
}

int32_t fn_lean::read_switches() {
    std::string error;
    int32_t on_verify = 0, on_report = 0;
    if (!fn_lean_env("FN_LEAN_RING",       2,  FN_LEAN_RING_MAX, n_ring,           error) ||
        !fn_lean_env("FN_LEAN_MIN_TOKENS", 1,  1 << 20,          min_tokens,       error) ||
        !fn_lean_env("FN_LEAN_LATE_MS",    0,  10000,            switches.late_ms, error) ||
        !fn_lean_env("FN_LEAN_VERIFY",     0,  1,                on_verify,        error) ||
        !fn_lean_env("FN_LEAN_LEND",       0,  1,                lend,             error) ||
        !fn_lean_env("FN_LEAN_REPORT",     0,  1,                on_report,        error)) {
        return refuse(FN_LEAN_BAD_PARAMS, error);
    }
    verify = on_verify;
    report = on_report;
    if (const char * path = getenv("FN_LEAN_TIMELINE")) {
        timeline.reset(fopen(path, "a"));
        if (!timeline) {
            return refuse(FN_LEAN_BAD_PARAMS, std::string("FN_LEAN_TIMELINE: cannot write ") + path);
        }
    }
    return FN_LEAN_OK;
}

int32_t fn_lean::find_layers() {
    const llama_model   & model   = ctx.get_model();
    const llama_hparams & hparams = model.hparams;

    if (model.arch != LLM_ARCH_QWEN4EXP || hparams.n_expert == 0) {
        return refuse(FN_LEAN_BAD_MODEL, std::string("lean prefill is for qwen4exp with experts, the model is ") + llm_arch_name(model.arch));
    }
    n_expert = (int32_t) hparams.n_expert;
    n_used   = (int32_t) hparams.n_expert_used(0);

    const fn_expert_cache * cache = ctx.fn_cache && ctx.fn_cache->core ? ctx.fn_cache.get() : nullptr;

    // layers beyond the trunk belong to the MTP head, which is computed in a context of its own
    for (int32_t il = 0; il < (int32_t) hparams.n_layer(); ++il) {
        const llama_layer & l = model.layers[il];
        index.push_back(-1);
        if (!l.ffn_gate_inp) {
            continue;
        }
        const std::string where = "layer " + std::to_string(il) + ": ";
        if (!l.ffn_gate_exps || !l.ffn_up_exps || !l.ffn_down_exps || l.ffn_gate_up_exps) {
            return refuse(FN_LEAN_BAD_MODEL, where + "only separate gate, up and down experts are supported");
        }
        std::unique_ptr<fn_lean_layer> layer(new fn_lean_layer);
        layer->src[0] = l.ffn_gate_exps;
        layer->src[1] = l.ffn_up_exps;
        layer->src[2] = l.ffn_down_exps;
        layer->il     = il;

        for (const ggml_tensor * t : layer->src) {
            if (!t->buffer || !ggml_backend_buffer_is_host(t->buffer) || !ggml_is_contiguous(t)) {
                return refuse(FN_LEAN_BAD_PLACEMENT, std::string(t->name) + " is in " + (t->buffer ? ggml_backend_buffer_name(t->buffer) : "no buffer") +
                        ": lean prefill needs every expert in plain host memory (-ot \"exps=CPU\" or a pinned host type, with --no-repack)");
            }
        }
        ggml_backend_dev_t dev = model.dev_layer(il);
        if (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return refuse(FN_LEAN_BAD_PLACEMENT, where + "computed on the CPU: lean prefill needs a device for every layer (-ngl 99)");
        }
        if (cache && cache->index_of(il) >= 0) {
            layer->cache_index = cache->index_of(il);
            for (int i = 0; i < 3; ++i) {
                layer->slots[i] = cache->slots->layers[layer->cache_index].dst[i];
            }
        }

        auto it = std::find_if(devices.begin(), devices.end(), [&](const std::unique_ptr<fn_lean_device> & d) { return d->stage->dev == dev; });
        if (it == devices.end()) {
            std::unique_ptr<fn_lean_device> device(new fn_lean_device);
            device->stage.reset(new fn_lean_stage(dev, n_ring, switches));
            for (auto & backend : ctx.backends) {
                if (ggml_backend_get_device(backend.get()) == dev) {
                    device->compute = backend.get();
                }
            }
            GGML_ASSERT(device->compute != nullptr);
            devices.push_back(std::move(device));
            it = devices.end() - 1;
        }
        layer->device = (int32_t) (it - devices.begin());
        index[il]     = (int32_t) layers.size();
        (*it)->layers.push_back(index[il]);
        (*it)->stage->add(index[il], layer.get());
        layers.push_back(std::move(layer));
    }
    make_rings();
    return FN_LEAN_OK;
}

void fn_lean::make_rings() {
    for (auto & device : devices) {
        const bool stay = (int32_t) device->layers.size() <= n_ring;
        for (size_t i = 0; stay && i < device->layers.size(); ++i) {
            layers[device->layers[i]]->own_place = (int32_t) i;
        }
        device->ring.reset(new fn_lean_ring(n_ring, stay, *device->stage));
    }
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        for (int32_t place = 0; place < n_ring; ++place) {
            stops.emplace_back(new fn_lean_stop { this, (int32_t) layer, place });
        }
    }
}

int32_t fn_lean::init() {
    if (requested < FN_LEAN_AUTO) {
        return refuse(FN_LEAN_BAD_PARAMS, "--lean-prefill takes auto or a number of tokens");
    }
    if (ctx.cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || ctx.cparams.ctx_other) {
        return refuse(FN_LEAN_BAD_CONTEXT, "a draft context has no lean prefill");
    }
    if (getenv("LLAMA_PHASE_PREFILL_UBATCH")) {
        return refuse(FN_LEAN_BAD_CONTEXT, "lean prefill and the memory transaction (LLAMA_PHASE_PREFILL_UBATCH) are alternatives");
    }
    int32_t result = read_switches();
    if (result == FN_LEAN_OK) {
        result = find_layers();
    }
    if (result == FN_LEAN_OK) {
        find_lendable();
    }
    return result;
}

void fn_lean_deleter::operator()(fn_lean * lean) const {
    delete lean;
}

int32_t fn_lean::attach(llama_context * ctx, int32_t n_chunk) {
    if (n_chunk == FN_LEAN_OFF || ctx->get_model().hparams.no_alloc) {
        return FN_LEAN_OK;
    }
    if (ctx->fn_staging) {
        return FN_LEAN_BAD_CONTEXT;
    }
    const uint32_t n_ubatch = ctx->cparams.n_ubatch;

    fn_lean_ptr lean(new fn_lean(*ctx, n_chunk));
    int32_t result = lean->init();
    if (result != FN_LEAN_OK) {
        return result;
    }
    // the reserve has to see the graph that will run
    ctx->fn_staging         = std::move(lean);
    ctx->cparams.fn_staging = ctx->fn_staging.get();

    result = ctx->fn_staging->choose_chunk();
    if (result != FN_LEAN_OK) {
        ctx->cparams.fn_staging = nullptr;
        ctx->fn_staging.reset();
        return result;
    }
    ctx->fn_staging->count_reserves();
    ctx->fn_phase.n_ubatch_seen = std::min(n_ubatch, FN_LEAN_UBATCH_SEEN);
    fn_lean_print_attached(*ctx->fn_staging);
    return FN_LEAN_OK;
}

fn_lean * fn_lean::of(llama_context * ctx) {
    return ctx ? ctx->fn_staging.get() : nullptr;
}

bool fn_lean::takes(int64_t n_tokens) const {
    const bool cached = ctx.fn_cache && ctx.fn_cache->core && ctx.fn_cache->phase == FN_EXPERT_CACHE_READY;
    return n_tokens >= min_tokens && !(cached && n_tokens <= FN_EXPERT_CACHE_MAX_TOKENS);
}

bool fn_lean::whole(int64_t n_rows) const {
    // were the routing uniform, so much of the layer would not be used
    return std::pow(1.0 - (double) n_used/n_expert, (double) n_rows) < 0.1;
}

// sizes of the workspaces: a larger one means that the reserve was too small for some micro-batch
void fn_lean::count_reserves() {
    const bool first = workspace.empty();
    workspace.resize(ctx.backend_ptrs.size());
    for (size_t i = 0; i < ctx.backend_ptrs.size(); ++i) {
        ggml_backend_t backend = ctx.backend_ptrs[i];
        const size_t now = ggml_backend_sched_get_buffer_size(ctx.sched.get(), backend);
        if (!first && now > workspace[i]) {
            n_reserves++;
            fn_lean_marker("grown", "{\"backend\":" + fn_cache_json_string(ggml_backend_name(backend)) + ",\"from_bytes\":" +
                    std::to_string(workspace[i]) + ",\"to_bytes\":" + std::to_string(now) + ",\"tokens\":" + std::to_string(n_tokens_last) + "}");
        }
        workspace[i] = now;
    }
}

void fn_lean::begin_pass(const std::vector<fn_lean_use> & uses, int64_t n) {
    count_reserves();
    n_tokens_last = n;

    if (uses.empty()) {
        n_plain++;
        for (auto & device : devices) {
            device->stage->wait_slots(); // decode writes slots
        }
        if (lent) {
            give_back();
        }
        if (prompt.n_passes > 0) {
            end_prompt();
        }
        return;
    }

    if (ctx.fn_cache && ctx.fn_cache->core && ctx.fn_cache->phase == FN_EXPERT_CACHE_READY) {
        ctx.fn_cache->miss->finish();
        ctx.fn_cache->core->drain(); // what the last step put into slots is there, and can be copied
    }
    lent = lending;

    if (prompt.n_passes == 0) {
        prompt.t_begin = ggml_time_us();
        prompt.compute_us = compute_us;
        for (auto & device : devices) {
            prompt.wait_us        += device->wait_us;
            prompt.upload_us      += device->stage->upload_us;
            prompt.bytes_uploaded += device->stage->bytes_uploaded;
            prompt.bytes_copied   += device->stage->bytes_copied;
        }
    }
    prompt.n_passes++;
    prompt.n_tokens += n;
    n_passes++;
    n_tokens += n;
    t_released = 0;

    std::vector<std::vector<fn_lean_want>> wants(devices.size());
    for (const fn_lean_use & use : uses) {
        wants[layers[use.layer]->device].push_back({ use.layer, use.place, use.whole });
    }
    for (size_t d = 0; d < devices.size(); ++d) {
        devices[d]->ring->begin(wants[d]);
    }
}

void fn_lean::check(fn_lean_device & device, int32_t layer, int32_t place, const char * when) {
    uint64_t n = 0;
    const size_t n_bytes = device.stage->n_different(layer, place, device.reading.empty() ? nullptr : device.reading.data(), n);
    n_verified += n;
    if (n_bytes > 0) {
        fn_lean_marker("corrupt", "{\"layer\":" + std::to_string(layers[layer]->il) + ",\"when\":\"" + when + "\",\"bytes\":" + std::to_string(n_bytes) + "}");
        GGML_ABORT("fn_lean: staged experts of layer %d differ from host memory in %zu bytes (%s)", layers[layer]->il, n_bytes, when);
    }
}

void fn_lean::reach(const fn_lean_stop & stop, const int32_t * ids, int64_t n_ids, int64_t t_reached) {
    fn_lean_device & device = *devices[layers[stop.layer]->device];

    // what was queued before this stop is done: the scheduler has waited for the ids, this makes it a rule of ours
    ggml_backend_synchronize(device.compute);

    if (verify && device.ring->reading_place() >= 0) {
        check(device, device.ring->reading_layer(), device.ring->reading_place(), "after it was read");
    }

    const bool all = whole(n_ids/n_used);
    wanted.assign(all ? 0 : n_expert, 0);
    for (int64_t i = 0; i < n_ids; ++i) {
        GGML_ASSERT(ids[i] >= 0 && ids[i] < n_expert);
        if (!all) {
            wanted[ids[i]] = 1;
        }
    }

    const int64_t t_wait = ggml_time_us();
    if (t_released) {
        compute_us += t_wait - t_released;
    }
    const bool ready = device.ring->reach(stop.layer, stop.place, all ? nullptr : wanted.data());
    const int64_t t_done = ggml_time_us();

    device.wait_us += t_done - t_wait;
    device.n_run++;
    device.n_ready += ready;

    if (verify) {
        device.reading = wanted;
        check(device, stop.layer, stop.place, "before it is read");
    }
    if (timeline) {
        fprintf(timeline.get(), "{\"what\":\"stop\",\"pass\":%llu,\"layer\":%d,\"device\":%d,\"place\":%d,\"rows\":%lld,\"whole\":%s,"
                "\"t_reached_us\":%lld,\"t_released_us\":%lld,\"ready\":%s}\n",
                (unsigned long long) n_passes.load(), layers[stop.layer]->il, layers[stop.layer]->device, stop.place, (long long) (n_ids/n_used),
                all ? "true" : "false", (long long) t_reached, (long long) t_done, ready ? "true" : "false");
        write_timeline(device);
    }
    t_released = ggml_time_us();
}
