// Drives a model through arms that differ in how a prompt gets its experts, in one process and on one loaded model.
// Each arm makes a context, decodes the same tokens in the same calls and prints one JSON line on stdout:
//
//   fn-lean-run -m model.gguf --rpc 127.0.0.1:50052 --steps "300;1x8;131" --arm ub=64 --arm lean=64,logits=b.bin
//
// Steps: <n> one call of n tokens; <n>x<count> calls of n tokens each; "clear" forgets everything. Arm: lean=<tokens>|auto, ub=<tokens>,
// slots=<n>, inserts=<n>, logits=<file>, and NAME=value for an environment variable of the arm.
// Used by the tests (logits to the byte) and by the bench on real GPUs (seconds of every step).

#include "fn-expert-cache.h"
#include "fn-lean.h"

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

struct run_options {
    std::string model;
    std::string rpc;             // endpoints, comma separated
    std::string experts = "CPU"; // buffer type of the experts, "device" = where the layer is
    std::string split;           // proportions of the devices, comma separated
    std::string steps = "64";
    int32_t  n_ctx      = 4096;
    int32_t  n_batch    = 2048;
    int32_t  n_ubatch   = 512;
    int32_t  n_threads  = 1;
    bool     flash      = false;
    bool     all_logits = false;
    bool     no_mmap    = false;
    bool     verbose    = false;
    std::vector<std::string> arms;
};

struct run_arm {
    int32_t     n_lean    = 0;
    int32_t     n_ubatch  = 0;
    int32_t     n_slots   = 0;
    int32_t     n_inserts = 2;
    std::string logits;
    std::map<std::string, std::string> env;
};

[[noreturn]] static void fail(const std::string & reason) {
    fprintf(stderr, "fn-lean-run: %s\n", reason.c_str());
    exit(2);
}

static std::vector<std::string> split_on(const std::string & s, char sep) {
    std::vector<std::string> parts;
    for (size_t start = 0; start <= s.size(); ) {
        const size_t end = std::min(s.find(sep, start), s.size());
        if (end > start) {
            parts.push_back(s.substr(start, end - start));
        }
        start = end + 1;
    }
    return parts;
}

static run_arm parse_arm(const run_options & o, const std::string & text) {
    run_arm arm;
    arm.n_ubatch = o.n_ubatch;
    for (const std::string & part : split_on(text, ',')) {
        const size_t eq = part.find('=');
        if (eq == std::string::npos) {
            fail("arm: expected key=value: " + part);
        }
        const std::string key   = part.substr(0, eq);
        const std::string value = part.substr(eq + 1);
        if      (key == "lean")    { arm.n_lean    = value == "auto" ? FN_LEAN_AUTO : std::stoi(value); }
        else if (key == "ub")      { arm.n_ubatch  = std::stoi(value); }
        else if (key == "slots")   { arm.n_slots   = std::stoi(value); }
        else if (key == "inserts") { arm.n_inserts = std::stoi(value); }
        else if (key == "logits")  { arm.logits    = value; }
        else if (key.rfind("FN_", 0) == 0 || key.rfind("LLAMA_", 0) == 0) { arm.env[key] = value; }
        else { fail("arm: unknown key " + key); }
    }
    return arm;
}

static run_options parse_options(int argc, char ** argv) {
    run_options o;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        auto value = [&]() -> std::string {
            if (i + 1 >= argc) {
                fail(arg + " needs a value");
            }
            return argv[++i];
        };
        if      (arg == "-m")           { o.model      = value(); }
        else if (arg == "--rpc")        { o.rpc        = value(); }
        else if (arg == "--experts")    { o.experts    = value(); }
        else if (arg == "--split")      { o.split      = value(); }
        else if (arg == "--steps")      { o.steps      = value(); }
        else if (arg == "--ctx")        { o.n_ctx      = std::stoi(value()); }
        else if (arg == "--batch")      { o.n_batch    = std::stoi(value()); }
        else if (arg == "--ubatch")     { o.n_ubatch   = std::stoi(value()); }
        else if (arg == "--threads")    { o.n_threads  = std::stoi(value()); }
        else if (arg == "--flash")      { o.flash      = true; }
        else if (arg == "--all-logits") { o.all_logits = true; }
        else if (arg == "--no-mmap")    { o.no_mmap    = true; }
        else if (arg == "--verbose")    { o.verbose    = true; }
        else if (arg == "--arm")        { o.arms.push_back(value()); }
        else { fail("unknown argument " + arg); }
    }
    if (o.model.empty() || o.arms.empty()) {
        fail("-m and at least one --arm are needed");
    }
    return o;
}

static void add_rpc_devices(const std::string & endpoints) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    if (!reg) {
        fail("this build has no RPC backend");
    }
    typedef ggml_backend_reg_t (*add_server_fn)(const char * endpoint);
    auto add_server = (add_server_fn) ggml_backend_reg_get_proc_address(reg, "ggml_backend_rpc_add_server");
    for (const std::string & endpoint : split_on(endpoints, ',')) {
        ggml_backend_register(add_server(endpoint.c_str()));
    }
}

static ggml_backend_buffer_type_t find_buffer_type(const std::string & name) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        for (ggml_backend_buffer_type_t buft : { ggml_backend_dev_buffer_type(dev), ggml_backend_dev_host_buffer_type(dev) }) {
            if (buft && name == ggml_backend_buft_name(buft)) {
                return buft;
            }
        }
    }
    fail("no buffer type " + name);
}

static llama_model * load_model(const run_options & o) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers    = 99;
    params.use_extra_bufts = false; // repacked experts are not host memory
    params.load_mode       = o.no_mmap ? LLAMA_LOAD_MODE_NONE : LLAMA_LOAD_MODE_MMAP;

    std::vector<llama_model_tensor_buft_override> overrides;
    if (o.experts != "device") {
        overrides.push_back({ "ffn_(gate|up|down)_exps", find_buffer_type(o.experts) });
    }
    overrides.push_back({ nullptr, nullptr });
    params.tensor_buft_overrides = overrides.data();

    std::vector<float> split(llama_max_devices(), 0.0f);
    if (!o.split.empty()) {
        const std::vector<std::string> parts = split_on(o.split, ',');
        for (size_t i = 0; i < parts.size() && i < split.size(); ++i) {
            split[i] = std::stof(parts[i]);
        }
        params.tensor_split = split.data();
    }

    llama_model * model = llama_model_load_from_file(o.model.c_str(), params);
    if (!model) {
        fail("cannot load " + o.model);
    }
    return model;
}

class decoder {
public:
    decoder(const run_options & o, llama_context * ctx, FILE * file) :
        o(o), ctx(ctx), file(file), n_vocab(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))) {}

    // seconds of the call
    double decode(int32_t n) {
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int32_t i = 0; i < n; ++i) {
            state = state*1664525u + 1013904223u;
            batch.token   [i] = (llama_token) ((state >> 8) % n_vocab);
            batch.pos     [i] = n_past + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id  [i][0] = 0;
            batch.logits  [i] = o.all_logits || i == n - 1;
        }
        const int64_t t_start = ggml_time_us();
        const int32_t result = llama_decode(ctx, batch);
        llama_synchronize(ctx);
        const double seconds = (ggml_time_us() - t_start)/1e6;
        if (result != 0) {
            fail("llama_decode returned " + std::to_string(result));
        }
        n_past += n;

        for (int32_t i = o.all_logits ? 0 : n - 1; i < n; ++i) {
            const float * row = llama_get_logits_ith(ctx, i);
            for (int32_t j = 0; j < n_vocab; ++j) {
                n_nan += row[j] != row[j];
            }
            if (file && fwrite(row, sizeof(float), n_vocab, file) != (size_t) n_vocab) {
                fail("cannot write the logits");
            }
        }
        llama_batch_free(batch);
        return seconds;
    }

    void clear() {
        llama_memory_clear(llama_get_memory(ctx), true);
        n_past = 0;
    }

    int64_t n_nan = 0;

private:
    const run_options & o;
    llama_context *     ctx;
    FILE *              file;
    const int32_t       n_vocab;
    uint32_t            state  = 1;
    int32_t             n_past = 0;
};

static void print_lean(llama_context * ctx) {
    const fn_lean * lean = fn_lean_get(ctx);
    if (!lean) {
        return;
    }
    fn_lean_stats s;
    fn_lean_get_stats(lean, &s);
    printf(",\"lean\":{\"chunk\":%d,\"ring\":%d,\"ubatch_seen\":%u,\"passes\":%" PRIu64 ",\"tokens\":%" PRIu64 ",\"plain\":%" PRIu64
           ",\"reserves\":%" PRIu64 ",\"verified\":%" PRIu64 ",\"compute_us\":%" PRIu64 ",\"wait_us\":%" PRIu64 ",\"refills\":%" PRIu64
           ",\"refill_us\":%" PRIu64 ",\"devices\":[",
           s.n_chunk, s.n_ring, llama_n_ubatch(ctx), s.n_passes, s.n_tokens, s.n_plain, s.n_reserves, s.n_verified, s.compute_us, s.wait_us,
           s.n_refills, s.refill_us);
    fn_lean_device_stats d;
    for (int32_t i = 0; fn_lean_get_device_stats(lean, i, &d); ++i) {
        printf("%s{\"name\":\"%s\",\"layers\":%d,\"size_bytes\":%" PRIu64 ",\"uploaded\":%" PRIu64 ",\"copied\":%" PRIu64 ",\"upload_us\":%" PRIu64
               ",\"wait_us\":%" PRIu64 ",\"layers_run\":%" PRIu64 ",\"ready\":%" PRIu64 "}",
               i ? "," : "", d.name, d.n_layers, d.size_bytes, d.bytes_uploaded, d.bytes_copied, d.upload_us, d.wait_us, d.n_layers_run, d.n_ready);
    }
    printf("]}");
}

static int run_one_arm(const run_options & o, const std::string & text, llama_model * model) {
    const run_arm arm = parse_arm(o, text);

    for (const auto & item : arm.env) {
        setenv(item.first.c_str(), item.second.c_str(), 1);
    }

    llama_context_params params = llama_context_default_params();
    params.n_ctx           = o.n_ctx;
    params.n_batch         = o.n_batch;
    params.n_ubatch        = arm.n_ubatch;
    params.n_threads       = o.n_threads;
    params.n_threads_batch = o.n_threads;
    params.n_seq_max       = 1;
    params.flash_attn_type = o.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.n_outputs_max   = o.all_logits ? o.n_batch : 1; // a server asks for one row per sequence

    int result = 0;
    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        printf("{\"event\":\"refused\",\"arm\":\"%s\",\"by\":\"context\"}\n", text.c_str());
        result = 3;
    } else if (fn_expert_cache_attach(ctx, { arm.n_slots, arm.n_inserts }) != FN_EXPERT_CACHE_OK) {
        printf("{\"event\":\"refused\",\"arm\":\"%s\",\"by\":\"cache\"}\n", text.c_str());
        result = 3;
    } else if (const int32_t code = fn_lean_attach(ctx, arm.n_lean)) {
        printf("{\"event\":\"refused\",\"arm\":\"%s\",\"by\":\"lean\",\"code\":%d}\n", text.c_str(), code);
        result = 3;
    }
    if (result == 0) {
        FILE * file = nullptr;
        if (!arm.logits.empty()) {
            file = fopen(arm.logits.c_str(), "wb");
            if (!file) {
                fail("cannot write " + arm.logits);
            }
        }
        decoder dec(o, ctx, file);
        printf("{\"event\":\"arm\",\"arm\":\"%s\",\"steps\":[", text.c_str());
        const char * comma = "";
        for (const std::string & step : split_on(o.steps, ';')) {
            if (step == "clear") {
                dec.clear();
                continue;
            }
            int32_t n = 0, count = 1;
            if (sscanf(step.c_str(), "%dx%d", &n, &count) < 1 || n < 1 || n > o.n_batch || count < 1) {
                fail("not a step: " + step);
            }
            double seconds = 0.0;
            for (int32_t i = 0; i < count; ++i) {
                seconds += dec.decode(n);
            }
            printf("%s{\"step\":\"%s\",\"tokens\":%d,\"seconds\":%.6f}", comma, step.c_str(), n*count, seconds);
            comma = ",";
        }
        printf("],\"nan\":%" PRId64, dec.n_nan);
        print_lean(ctx);
        if (fn_expert_cache * cache = fn_expert_cache_get(ctx)) {
            fn_expert_cache_stats stats;
            fn_expert_cache_get_stats(cache, &stats);
            printf(",\"hits\":%" PRIu64 ",\"misses\":%" PRIu64 ",\"uploads\":%" PRIu64, stats.hits, stats.misses, stats.uploads);
        }
        printf("}\n");
        if (file) {
            fclose(file);
        }
    }
    fflush(stdout);
    llama_free(ctx);
    for (const auto & item : arm.env) {
        unsetenv(item.first.c_str());
    }
    return result;
}

int main(int argc, char ** argv) {
    const run_options o = parse_options(argc, argv);

    llama_backend_init();
    ggml_backend_load_all();
    if (!o.verbose) {
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                fputs(text, stderr);
            }
        }, nullptr);
    }
    if (!o.rpc.empty()) {
        add_rpc_devices(o.rpc);
    }
    llama_model * model = load_model(o);
    int result = 0;
    for (const std::string & arm : o.arms) {
        result = std::max(result, run_one_arm(o, arm, model));
    }
    llama_model_free(model);
    llama_backend_free();
    return result;
}
