#include "fn-lean-impl.h"

#include "fn-cache-marker.h"
#include "fn-lean-marker.h"

#include "llama-context.h"

#include <cstring>

static std::string fn_lean_name(const fn_lean_device & device) {
    return fn_cache_json_string(ggml_backend_dev_name(device.stage->dev));
}

void fn_lean_print_attached(const fn_lean & lean) {
    std::string list;
    for (const auto & device : lean.devices) {
        list += std::string(list.empty() ? "" : ",") + "{\"device\":" + fn_lean_name(*device) + ",\"layers\":" + std::to_string(device->layers.size()) +
            ",\"ring_bytes\":" + std::to_string(device->stage->size_bytes) + ",\"lent_bytes\":" + std::to_string(device->stage->lent_bytes) +
            ",\"lent_layers\":" + std::to_string(lean.lending ? device->lent_layers.size() : 0) + ",\"free_bytes\":" + std::to_string(device->free_bytes) + "}";
    }
    fn_lean_marker("attached", "{\"chunk\":" + std::to_string(lean.n_chunk) + ",\"requested\":" +
            (lean.requested == FN_LEAN_AUTO ? "\"auto\"" : std::to_string(lean.requested)) + ",\"ring\":" + std::to_string(lean.n_ring) +
            ",\"min_tokens\":" + std::to_string(lean.min_tokens) + ",\"batch\":" + std::to_string(lean.ctx.n_batch()) +
            ",\"tried\":" + lean.choice + ",\"lent\":" + (lean.lending ? "true" : "false") + ",\"devices\":[" + list + "]}");
}

fn_lean * fn_lean_get(llama_context * ctx) {
    return fn_lean::of(ctx);
}

int32_t fn_lean_attach(llama_context * ctx, int32_t n_chunk) {
    return fn_lean::attach(ctx, n_chunk);
}

bool fn_lean_get_device_stats(const fn_lean * lean, int32_t i, fn_lean_device_stats * stats) {
    if (i < 0 || i >= (int32_t) lean->devices.size()) {
        return false;
    }
    const fn_lean_device & device = *lean->devices[i];
    *stats = {};
    snprintf(stats->name, sizeof(stats->name), "%s", ggml_backend_dev_name(device.stage->dev));
    stats->n_layers       = (int32_t) device.layers.size();
    stats->size_bytes     = device.stage->size_bytes;
    stats->bytes_uploaded = device.stage->bytes_uploaded;
    stats->bytes_copied   = device.stage->bytes_copied;
    stats->upload_us      = device.stage->upload_us;
    stats->wait_us        = device.wait_us;
    stats->n_layers_run   = device.n_run;
    stats->n_ready        = device.n_ready;
    return true;
}

void fn_lean_get_stats(const fn_lean * lean, fn_lean_stats * stats) {
    *stats = {};
    stats->n_chunk    = lean->n_chunk;
    stats->n_ring     = lean->n_ring;
    stats->n_devices  = (int32_t) lean->devices.size();
    stats->n_passes   = lean->n_passes;
    stats->n_tokens   = lean->n_tokens;
    stats->n_plain    = lean->n_plain;
    stats->n_reserves = lean->n_reserves;
    stats->n_verified = lean->n_verified;
    stats->compute_us = lean->compute_us;
    stats->n_refills  = lean->n_refills;
    stats->refill_us  = lean->refill_us;
    for (const auto & device : lean->devices) {
        stats->wait_us += device->wait_us;
    }
}

size_t fn_lean_metrics(llama_context * ctx, char * buf, size_t size) {
    const fn_lean * lean = fn_lean_get(ctx);
    if (!lean) {
        return 0;
    }
    fn_lean_stats stats;
    fn_lean_get_stats(lean, &stats);

    struct series {
        const char * name;
        const char * type;
        const char * help;
        uint64_t fn_lean_device_stats::* value;
    };
    static const series per_device[] = {
        { "staging_bytes",          "gauge",   "Staging memory",                                     &fn_lean_device_stats::size_bytes     },
        { "uploaded_bytes_total",   "counter", "Experts copied from host memory",                    &fn_lean_device_stats::bytes_uploaded },
        { "copied_bytes_total",     "counter", "Experts copied from the cache's slots",              &fn_lean_device_stats::bytes_copied   },
        { "upload_microseconds_total", "counter", "Time of the copies",                              &fn_lean_device_stats::upload_us      },
        { "wait_microseconds_total",   "counter", "Time that the device waited for copies",          &fn_lean_device_stats::wait_us        },
        { "layers_total",           "counter", "Layers computed from staging memory",                &fn_lean_device_stats::n_layers_run   },
        { "layers_ready_total",     "counter", "Of these, layers whose experts were there in time",  &fn_lean_device_stats::n_ready        },
    };
    std::string out;
    for (const series & s : per_device) {
        const std::string name = std::string("fn_lean_") + s.name;
        out += "# HELP " + name + " " + s.help + "\n# TYPE " + name + " " + s.type + "\n";
        fn_lean_device_stats device;
        for (int32_t i = 0; fn_lean_get_device_stats(lean, i, &device); ++i) {
            out += name + "{device=" + fn_cache_json_string(device.name) + "} " + std::to_string(device.*s.value) + "\n";
        }
    }
    auto single = [&](const char * name, const char * type, const char * help, uint64_t value) {
        out += std::string("# HELP fn_lean_") + name + " " + help + "\n# TYPE fn_lean_" + name + " " + type +
            "\nfn_lean_" + name + " " + std::to_string(value) + "\n";
    };
    single("chunk_tokens",               "gauge",   "Physical micro-batch",                                   stats.n_chunk);
    single("passes_total",               "counter", "Micro-batches with experts from staging memory",         stats.n_passes);
    single("tokens_total",               "counter", "Tokens of these",                                        stats.n_tokens);
    single("plain_total",                "counter", "Micro-batches on the plain path",                        stats.n_plain);
    single("refills_total",              "counter", "Times that lent slots were filled again",                stats.n_refills);
    single("refill_microseconds_total",  "counter", "Time of these",                                          stats.refill_us);
    single("reserves_total",             "counter", "Workspaces that had to grow",                            stats.n_reserves);
    single("compute_microseconds_total", "counter", "Time between a layer's release and the next layer's stop", stats.compute_us);

    if (size > 0) {
        const size_t n = std::min(size - 1, out.size());
        memcpy(buf, out.data(), n);
        buf[n] = 0;
    }
    return out.size();
}

void fn_lean::write_timeline(fn_lean_device & device) {
    for (const fn_lean_job_times & t : device.stage->take_times()) {
        fprintf(timeline.get(), "{\"what\":\"upload\",\"layer\":%d,\"device\":%d,\"place\":%d,\"t_submit_us\":%lld,\"t_begin_us\":%lld,\"t_end_us\":%lld,"
                "\"bytes_uploaded\":%llu,\"bytes_copied\":%llu}\n",
                layers[t.layer]->il, layers[t.layer]->device, t.place, (long long) t.t_submit, (long long) t.t_begin, (long long) t.t_end,
                (unsigned long long) t.bytes_uploaded, (unsigned long long) t.bytes_copied);
    }
    fflush(timeline.get());
}

// the first micro-batch that is not from staging memory ends a prompt
void fn_lean::end_prompt() {
    if (report) {
        uint64_t wait_us = 0, upload_us = 0, up = 0, copied = 0;
        for (const auto & device : devices) {
            wait_us   += device->wait_us;
            upload_us += device->stage->upload_us;
            up        += device->stage->bytes_uploaded;
            copied    += device->stage->bytes_copied;
        }
        fn_lean_marker("prompt", "{\"passes\":" + std::to_string(prompt.n_passes) + ",\"tokens\":" + std::to_string(prompt.n_tokens) +
                ",\"us\":"             + std::to_string(ggml_time_us() - prompt.t_begin) +
                ",\"compute_us\":"     + std::to_string(compute_us - prompt.compute_us) +
                ",\"wait_us\":"        + std::to_string(wait_us    - prompt.wait_us) +
                ",\"upload_us\":"      + std::to_string(upload_us  - prompt.upload_us) +
                ",\"uploaded_bytes\":" + std::to_string(up         - prompt.bytes_uploaded) +
                ",\"copied_bytes\":"   + std::to_string(copied     - prompt.bytes_copied) + "}");
    }
    prompt = fn_lean_prompt();
}
