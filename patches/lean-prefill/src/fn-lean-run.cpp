// Drives a model through arms that differ in how a prompt gets its experts, in one process and on one loaded model.
// Each arm makes a context, decodes the same tokens in the same calls and prints one JSON line on stdout:
//
//   fn-lean-run -m model.gguf --rpc 127.0.0.1:50052 --steps "300;1x8;131" --arm ub=64 --arm lean=64,logits=b.bin
//
// Steps: <n> one call of n tokens; <n>x<count> calls of n tokens each; "clear" forgets everything; "release" gives the cache's slots
// back and takes them again, and its code is in the line. Arm: lean=<tokens>|auto, ub=<tokens>,
// slots=<n>, inserts=<n>, logits=<file>, and NAME=value for an environment variable of the arm.
// Used by the tests (logits to the byte) and by the bench on real GPUs (seconds of every step).

#include "fn-expert-cache.h"
#include "fn-lean.h"
#include "fn-run-model.h"

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

struct run_options : fn_run_options {
    std::string steps = "64";
    bool flash      = false;
    bool all_logits = false;
};

struct run_arm {
    int32_t     n_lean    = 0;
    int32_t     n_ubatch  = 0;
    int32_t     n_slots   = 0;
    int32_t     n_inserts = 2;
    std::string logits;
    std::map<std::string, std::string> env;
};

static constexpr const char * PROGRAM = "fn-lean-run";

[[noreturn]] static void fail(const std::string & reason) { fn_run_fail(PROGRAM, reason); }

static run_arm parse_arm(const run_options & o, const std::string & text) {
    run_arm arm;
    arm.n_ubatch = o.n_ubatch;
    for (const std::string & part : fn_run_split(text, ',')) {
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
    o.program = PROGRAM;
    fn_run_parse(o, argc, argv, [&](const std::string & arg, auto & value) {
        if      (arg == "--steps")      { o.steps      = value(); }
        else if (arg == "--flash")      { o.flash      = true; }
        else if (arg == "--all-logits") { o.all_logits = true; }
        else { return false; }
        return true;
    });
    return o;
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

static int32_t release_and_restore(llama_context * ctx) {
    fn_expert_cache * cache = fn_expert_cache_get(ctx);
    if (!cache) {
        fail("release: no expert cache");
    }
    const int32_t result = fn_expert_cache_release(cache);
    return result == FN_EXPERT_CACHE_OK ? fn_expert_cache_restore(cache) : result;
}

static int run_one_arm(const run_options & o, const std::string & text, llama_model * model) {
    const run_arm arm = parse_arm(o, text);

    for (const auto & item : arm.env) {
        setenv(item.first.c_str(), item.second.c_str(), 1);
    }

    llama_context_params params = fn_run_context(o);
    params.n_ubatch        = arm.n_ubatch;
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
        std::string releases;
        for (const std::string & step : fn_run_split(o.steps, ';')) {
            if (step == "clear") {
                dec.clear();
                continue;
            }
            if (step == "release") {
                releases += (releases.empty() ? "" : ",") + std::to_string(release_and_restore(ctx));
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
        printf("],\"nan\":%" PRId64 ",\"releases\":[%s]", dec.n_nan, releases.c_str());
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
    fn_run_start(o);
    return fn_run_arms(o, fn_run_load(o), [&](const std::string & arm, llama_model * model) { return run_one_arm(o, arm, model); });
}
