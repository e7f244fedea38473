#include "fn-phase-impl.h"

#include "fn-expert-cache-impl.h"
#include "fn-phase-marker.h"

#include "llama.h"

#include "ggml.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

fn_phase::fn_phase(llama_context * ctx_tgt, llama_context * ctx_dft, fn_phase_params params) :
    params(params), cache(fn_expert_cache_get(ctx_tgt)) {
    contexts.emplace_back(*ctx_tgt);
    if (ctx_dft) {
        contexts.emplace_back(*ctx_dft);
    }
    for (const fn_phase_context & context : contexts) {
        n_ubatch.push_back(context.n_ubatch());
    }
    stats.mode = params.mode;
    if (cache) {
        capacity   = cache_stats().capacity;
        size_bytes = cache_stats().size_bytes;
    }
}

fn_phase::~fn_phase() {
    for (fn_phase_context & context : contexts) {
        context.link() = fn_phase_link();
        context.let_host_go();
    }
}

std::string fn_phase::refusal() const {
    if (!cache) {
        return "the target context has no expert cache";
    }
    if (cache_stats().phase != FN_EXPERT_CACHE_READY) {
        return std::string("the expert cache is ") + fn_expert_cache_phase_name(cache_stats().phase);
    }
    if (params.mode != FN_PHASE_TRANSACTION && params.mode != FN_PHASE_BYPASS) {
        return "unknown mode " + std::to_string(params.mode);
    }
    for (const fn_phase_context & context : contexts) {
        if (context.n_seq_max() != 1) {
            return "one sequence is needed, a context has " + std::to_string(context.n_seq_max());
        }
        if (context.embeddings()) {
            return "a context computes embeddings";
        }
    }
    if (params.mode == FN_PHASE_TRANSACTION &&
        (params.n_ubatch < (int32_t) n_ubatch[0] || params.n_ubatch > (int32_t) contexts[0].n_batch())) {
        return "micro-batch " + std::to_string(params.n_ubatch) + " is not between the context's micro-batch " +
            std::to_string(n_ubatch[0]) + " and its batch " + std::to_string(contexts[0].n_batch());
    }
    return "";
}

fn_expert_cache_stats fn_phase::cache_stats() const {
    fn_expert_cache_stats result;
    fn_expert_cache_get_stats(cache, &result);
    return result;
}

bool fn_phase::fail(const char * name, const std::string & why) {
    std::lock_guard<std::mutex> lock(mutex);
    check  = name;
    detail = why;
    return false;
}

bool fn_phase::timed(step step, double & ms) {
    const int64_t t_start = ggml_time_us();
    const bool ok = (this->*step)();
    ms += (ggml_time_us() - t_start)/1000.0;
    return ok;
}

uint64_t fn_phase::hash() const {
    uint64_t result = 0;
    for (const fn_phase_context & context : contexts) {
        result = result*31 + context.hash();
    }
    return result;
}

size_t fn_phase::workspace_bytes() const {
    size_t result = 0;
    for (const fn_phase_context & context : contexts) {
        result += context.workspace_bytes();
    }
    return result;
}

// steps of begin

bool fn_phase::check_ready() {
    const fn_expert_cache_stats now = cache_stats();
    if (now.phase != FN_EXPERT_CACHE_READY) {
        return fail("cache-phase", std::string("the cache is ") + fn_expert_cache_phase_name(now.phase));
    }
    if (now.capacity != capacity) {
        return fail("capacity", std::to_string(now.capacity) + " slots, configured were " + std::to_string(capacity));
    }
    generation = now.generation;
    return true;
}

bool fn_phase::quiesce() {
    for (fn_phase_context & context : contexts) {
        context.quiesce();
    }
    if (state == FN_PHASE_BEGINNING) {
        if (fault.hits("begin", n_begin)) {
            return fail("quiesce", "fault");
        }
        const int32_t result = fn_expert_cache_quiesce(cache);
        if (result != FN_EXPERT_CACHE_OK) {
            return fail("quiesce", "the cache refused with code " + std::to_string(result));
        }
    }
    return true;
}

bool fn_phase::release() {
    for (fn_phase_context & context : contexts) {
        context.keep_host();
        context.release(false);
    }
    const int32_t result = fn_expert_cache_release(cache);
    if (result != FN_EXPERT_CACHE_OK) {
        return fail("release", "the cache refused with code " + std::to_string(result));
    }
    generation++;
    return true;
}

bool fn_phase::reserve(bool prompt) {
    if (prompt && fault.hits("reserve", n_begin)) {
        return fail("reserve", "fault");
    }
    // as when a pool cannot grow in the prompt
    contexts[0].link().fault = prompt && fault.hits("pool", n_begin) ? -2 : 0;
    for (size_t i = 0; i < contexts.size(); ++i) {
        std::string error;
        // a draft with a larger micro-batch of its own keeps it
        const uint32_t n = prompt ? std::max(n_ubatch[i], (uint32_t) params.n_ubatch) : n_ubatch[i];
        contexts[i].link().n_ubatch_seen = prompt ? n_ubatch[i] : 0;
        if (!contexts[i].reserve(std::min(n, contexts[i].n_batch()), prompt, error)) {
            return fail("reserve", (i == 0 ? "target, micro-batch " : "draft, micro-batch ") + std::to_string(n) + ": " + error);
        }
    }
    return true;
}

bool fn_phase::reserve_prompt() { return reserve(true);  }
bool fn_phase::reserve_decode() { return reserve(false); }

// steps of end

bool fn_phase::check_released() {
    const fn_expert_cache_stats now = cache_stats();
    const int32_t expected = params.mode == FN_PHASE_BYPASS ? FN_EXPERT_CACHE_QUIESCENT : FN_EXPERT_CACHE_RELEASED;
    if (now.phase != expected) {
        return fail("cache-phase", std::string("the cache is ") + fn_expert_cache_phase_name(now.phase) +
                ", expected " + fn_expert_cache_phase_name(expected));
    }
    const uint64_t seen = now.generation + (fault.hits("generation", n_begin) ? 1 : 0);
    if (seen != generation) {
        return fail("generation", std::to_string(seen) + ", expected " + std::to_string(generation));
    }
    return true;
}

bool fn_phase::restore() {
    if (params.mode == FN_PHASE_BYPASS) {
        const int32_t result = fn_expert_cache_resume(cache);
        return result == FN_EXPERT_CACHE_OK || fail("restore", "the cache refused with code " + std::to_string(result));
    }
    for (fn_phase_context & context : contexts) {
        context.release(true);
    }
    if (fault.hits("restore", n_begin)) {
        return fail("restore", "fault");
    }
    const int32_t result = fn_expert_cache_restore(cache);
    if (result != FN_EXPERT_CACHE_OK) {
        return fail("restore", "the cache refused with code " + std::to_string(result));
    }
    generation++;
    if (fault.hits("upload", n_begin)) {
        return fail("upload", "fault");
    }
    return true;
}

bool fn_phase::check_restored() {
    const fn_expert_cache_stats now = cache_stats();
    if (now.phase != FN_EXPERT_CACHE_READY) {
        return fail("cache-phase", std::string("the cache is ") + fn_expert_cache_phase_name(now.phase));
    }
    if (now.generation != generation) {
        return fail("generation", std::to_string(now.generation) + ", expected " + std::to_string(generation));
    }
    if (now.capacity != capacity || now.size_bytes != size_bytes) {
        return fail("capacity", std::to_string(now.capacity) + " slots of " + std::to_string(now.size_bytes) +
                " bytes, configured were " + std::to_string(capacity) + " of " + std::to_string(size_bytes));
    }
    if (params.mode == FN_PHASE_BYPASS) {
        return true;
    }
    // what the contexts had at first can be larger: batches have run with it
    const size_t workspace = workspace_bytes();
    if (workspace_first == 0) {
        workspace_first = workspace;
    }
    if (workspace != workspace_first) {
        return fail("memory", "workspaces of " + std::to_string(workspace) + " bytes, after the first prompt " + std::to_string(workspace_first));
    }
    return true;
}

// every slot that can be read holds what the host has
bool fn_phase::check_slots() {
    std::vector<uint8_t> bytes;
    for (int32_t il = 0; il < cache->core->n_layer(); ++il) {
        const fn_expert_lru & lru   = cache->core->lru(il);
        const fn_slot_layer & layer = cache->slots->layers[il];
        for (int32_t slot = 0; slot < lru.n_slots(); ++slot) {
            const int32_t expert = lru.expert_in(slot);
            for (int i = 0; i < 3 && expert >= 0; ++i) {
                const size_t size = layer.dst[i]->nb[2];
                bytes.resize(size);
                ggml_backend_tensor_get(layer.dst[i], bytes.data(), slot*size, size);
                if (memcmp(bytes.data(), (const uint8_t *) layer.src[i]->data + expert*layer.src[i]->nb[2], size) != 0) {
                    return fail("upload", std::string(layer.dst[i]->name) + ": slot " + std::to_string(slot) +
                            " differs from expert " + std::to_string(expert));
                }
            }
        }
    }
    return true;
}

bool fn_phase::check_hash() {
    return hash() == hash_before || fail("verify", "outputs, KV or recurrent state changed in the transition");
}

static std::string fn_ms(double ms) {
    char text[32];
    snprintf(text, sizeof(text), "%.3f", ms);
    return text;
}

static const char * fn_mode_name(int32_t mode) {
    return mode == FN_PHASE_BYPASS ? "bypass" : "transaction";
}

void fn_phase::mark(const char * event, const std::string & json) const {
    const fn_expert_cache_stats now = cache_stats();
    fn_phase_marker(event, "{\"n_tokens\":" + std::to_string(n_prompt) + ",\"mode\":\"" + fn_mode_name(params.mode) +
            "\",\"micro_batch\":" + std::to_string(contexts[0].n_ubatch()) + "," + json +
            ",\"bytes\":" + std::to_string(stats.released_bytes) + ",\"generation\":" + std::to_string(now.generation) +
            ",\"capacity\":" + std::to_string(now.capacity) + "}");
}

int32_t fn_phase::begin(int32_t n_tokens) {
    if (state != FN_PHASE_READY) {
        fail("state", std::string("begin while ") + fn_phase_state_name(state));
        return FN_PHASE_BAD_STATE;
    }
    state    = FN_PHASE_BEGINNING;
    n_prompt = n_tokens;
    n_begin++;

    const int64_t t_start = ggml_time_us();
    double quiesce_ms = 0, release_ms = 0, reserve_ms = 0, verify_ms = 0;

    workspace_decode = workspace_bytes();

    bool ok = check_ready() && timed(&fn_phase::quiesce, quiesce_ms);
    if (ok && params.verify) {
        const int64_t t = ggml_time_us();
        hash_before = hash();
        verify_ms += (ggml_time_us() - t)/1000.0;
        if (fault.hits("corrupt", n_begin)) {
            contexts[0].corrupt();
        }
    }
    if (ok && params.mode == FN_PHASE_TRANSACTION) {
        ok = timed(&fn_phase::release, release_ms) && timed(&fn_phase::reserve_prompt, reserve_ms);
    }
    ok = ok && (!params.verify || timed(&fn_phase::check_hash, verify_ms));

    const size_t workspace = workspace_bytes();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stats.begins           += ok;
        stats.failures         += !ok;
        stats.released_bytes    = params.mode == FN_PHASE_TRANSACTION ? size_bytes + workspace_decode : 0;
        stats.begin_ms          = (ggml_time_us() - t_start)/1000.0;
        stats.begin_quiesce_ms  = quiesce_ms;
        stats.begin_release_ms  = release_ms;
        stats.begin_reserve_ms  = reserve_ms;
    }
    if (!ok) {
        for (fn_phase_context & context : contexts) {
            context.link().broken = true;
        }
        state = FN_PHASE_FAILED;
        return FN_PHASE_BROKEN;
    }
    state = FN_PHASE_PROMPT;
    mark("begin", "\"ms\":" + fn_ms(stats.begin_ms) + ",\"quiesce_ms\":" + fn_ms(quiesce_ms) + ",\"release_ms\":" + fn_ms(release_ms) +
            ",\"reserve_ms\":" + fn_ms(reserve_ms) + ",\"verify_ms\":" + fn_ms(verify_ms) +
            ",\"workspace_bytes\":" + std::to_string(workspace));
    return FN_PHASE_OK;
}

int32_t fn_phase::end() {
    if (state != FN_PHASE_PROMPT) {
        fail("state", std::string("end while ") + fn_phase_state_name(state));
        return FN_PHASE_BAD_STATE;
    }
    state = FN_PHASE_ENDING;

    const int64_t t_start = ggml_time_us();
    double quiesce_ms = 0, restore_ms = 0, reserve_ms = 0, verify_ms = 0;

    bool ok = timed(&fn_phase::quiesce, quiesce_ms) && check_released();
    if (ok && params.verify) {
        const int64_t t = ggml_time_us();
        hash_before = hash();
        verify_ms += (ggml_time_us() - t)/1000.0;
    }
    ok = ok && timed(&fn_phase::restore, restore_ms);
    if (ok && params.mode == FN_PHASE_TRANSACTION) {
        ok = timed(&fn_phase::reserve_decode, reserve_ms);
    }
    ok = ok && check_restored();
    ok = ok && (!params.verify || (timed(&fn_phase::check_slots, verify_ms) && timed(&fn_phase::check_hash, verify_ms)));
    {
        std::lock_guard<std::mutex> lock(mutex);
        stats.ends           += ok;
        stats.failures       += !ok;
        stats.end_ms          = (ggml_time_us() - t_start)/1000.0;
        stats.end_quiesce_ms  = quiesce_ms;
        stats.end_restore_ms  = restore_ms;
        stats.end_reserve_ms  = reserve_ms;
    }
    if (!ok) {
        for (fn_phase_context & context : contexts) {
            context.link().broken = true;
        }
        state = FN_PHASE_FAILED;
        return FN_PHASE_BROKEN;
    }
    state = FN_PHASE_READY;
    mark("end", "\"ms\":" + fn_ms(stats.end_ms) + ",\"quiesce_ms\":" + fn_ms(quiesce_ms) + ",\"restore_ms\":" + fn_ms(restore_ms) +
            ",\"reserve_ms\":" + fn_ms(reserve_ms) + ",\"verify_ms\":" + fn_ms(verify_ms) +
            ",\"workspace_bytes\":" + std::to_string(workspace_bytes()));
    return FN_PHASE_OK;
}
