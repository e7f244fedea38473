// Drives a model through arms that differ in the expert cache alone, in one process and on one loaded model.
// Each arm makes a context, decodes the same tokens in the same batches and prints one JSON line on stdout:
//
//   fn-expert-cache-run -m model.gguf --rpc 127.0.0.1:50052 --schedule 1x200 --arm slots=0 --arm slots=16,logits=a.bin
//
// Used by the tests (logits to the byte) and by the bench on real GPUs (tokens per second).

#include "fn-expert-cache.h"
#include "fn-run-model.h"

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct run_options : fn_run_options {
    std::string schedule = "1x16"; // groups of <batch>x<count>, comma separated
    int32_t  n_prompt = 0;
    int32_t  n_repeat = 0;     // > 0: the tokens repeat with this period
    uint32_t seed     = 1;
    bool     greedy   = false; // batch of one: the next token is the most likely one
    std::vector<std::string> nodes; // names of graph nodes whose values the arms write
};

struct run_arm {
    int32_t     n_slots   = 0;
    int32_t     n_inserts = 2;
    int32_t     n_warm    = 0;  // decode calls before the clock starts
    int32_t     release_at = -1; // decode call before which the slots are released and restored
    int32_t     bypass_at  = -1; // decode call before which the cache is quiesced and resumed
    int32_t     twin       = 0;  // > 0: another context with so many slots decodes in between
    std::string logits;         // file for the rows of logits
    std::string nodes;          // prefix of the files for --node, one each
    std::map<std::string, std::string> env; // FN_EXPERT_CACHE_* switches of the arm
};

static constexpr const char * PROGRAM = "fn-expert-cache-run";

[[noreturn]] static void fail(const std::string & reason) { fn_run_fail(PROGRAM, reason); }

static run_arm parse_arm(const std::string & text) {
    run_arm arm;
    for (const std::string & part : fn_run_split(text, ',')) {
        const size_t eq = part.find('=');
        if (eq == std::string::npos) {
            fail("arm: expected key=value: " + part);
        }
        const std::string key   = part.substr(0, eq);
        const std::string value = part.substr(eq + 1);
        if      (key == "slots")      { arm.n_slots    = atoi(value.c_str()); }
        else if (key == "inserts")    { arm.n_inserts  = atoi(value.c_str()); }
        else if (key == "warm")       { arm.n_warm     = atoi(value.c_str()); }
        else if (key == "release_at") { arm.release_at = atoi(value.c_str()); }
        else if (key == "bypass_at")  { arm.bypass_at  = atoi(value.c_str()); }
        else if (key == "twin")       { arm.twin       = atoi(value.c_str()); }
        else if (key == "logits")     { arm.logits     = value; }
        else if (key == "nodes")      { arm.nodes      = value; }
        else if (key == "merge")      { arm.env["FN_EXPERT_CACHE_MERGE"]     = value; }
        else if (key == "serial")     { arm.env["FN_EXPERT_CACHE_SERIAL"]    = value; }
        else if (key == "late")       { arm.env["FN_EXPERT_CACHE_TEST_LATE"] = value; }
        else if (key == "spin")       { arm.env["FN_EXPERT_CACHE_SPIN_US"]   = value; }
        else if (key == "routing")    { arm.env["FN_EXPERT_CACHE_ROUTING"]   = value; }
        else if (key == "dump")       { arm.env["FN_EXPERT_CACHE_DUMP"]      = value; }
        else { fail("arm: unknown key " + key); }
    }
    return arm;
}

static run_options parse_options(int argc, char ** argv) {
    run_options o;
    o.program = PROGRAM;
    fn_run_parse(o, argc, argv, [&](const std::string & arg, auto & value) {
        if      (arg == "--schedule") { o.schedule  = value(); }
        else if (arg == "--prompt")   { o.n_prompt  = std::stoi(value()); }
        else if (arg == "--repeat")   { o.n_repeat  = std::stoi(value()); }
        else if (arg == "--seed")     { o.seed      = (uint32_t) std::stoul(value()); }
        else if (arg == "--dio")      { o.load_mode = LLAMA_LOAD_MODE_DIRECT_IO; }
        else if (arg == "--greedy")   { o.greedy    = true; }
        else if (arg == "--node")     { o.nodes.push_back(value()); }
        else { return false; }
        return true;
    });
    return o;
}

class decoder {
public:
    decoder(const run_options & o, llama_context * ctx, const llama_vocab * vocab) :
        o(o), ctx(ctx), n_vocab(llama_vocab_n_tokens(vocab)), batch(llama_batch_init(o.n_batch, 0, 1)), state(o.seed) {}

    ~decoder() { llama_batch_free(batch); }

    llama_token next_token() {
        if (o.greedy && best >= 0) {
            return best;
        }
        if (o.n_repeat > 0 && n_drawn % o.n_repeat == 0) {
            state = o.seed;
        }
        n_drawn++;
        state = state*1664525u + 1013904223u;
        return (llama_token) ((state >> 8) % n_vocab);
    }

    void decode(int32_t n, bool all_outputs, FILE * file) {
        batch.n_tokens = n;
        for (int32_t i = 0; i < n; ++i) {
            batch.token   [i] = next_token();
            batch.pos     [i] = n_past + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id  [i][0] = 0;
            batch.logits  [i] = all_outputs || i == n - 1;
        }
        const int32_t result = llama_decode(ctx, batch);
        if (result != 0) {
            fail("llama_decode returned " + std::to_string(result));
        }
        n_past += n;

        for (int32_t i = all_outputs ? 0 : n - 1; i < n; ++i) {
            const float * row = llama_get_logits_ith(ctx, i);
            best = (llama_token) (std::max_element(row, row + n_vocab) - row);
            if (file && fwrite(row, sizeof(float), n_vocab, file) != (size_t) n_vocab) {
                fail("cannot write the logits");
            }
        }
    }

private:
    const run_options & o;
    llama_context *     ctx;
    const int32_t       n_vocab;
    llama_batch         batch;
    uint32_t            state;
    int32_t             n_drawn = 0;
    int32_t             n_past  = 0;
    llama_token         best    = -1;
};

static void between_calls(const run_arm & arm, llama_context * ctx, int32_t i) {
    fn_expert_cache * cache = fn_expert_cache_get(ctx);
    if (!cache) {
        return;
    }
    int32_t result = 0;
    if (i == arm.release_at) {
        result = fn_expert_cache_release(cache);
        result = result ? result : fn_expert_cache_restore(cache);
    }
    if (i == arm.bypass_at) {
        result = fn_expert_cache_quiesce(cache);
        result = result ? result : fn_expert_cache_resume(cache);
    }
    if (result != 0) {
        fail("release and restore: code " + std::to_string(result));
    }
}

// values of chosen graph nodes, appended call by call
struct node_writer {
    std::map<std::string, FILE *> files;
    std::vector<uint8_t>          bytes;

    ~node_writer() {
        for (auto & item : files) {
            fclose(item.second);
        }
    }

    static bool eval(ggml_tensor * t, bool ask, void * user_data) {
        node_writer & self = *(node_writer *) user_data;
        const auto it = self.files.find(t->name);
        if (it == self.files.end()) {
            return !ask;
        }
        if (!ask) {
            if (!ggml_is_contiguous(t)) {
                fail(std::string("not contiguous: ") + t->name);
            }
            self.bytes.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, self.bytes.data(), 0, self.bytes.size());
            if (fwrite(self.bytes.data(), 1, self.bytes.size(), it->second) != self.bytes.size()) {
                fail(std::string("cannot write ") + t->name);
            }
        }
        return true;
    }
};

static int run_one_arm(const run_options & o, const std::string & text, llama_model * model) {
    const run_arm arm = parse_arm(text);

    for (const char * name : { "MERGE", "SERIAL", "TEST_LATE", "SPIN_US", "ROUTING", "DUMP" }) {
        unsetenv((std::string("FN_EXPERT_CACHE_") + name).c_str());
    }
    for (const auto & item : arm.env) {
        setenv(item.first.c_str(), item.second.c_str(), 1);
    }

    llama_context_params params = fn_run_context(o);

    node_writer nodes;
    if (!arm.nodes.empty()) {
        for (const std::string & name : o.nodes) {
            FILE * file = fopen((arm.nodes + name).c_str(), "wb");
            if (!file) {
                fail("cannot write " + arm.nodes + name);
            }
            nodes.files[name] = file;
        }
        params.cb_eval           = node_writer::eval;
        params.cb_eval_user_data = &nodes;
    }

    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail("cannot make a context");
    }

    llama_context * twin_ctx = nullptr;
    if (arm.twin > 0) {
        llama_context_params twin_params = params;
        twin_params.cb_eval = nullptr;
        twin_ctx = llama_init_from_model(model, twin_params);
        if (!twin_ctx || fn_expert_cache_attach(twin_ctx, { arm.twin, arm.n_inserts }) != FN_EXPERT_CACHE_OK) {
            fail("cannot make the twin");
        }
    }

    const int32_t attached = fn_expert_cache_attach(ctx, { arm.n_slots, arm.n_inserts });
    if (attached != FN_EXPERT_CACHE_OK) {
        llama_free(ctx);
        printf("{\"event\":\"refused\",\"arm\":\"%s\",\"code\":%d}\n", text.c_str(), attached);
        return 3;
    }

    FILE * file = nullptr;
    if (!arm.logits.empty()) {
        file = fopen(arm.logits.c_str(), "wb");
        if (!file) {
            fail("cannot write " + arm.logits);
        }
    }

    decoder dec(o, ctx, llama_model_get_vocab(model));

    run_options twin_o = o;
    twin_o.seed = o.seed + 1;
    std::unique_ptr<decoder> twin(twin_ctx ? new decoder(twin_o, twin_ctx, llama_model_get_vocab(model)) : nullptr);

    const int64_t t_prompt = ggml_time_us();
    for (int32_t left = o.n_prompt; left > 0; left -= o.n_batch) {
        dec.decode(std::min(left, o.n_batch), false, nullptr);
    }
    const double prompt_s = (ggml_time_us() - t_prompt)/1e6;

    int32_t n_calls  = 0;
    int64_t n_tokens = 0;
    int64_t t_start  = ggml_time_us();

    for (const std::string & group : fn_run_split(o.schedule, ',')) {
        int32_t n = 0;
        int32_t count = 0;
        if (sscanf(group.c_str(), "%dx%d", &n, &count) != 2 || n < 1 || n > o.n_batch) {
            fail("schedule: expected <batch>x<count>: " + group);
        }
        for (int32_t i = 0; i < count; ++i) {
            if (n_calls == arm.n_warm) {
                n_tokens = 0;
                t_start  = ggml_time_us();
            }
            between_calls(arm, ctx, n_calls);
            if (twin) {
                twin->decode(1 + n_calls % 3, true, nullptr);
            }
            dec.decode(n, true, file);
            n_calls++;
            n_tokens += n;
        }
    }

    const double t_s = (ggml_time_us() - t_start)/1e6;
    if (file) {
        fclose(file);
    }

    fn_expert_cache_stats stats = {};
    if (fn_expert_cache * cache = fn_expert_cache_get(ctx)) {
        fn_expert_cache_get_stats(cache, &stats);
    }
    printf("{\"event\":\"arm\",\"arm\":\"%s\",\"calls\":%d,\"tokens\":%" PRId64 ",\"prompt_s\":%.6f,\"seconds\":%.6f,\"tokens_per_s\":%.3f,"
           "\"steps\":%" PRIu64 ",\"hits\":%" PRIu64 ",\"misses\":%" PRIu64 ",\"uploads\":%" PRIu64 ",\"cpu_rows\":%" PRIu64 ","
           "\"capacity\":%" PRIu64 ",\"size_bytes\":%" PRIu64 ",\"generation\":%" PRIu64 ",\"n_devices\":%d}\n",
           text.c_str(), n_calls, n_tokens, prompt_s, t_s, n_tokens/t_s,
           stats.n_steps, stats.hits, stats.misses, stats.uploads, stats.cpu_rows,
           stats.capacity, stats.size_bytes, stats.generation, stats.n_devices);
    fflush(stdout);

    twin.reset();
    llama_free(twin_ctx);
    llama_free(ctx);
    return 0;
}

int main(int argc, char ** argv) {
    const run_options o = parse_options(argc, argv);
    fn_run_start(o);

    const int64_t t_start = ggml_time_us();
    llama_model * model = fn_run_load(o);
    printf("{\"event\":\"loaded\",\"load_s\":%.3f}\n", (ggml_time_us() - t_start)/1e6);

    return fn_run_arms(o, model, [&](const std::string & arm, llama_model * m) { return run_one_arm(o, arm, m); });
}
