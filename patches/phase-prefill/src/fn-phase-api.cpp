#include "fn-phase-impl.h"

#include "fn-cache-marker.h"
#include "fn-phase-marker.h"

#include <cstdio>

fn_phase * fn_phase_init(llama_context * ctx_tgt, llama_context * ctx_dft, fn_phase_params params, char * reason, size_t reason_size) {
    std::unique_ptr<fn_phase> phase(new fn_phase(ctx_tgt, ctx_dft, params));
    const std::string refusal = phase->refusal();
    if (reason && reason_size > 0) {
        snprintf(reason, reason_size, "%s", refusal.c_str());
    }
    return refusal.empty() ? phase.release() : nullptr;
}

void fn_phase_free(fn_phase * phase) {
    delete phase;
}

int32_t fn_phase_begin(fn_phase * phase, int32_t n_tokens) { return phase->begin(n_tokens); }
int32_t fn_phase_end  (fn_phase * phase)                   { return phase->end(); }

int32_t fn_phase_get_state(const fn_phase * phase) {
    return phase->state;
}

uint64_t fn_phase_generation(const fn_phase * phase) {
    return phase->cache_stats().generation;
}

void fn_phase_get_stats(const fn_phase * phase, fn_phase_stats * stats) {
    {
        std::lock_guard<std::mutex> lock(phase->mutex);
        *stats = phase->stats;
    }
    const fn_expert_cache_stats cache = phase->cache_stats();
    stats->state      = phase->state;
    stats->generation = cache.generation;
    stats->capacity   = cache.capacity;
}

const char * fn_phase_state_name(int32_t state) {
    switch (state) {
        case FN_PHASE_READY:     return "ready";
        case FN_PHASE_BEGINNING: return "beginning";
        case FN_PHASE_PROMPT:    return "prompt";
        case FN_PHASE_ENDING:    return "ending";
        case FN_PHASE_FAILED:    return "failed";
    }
    return "unknown";
}

const char * fn_phase_last_check (const fn_phase * phase) { return phase->check.c_str();  }
const char * fn_phase_last_detail(const fn_phase * phase) { return phase->detail.c_str(); }

void fn_phase_print_failed(const fn_phase * phase) {
    fn_phase_marker("failed", "{\"check\":" + fn_cache_json_string(phase->check) + ",\"detail\":" + fn_cache_json_string(phase->detail) +
            ",\"begins\":" + std::to_string(phase->stats.begins) + ",\"ends\":" + std::to_string(phase->stats.ends) + "}");
}

void fn_phase_set_stop(fn_phase * phase, bool (*stop)(void * data), void * data) {
    // the draft's batches are short work: only the target is asked
    phase->contexts[0].link().stop      = stop;
    phase->contexts[0].link().stop_data = data;
}

int32_t fn_phase_tokens_done(const fn_phase * phase) {
    return (int32_t) const_cast<fn_phase *>(phase)->contexts[0].link().n_tokens_done;
}

int32_t fn_phase_set_fault(fn_phase * phase, const char * fault) {
    return phase->fault.set(fault) ? FN_PHASE_OK : FN_PHASE_BAD_PARAMS;
}

size_t fn_phase_metrics(const fn_phase * phase, char * buf, size_t size) {
    fn_phase_stats stats;
    fn_phase_get_stats(phase, &stats);

    std::string text;
    auto add = [&](const char * type, const char * name, const char * help, double value) {
        char line[512];
        snprintf(line, sizeof(line), "# HELP fn_phase_%s %s\n# TYPE fn_phase_%s %s\nfn_phase_%s %.17g\n", name, help, name, type, name, value);
        text += line;
    };
    add("counter", "begins_total",     "Prompts for which the devices were cleared.",               stats.begins);
    add("counter", "ends_total",       "Returns to decode with the exact capacity.",                stats.ends);
    add("counter", "failures_total",   "Transitions that failed.",                                  stats.failures);
    add("gauge",   "active",           "1 while a prompt has the devices.",                         stats.state == FN_PHASE_PROMPT);
    add("gauge",   "last_begin_ms",    "Duration of the last begin in milliseconds.",               stats.begin_ms);
    add("gauge",   "last_end_ms",      "Duration of the last end in milliseconds.",                 stats.end_ms);
    add("gauge",   "last_restore_ms",  "Part of the last end that reloaded the slots.",             stats.end_restore_ms);
    add("gauge",   "released_bytes",   "Device memory that the last begin gave back.",              stats.released_bytes);
    add("gauge",   "generation",       "Completed releases and restores of the cache.",             stats.generation);

    if (buf && size > 0) {
        snprintf(buf, size, "%s", text.c_str());
    }
    return text.size();
}
