// Runs one schedule of tokens through contexts that differ in the tiled attention alone, on one loaded model.
// Each arm prints one JSON line and may write the logits of every token (f32, in order of decoding):
//
//   fn-tiled-qsa-run -m model.gguf --steps "0:300;0,1:100;cp:0>1;img:0:6x5;0:1" --arm 0 --arm 128,logits=b.bin
//
// An arm is a tile size, 0 = stock. Steps, one call of llama_decode each:
//   <seqs>:<n>       n tokens for each of these sequences, in one batch
//   img:<seq>:<w>x<h> an image of w*h embeddings, all at one position, told apart by row and column
//   cp:<a>>b         sequence b becomes a copy of a
//
// With --reserve nothing is decoded and no memory is taken: it prints what the contexts would reserve. With --sweep as
// well: how many micro-batches of the sizes below n_ubatch would need more than that, the largest number of nodes,
// and the host time for one graph of n_ubatch tokens.

#include "ggml-backend.h"
#include "llama.h"
#include "llama-context.h"
#include "llama-memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

struct run_options {
    std::string model;
    std::string rpc; // endpoints, comma separated
    std::string steps = "0:64";
    int32_t  n_ctx     = 4096;
    int32_t  n_ubatch  = 512;
    int32_t  n_batch   = 0; // 0 = n_ubatch
    int32_t  n_seqs    = 1;
    int32_t  n_threads = 2;
    bool     flash     = false;
    bool     causal    = true;
    bool     unified   = true;
    bool     reserve   = false;
    bool     experts_on_device = false;
    int32_t  sweep     = 0; // > 0: every so many tokens
    bool     verbose   = false;
    ggml_type type_kv  = GGML_TYPE_F16;
    std::vector<std::string> arms;
};

[[noreturn]] static void fail(const std::string & reason) {
    fprintf(stderr, "fn-tiled-qsa-run: %s\n", reason.c_str());
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

// what an arm's log says
struct log_facts {
    std::map<std::string, double> compute_mib; // per buffer type, as printed when the context is made
    int64_t n_tiled_layers = 0;                // layers built tiled
    int64_t n_tiles        = 0;
    double  reserve_ms     = 0.0;              // host time of the reserve
    bool    verbose        = false;

    static void collect(ggml_log_level level, const char * text, void * user_data) {
        log_facts & self = *(log_facts *) user_data;
        char   name[128];
        double value = 0.0;
        int    layer = 0;
        int64_t tokens = 0;
        int64_t tiles  = 0;
        const char * at = text;
        while (*at && *at != ':') { at++; }
        if (sscanf(at, ": %127s compute buffer size = %lf", name, &value) == 2) {
            self.compute_mib[name] = value;
        }
        if (sscanf(at, ": reserve took %lf ms", &value) == 1) {
            self.reserve_ms = value;
        }
        if (sscanf(text, "fn_tiled_qsa: layer %d, %" SCNd64 " tokens in %" SCNd64 " tiles", &layer, &tokens, &tiles) == 3) {
            self.n_tiled_layers++;
            self.n_tiles += tiles;
        }
        if (self.verbose || level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }
};

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
        if      (arg == "-m")          { o.model     = value(); }
        else if (arg == "--rpc")       { o.rpc       = value(); }
        else if (arg == "--steps")     { o.steps     = value(); }
        else if (arg == "--ctx")       { o.n_ctx     = std::stoi(value()); }
        else if (arg == "--ubatch")    { o.n_ubatch  = std::stoi(value()); }
        else if (arg == "--batch")     { o.n_batch   = std::stoi(value()); }
        else if (arg == "--seqs")      { o.n_seqs    = std::stoi(value()); }
        else if (arg == "--threads")   { o.n_threads = std::stoi(value()); }
        else if (arg == "--flash")     { o.flash     = true; }
        else if (arg == "--noncausal") { o.causal    = false; }
        else if (arg == "--streams")   { o.unified   = false; }
        else if (arg == "--reserve")   { o.reserve   = true; }
        else if (arg == "--sweep")     { o.sweep     = std::stoi(value()); }
        else if (arg == "--experts-on-device") { o.experts_on_device = true; }
        else if (arg == "--verbose")   { o.verbose   = true; }
        else if (arg == "--kv") {
            const std::string type = value();
            o.type_kv = type == "q8_0" ? GGML_TYPE_Q8_0 : type == "q4_0" ? GGML_TYPE_Q4_0 : type == "f16" ? GGML_TYPE_F16 : GGML_TYPE_COUNT;
            if (o.type_kv == GGML_TYPE_COUNT) {
                fail("--kv must be f16, q8_0 or q4_0, got " + type);
            }
        }
        else if (arg == "--arm")       { o.arms.push_back(value()); }
        else { fail("unknown argument " + arg); }
    }
    if (o.model.empty() || o.arms.empty()) {
        fail("-m and at least one --arm are needed");
    }
    if (o.n_batch == 0) {
        o.n_batch = o.n_ubatch;
    }
    return o;
}

// sizes of the compute buffers, to see that no call grows one
static std::vector<size_t> buffer_sizes(llama_context * ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    std::vector<size_t> sizes;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        sizes.push_back(ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i)));
    }
    return sizes;
}

static void sweep(const run_options & o, llama_context * ctx) {
    llama_memory_context_ptr full = llama_get_memory(ctx)->init_full();
    const int n_backends = ggml_backend_sched_get_n_backends(ctx->get_sched());

    std::vector<size_t> reserved(n_backends);
    std::vector<size_t> sizes(n_backends);
    auto measure = [&](uint32_t n, std::vector<size_t> & dst) {
        ggml_cgraph * gf = ctx->graph_reserve(n, 1, 1, full.get(), /*split_only=*/ true, dst.data());
        if (!gf) {
            fail("cannot build the graph of " + std::to_string(n) + " tokens");
        }
        return ggml_graph_n_nodes(gf);
    };

    int64_t n_sizes   = 0;
    int64_t n_larger  = 0;
    int     max_nodes = measure(o.n_ubatch, reserved);
    for (int32_t n = 1; n < o.n_ubatch; n += n < 32 ? 1 : o.sweep) {
        max_nodes = std::max(max_nodes, measure(n, sizes));
        bool larger = false;
        for (int i = 0; i < n_backends; ++i) {
            if (sizes[i] > reserved[i]) {
                larger = true;
                fprintf(stderr, "%d tokens: backend %d needs %zu bytes of %zu reserved\n", n, i, sizes[i], reserved[i]);
            }
        }
        n_sizes++;
        n_larger += larger;
    }
    int64_t build_us = INT64_MAX; // the graph on the host: nodes, splits, places in the buffers
    for (int i = 0; i < 5; ++i) {
        const int64_t t_start = ggml_time_us();
        measure(o.n_ubatch, sizes);
        build_us = std::min(build_us, ggml_time_us() - t_start);
    }
    printf(",\"build_ms\":%.2f,\"swept\":%" PRId64 ",\"larger\":%" PRId64 ",\"max_nodes\":%d", build_us/1000.0, n_sizes, n_larger, max_nodes);
}

class runner {
public:
    runner(const run_options & o, const llama_model * model, llama_context * ctx, FILE * file) :
        o(o), ctx(ctx), file(file), n_vocab(llama_vocab_n_tokens(llama_model_get_vocab(model))),
        n_embd(llama_model_n_embd_inp(model)), pos(o.n_seqs, 0), sizes(buffer_sizes(ctx)) {}

    void step(const std::string & text) {
        int a = 0, b = 0, w = 0, h = 0;
        if (sscanf(text.c_str(), "cp:%d>%d", &a, &b) == 2) {
            llama_memory_seq_cp(llama_get_memory(ctx), a, b, -1, -1);
            pos.at(b) = pos.at(a);
        } else if (sscanf(text.c_str(), "img:%d:%dx%d", &a, &w, &h) == 3) {
            image(a, w, h);
        } else {
            const size_t colon = text.find(':');
            if (colon == std::string::npos) {
                fail("not a step: " + text);
            }
            tokens(split_on(text.substr(0, colon), ','), std::stoi(text.substr(colon + 1)));
        }
    }

    int64_t n_tokens = 0;
    int64_t n_calls  = 0;
    int64_t n_grown  = 0;
    int64_t n_nan    = 0;

private:
    uint32_t draw() {
        state = state*1664525u + 1013904223u;
        return state >> 8;
    }

    void tokens(const std::vector<std::string> & seqs, int32_t n) {
        llama_batch batch = llama_batch_init(n*(int32_t) seqs.size(), 0, 1);
        for (const std::string & name : seqs) {
            const llama_seq_id seq = std::stoi(name);
            for (int32_t i = 0; i < n; ++i) {
                const int32_t t = batch.n_tokens++;
                batch.token   [t] = (llama_token) (draw() % n_vocab);
                batch.pos     [t] = pos.at(seq)++;
                batch.n_seq_id[t] = 1;
                batch.seq_id  [t][0] = seq;
                batch.logits  [t] = true;
            }
        }
        decode(batch);
        llama_batch_free(batch);
    }

    void image(llama_seq_id seq, int32_t w, int32_t h) {
        const int32_t n = w*h;
        llama_batch batch = llama_batch_init(n, n_embd, 1);
        std::vector<llama_pos> sections((size_t) n*4, 0); // time, row, column, other
        for (int32_t i = 0; i < n; ++i) {
            sections[i]       = pos.at(seq);
            sections[i + n]   = pos.at(seq) + i/w;
            sections[i + 2*n] = pos.at(seq) + i%w;
            batch.n_seq_id[i] = 1;
            batch.seq_id  [i][0] = seq;
            batch.logits  [i] = true;
        }
        for (int64_t i = 0; i < (int64_t) n*n_embd; ++i) {
            batch.embd[i] = (float) (draw() % 2001)/1000.0f - 1.0f;
        }
        batch.n_tokens = n;
        llama_pos * own = batch.pos;
        batch.pos = sections.data();
        decode(batch);
        batch.pos = own;
        llama_batch_free(batch);
        pos.at(seq) += std::max(w, h);
    }

    void decode(const llama_batch & batch) {
        const int32_t result = llama_decode(ctx, batch);
        if (result != 0) {
            fail("llama_decode returned " + std::to_string(result));
        }
        llama_synchronize(ctx);
        n_calls++;
        n_tokens += batch.n_tokens;

        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            const float * row = llama_get_logits_ith(ctx, i);
            for (int32_t j = 0; j < n_vocab; ++j) {
                n_nan += row[j] != row[j];
            }
            if (file && fwrite(row, sizeof(float), n_vocab, file) != (size_t) n_vocab) {
                fail("cannot write the logits");
            }
        }

        const std::vector<size_t> now = buffer_sizes(ctx);
        n_grown += now != sizes;
        sizes = now;
    }

    const run_options & o;
    llama_context * ctx;
    FILE * file;
    const int32_t n_vocab;
    const int32_t n_embd;
    std::vector<llama_pos> pos;
    std::vector<size_t> sizes;
    uint32_t state = 1;
};

static void run_arm(const run_options & o, const std::string & text, llama_model * model) {
    const std::vector<std::string> parts = split_on(text, ',');
    FILE * file = nullptr;
    if (parts.size() == 2 && parts[1].rfind("logits=", 0) == 0) {
        file = fopen(parts[1].c_str() + 7, "wb");
        if (!file) {
            fail("cannot write " + parts[1]);
        }
    } else if (parts.size() != 1) {
        fail("not an arm: " + text);
    }
    setenv("FN_TILED_QSA", parts[0] == "0" ? "0" : "1", 1);
    if (parts[0] == "0") {
        unsetenv("FN_TILED_QSA_TILE");
    } else {
        setenv("FN_TILED_QSA_TILE", parts[0].c_str(), 1);
    }

    log_facts facts;
    facts.verbose = o.verbose;
    llama_log_set(log_facts::collect, &facts);

    llama_context_params params = llama_context_default_params();
    params.n_ctx           = o.n_ctx;
    params.n_batch         = o.n_batch;
    params.n_ubatch        = o.n_ubatch;
    params.n_seq_max       = o.n_seqs;
    params.n_threads       = o.n_threads;
    params.n_threads_batch = o.n_threads;
    params.kv_unified      = o.unified;
    params.flash_attn_type = o.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k          = o.type_kv;
    params.type_v          = o.flash ? o.type_kv : GGML_TYPE_F16; // upstream quantises values under flash attention alone
    params.n_outputs_max   = o.reserve ? o.n_seqs : o.n_batch; // a server asks for one row per sequence

    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail("cannot make a context");
    }
    llama_set_causal_attn(ctx, o.causal);

    printf("{\"arm\":\"%s\",\"reserve_ms\":%.2f,\"compute_mib\":{", text.c_str(), facts.reserve_ms);
    const char * comma = "";
    for (const auto & item : facts.compute_mib) {
        printf("%s\"%s\":%.2f", comma, item.first.c_str(), item.second);
        comma = ",";
    }
    printf("},\"reserved_tiled_layers\":%" PRId64 ",\"reserved_tiles\":%" PRId64, facts.n_tiled_layers, facts.n_tiles);
    facts.n_tiled_layers = 0;
    facts.n_tiles        = 0;

    if (o.reserve && o.sweep > 0) {
        sweep(o, ctx);
    }
    if (!o.reserve) {
        runner run(o, model, ctx, file);
        const int64_t t_start = ggml_time_us();
        for (const std::string & step : split_on(o.steps, ';')) {
            run.step(step);
        }
        printf(",\"tokens\":%" PRId64 ",\"calls\":%" PRId64 ",\"grown\":%" PRId64 ",\"nan\":%" PRId64
               ",\"tiled_layers\":%" PRId64 ",\"tiles\":%" PRId64 ",\"seconds\":%.3f",
               run.n_tokens, run.n_calls, run.n_grown, run.n_nan, facts.n_tiled_layers, facts.n_tiles,
               (ggml_time_us() - t_start)/1e6);
    }
    printf("}\n");
    fflush(stdout);

    if (file) {
        fclose(file);
    }
    llama_free(ctx);
    llama_log_set(nullptr, nullptr);
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

int main(int argc, char ** argv) {
    const run_options o = parse_options(argc, argv);

    log_facts facts;
    facts.verbose = o.verbose;
    llama_log_set(log_facts::collect, &facts);
    llama_backend_init();
    ggml_backend_load_all();
    if (!o.rpc.empty()) {
        add_rpc_devices(o.rpc);
    }

    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers    = 99;
    params.use_extra_bufts = false;
    params.no_alloc        = o.reserve;
    params.load_mode       = o.reserve ? LLAMA_LOAD_MODE_NONE : LLAMA_LOAD_MODE_MMAP;
    const llama_model_tensor_buft_override overrides[] = { { "ffn_(gate|up|down)_exps", ggml_backend_cpu_buffer_type() }, { nullptr, nullptr } };
    params.tensor_buft_overrides = o.experts_on_device ? nullptr : overrides;

    llama_model * model = llama_model_load_from_file(o.model.c_str(), params);
    if (!model) {
        fail("cannot load " + o.model);
    }
    for (const std::string & arm : o.arms) {
        run_arm(o, arm, model);
    }
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
