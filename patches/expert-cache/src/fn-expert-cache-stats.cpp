#include "fn-expert-cache-impl.h"

#include "fn-cache-marker.h"

#include "llama-context.h"

#include <cstdio>
#include <cstring>

const char * fn_expert_cache_phase_name(int32_t phase) {
    switch (phase) {
        case FN_EXPERT_CACHE_READY:     return "ready";
        case FN_EXPERT_CACHE_QUIESCING: return "quiescing";
        case FN_EXPERT_CACHE_QUIESCENT: return "quiescent";
        case FN_EXPERT_CACHE_RELEASED:  return "released";
        case FN_EXPERT_CACHE_RESTORING: return "restoring";
        case FN_EXPERT_CACHE_FAILED:    return "failed";
        default:                        return "unknown";
    }
}

static bool fn_holds_memory(const fn_expert_cache * cache) {
    const int32_t phase = cache->phase;
    return phase != FN_EXPERT_CACHE_RELEASED && phase != FN_EXPERT_CACHE_RESTORING && phase != FN_EXPERT_CACHE_FAILED;
}

bool fn_expert_cache_get_device_stats(const fn_expert_cache * cache, int32_t i, fn_expert_cache_device_stats * stats) {
    if (i < 0 || i >= (int32_t) cache->slots->devices.size()) {
        return false;
    }
    const fn_slot_device & device = cache->slots->devices[i];

    *stats = {};
    snprintf(stats->name, sizeof(stats->name), "%s", ggml_backend_dev_name(device.dev));
    stats->n_layers = (int32_t) device.layers.size();
    if (fn_holds_memory(cache)) {
        stats->capacity   = (uint64_t) cache->params.n_slots*device.layers.size();
        stats->size_bytes = device.need_bytes;
    }
    for (const int32_t il : device.layers) {
        const fn_expert_counters & counters = cache->core->counters(il);
        stats->hits    += counters.hits;
        stats->misses  += counters.misses;
        stats->uploads += counters.uploads;
    }
    return true;
}

void fn_expert_cache_get_stats(const fn_expert_cache * cache, fn_expert_cache_stats * stats) {
    *stats = {};
    stats->phase         = cache->phase;
    stats->n_slots       = cache->params.n_slots;
    stats->n_inserts     = cache->params.n_inserts;
    stats->n_layers      = (int32_t) cache->layers.size();
    stats->n_devices     = (int32_t) cache->slots->devices.size();
    stats->generation    = cache->generation;
    stats->n_steps       = cache->n_steps;
    stats->size_bytes    = cache->size_bytes;
    stats->cpu_rows      = cache->cpu_rows();

    fn_expert_cache_device_stats device;
    for (int32_t i = 0; fn_expert_cache_get_device_stats(cache, i, &device); ++i) {
        stats->capacity += device.capacity;
        stats->hits     += device.hits;
        stats->misses   += device.misses;
        stats->uploads  += device.uploads;
    }
}

size_t fn_expert_cache_metrics(llama_context * ctx, char * buf, size_t size) {
    const fn_expert_cache * cache = fn_expert_cache_get(ctx);
    if (!cache) {
        return 0;
    }

    fn_expert_cache_stats stats;
    fn_expert_cache_get_stats(cache, &stats);

    struct series {
        const char * name;
        const char * type;
        const char * help;
        uint64_t fn_expert_cache_device_stats::* value;
    };
    static const series per_device[] = {
        { "capacity_slots", "gauge",   "Slots of all layers on the device",                 &fn_expert_cache_device_stats::capacity   },
        { "size_bytes",     "gauge",   "Device memory held by the slots",                   &fn_expert_cache_device_stats::size_bytes },
        { "hits_total",     "counter", "Routed experts computed on the device",             &fn_expert_cache_device_stats::hits       },
        { "misses_total",   "counter", "Routed experts computed on the CPU",                &fn_expert_cache_device_stats::misses     },
        { "uploads_total",  "counter", "Experts copied into slots",                         &fn_expert_cache_device_stats::uploads    },
    };

    std::string out;
    for (const series & s : per_device) {
        const std::string name = std::string("fn_expert_cache_") + s.name;
        out += "# HELP " + name + " " + s.help + "\n# TYPE " + name + " " + s.type + "\n";

        fn_expert_cache_device_stats device;
        for (int32_t i = 0; fn_expert_cache_get_device_stats(cache, i, &device); ++i) {
            out += name + "{device=" + fn_cache_json_string(device.name) + "} " + std::to_string(device.*s.value) + "\n";
        }
    }

    auto single = [&](const char * name, const char * type, const char * help, uint64_t value) {
        out += std::string("# HELP fn_expert_cache_") + name + " " + help + "\n# TYPE fn_expert_cache_" + name + " " + type +
            "\nfn_expert_cache_" + name + " " + std::to_string(value) + "\n";
    };
    single("slots_per_layer",   "gauge",   "Slots per layer, as configured",                     stats.n_slots);
    single("generation",        "counter", "Completed releases and restores",                    stats.generation);
    single("steps_total",       "counter", "Graph executions with the cache",                    stats.n_steps);
    single("cpu_rows_total",    "counter", "Expert rows computed on the CPU, equal to misses",   stats.cpu_rows);

    out += "# HELP fn_expert_cache_phase The phase the cache is in has the value 1\n# TYPE fn_expert_cache_phase gauge\n";
    for (int32_t phase = FN_EXPERT_CACHE_READY; phase <= FN_EXPERT_CACHE_FAILED; ++phase) {
        out += std::string("fn_expert_cache_phase{phase=\"") + fn_expert_cache_phase_name(phase) + "\"} " + (phase == stats.phase ? "1" : "0") + "\n";
    }

    if (size > 0) {
        const size_t n = std::min(size - 1, out.size());
        memcpy(buf, out.data(), n);
        buf[n] = 0;
    }
    return out.size();
}

void fn_expert_cache_print_stats(const fn_expert_cache * cache) {
    fn_expert_cache_stats stats;
    fn_expert_cache_get_stats(cache, &stats);

    std::string devices;
    fn_expert_cache_device_stats device;
    for (int32_t i = 0; fn_expert_cache_get_device_stats(cache, i, &device); ++i) {
        devices += std::string(i ? "," : "") + "{\"device\":" + fn_cache_json_string(device.name) +
            ",\"capacity\":"   + std::to_string(device.capacity) + ",\"size_bytes\":" + std::to_string(device.size_bytes) +
            ",\"hits\":"       + std::to_string(device.hits)     + ",\"misses\":"     + std::to_string(device.misses) +
            ",\"uploads\":"    + std::to_string(device.uploads)  + "}";
    }
    fn_cache_marker("stats", std::string("{\"phase\":\"") + fn_expert_cache_phase_name(stats.phase) + "\",\"generation\":" + std::to_string(stats.generation) +
            ",\"n_slots\":"  + std::to_string(stats.n_slots)  + ",\"steps\":"      + std::to_string(stats.n_steps) +
            ",\"capacity\":" + std::to_string(stats.capacity) + ",\"size_bytes\":" + std::to_string(stats.size_bytes) +
            ",\"hits\":"     + std::to_string(stats.hits)     + ",\"misses\":"     + std::to_string(stats.misses) +
            ",\"uploads\":"  + std::to_string(stats.uploads)  + ",\"cpu_rows\":"   + std::to_string(stats.cpu_rows) +
            ",\"devices\":[" + devices + "]}");
}
