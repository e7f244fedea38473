#include "fn-prefill-times.h"

#include "fn-prefill-kinds.h"

#include "llama-context.h"
#include "llama-model.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

// where the stock scheduler starts to upload experts; shorter micro-batches are decode, or the end of a prompt
static constexpr uint32_t FN_PREFILL_MIN_TOKENS = 32;

static void fn_prefill_marker(const char * event, const std::string & json) {
    // it begins with a line end: the server's log writes its lines there in pieces, from a thread of its own
    fprintf(stderr, "\nfn:prefill:%s %s\n", event, json.c_str());
    fflush(stderr);
}

struct fn_prefill_times {
    using sums = std::array<int64_t, FN_PREFILL_N_KINDS>;

    explicit fn_prefill_times(const llama_model & model) : model(model) {}

    ~fn_prefill_times() {
        end_prompt();
    }

    static size_t metrics(llama_context * ctx, char * buf, size_t size);

    void begin(const llama_ubatch & ubatch);
    void watch(ggml_backend_sched_t sched, ggml_cgraph * graph);
    void end();
    void end_prompt();

    bool ask (ggml_tensor * node);
    void done();

    bool active = false; // within a micro-batch that is timed

private:
    void add(fn_prefill_kind kind);

    const llama_model & model;

    // of the micro-batch
    ggml_backend_sched_t          sched = nullptr;
    ggml_cgraph *                 graph = nullptr;
    std::vector<fn_prefill_piece> pieces;
    size_t                        piece = 0;
    int                           node_at = 0;
    const ggml_tensor *           computed = nullptr; // last node of the piece that is more than a view
    int64_t                       t_last  = 0; // up to here everything is accounted for
    uint32_t                      n_now   = 0;

    // of the prompt
    sums      prompt_us  = {};
    int64_t   n_ubatches = 0;
    int64_t   n_tokens   = 0;
    int64_t   n_lost     = 0; // nodes that came in another order than the graph's
    llama_pos pos_next   = 0;

    // of all; read by the server while a micro-batch is computed
    std::array<std::atomic<int64_t>, FN_PREFILL_N_KINDS> total_us = {};
    std::atomic<int64_t> total_prompts{0}, total_ubatches{0}, total_tokens{0};
};

void fn_prefill_times::add(fn_prefill_kind kind) {
    const int64_t now = ggml_time_us();
    prompt_us[kind] += now - t_last;
    total_us [kind] += now - t_last;
    t_last = now;
}

void fn_prefill_times::begin(const llama_ubatch & ubatch) {
    if (ubatch.n_tokens < FN_PREFILL_MIN_TOKENS) {
        end_prompt();
        return;
    }
    const llama_pos first = ubatch.pos ? ubatch.pos[0] : pos_next;
    if (n_ubatches > 0 && first != pos_next) {
        end_prompt(); // another prompt, with nothing decoded in between
    }
    if (n_ubatches > 0) {
        add(FN_PREFILL_BETWEEN);
    } else {
        total_prompts++;
        t_last = ggml_time_us();
    }
    active   = true;
    n_now    = ubatch.n_tokens;
    pos_next = first + (llama_pos) ubatch.n_tokens;
}

void fn_prefill_times::watch(ggml_backend_sched_t s, ggml_cgraph * g) {
    sched   = s;
    graph   = g;
    piece   = 0;
    node_at = 0;
    computed = nullptr;
    const llama_hparams & hparams = model.hparams;
    pieces = fn_prefill_pieces(
            g,
            [&](int il) { return il >= 0 && il < (int) hparams.n_layer_all && hparams.is_recr(il); },
            [&](ggml_tensor * t) { return (const void *) ggml_backend_sched_get_tensor_backend(s, t); });

    ggml_backend_sched_set_eval_callback(s, [](ggml_tensor * t, bool ask, void * data) {
        fn_prefill_times & times = *(fn_prefill_times *) data;
        if (ask) {
            return times.ask(t);
        }
        times.done();
        return true;
    }, this);
    // what was queued before the graph is not its own
    ggml_backend_sched_synchronize(s);
    add(FN_PREFILL_OTHER);
}

// A virtual GPU is asked for a graph and does not answer: what it computes is done once it has answered a later question.
static bool fn_prefill_wait_for(const ggml_tensor * t) {
    t = t->view_src ? t->view_src : t; // a view may be of nothing: the state of a sequence that is new
    ggml_backend_buffer_t buffer = t->buffer;
    if (!buffer || ggml_backend_buffer_is_host(buffer) || ggml_nbytes(t) < sizeof(int32_t)) {
        return false;
    }
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    if (!dev || strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") != 0) {
        return false;
    }
    int32_t unused = 0;
    ggml_backend_tensor_get(t, &unused, 0, sizeof(unused));
    return true;
}

// Before a node is computed: whether the piece ends with it. The scheduler copies what a split reads before it asks for its
// first node, and waits for the device after every piece.
bool fn_prefill_times::ask(ggml_tensor * node) {
    const int at = node_at++;
    if (at >= ggml_graph_n_nodes(graph) || ggml_graph_node(graph, at) != node) {
        n_lost++;
        return true;
    }
    if (piece < pieces.size() && at == pieces[piece].begin) {
        if (pieces[piece].copies != FN_PREFILL_NO_COPY) {
            ggml_backend_synchronize(ggml_backend_sched_get_tensor_backend(sched, node));
            for (const ggml_tensor * src : node->src) {
                if (src && fn_prefill_wait_for(src)) {
                    break;
                }
            }
            add(pieces[piece].copies == FN_PREFILL_COPY_WEIGHTS ? FN_PREFILL_UPLOAD : FN_PREFILL_TRANSFER);
        }
        piece++;
    }
    if (!fn_prefill_computes_nothing(node)) {
        computed = node;
    }
    const int next = piece < pieces.size() ? pieces[piece].begin : ggml_graph_n_nodes(graph);
    return at + 1 == next;
}

void fn_prefill_times::done() {
    if (computed) {
        fn_prefill_wait_for(computed);
    }
    add(piece > 0 ? pieces[piece - 1].kind : FN_PREFILL_OTHER);
}

void fn_prefill_times::end() {
    add(FN_PREFILL_OTHER);
    active      = false;
    n_ubatches += 1;
    n_tokens   += n_now;
    total_ubatches++;
    total_tokens += n_now;
}

void fn_prefill_times::end_prompt() {
    if (n_ubatches > 0) {
        int64_t us = 0;
        std::string list;
        for (int i = 0; i < FN_PREFILL_N_KINDS; ++i) {
            us   += prompt_us[i];
            list += std::string(i ? "," : "") + "\"" + fn_prefill_kind_name((fn_prefill_kind) i) + "\":" + std::to_string(prompt_us[i]);
        }
        fn_prefill_marker("times", "{\"tokens\":" + std::to_string(n_tokens) + ",\"micro_batches\":" + std::to_string(n_ubatches) +
                ",\"us\":" + std::to_string(us) + ",\"kinds_us\":{" + list + "},\"lost\":" + std::to_string(n_lost) + "}");
    }
    prompt_us  = {};
    n_ubatches = n_tokens = n_lost = 0;
}

size_t fn_prefill_times::metrics(llama_context * ctx, char * buf, size_t size) {
    const fn_prefill_times * times = ctx ? ctx->fn_times.get() : nullptr;
    if (!times) {
        return 0;
    }
    std::string out = "# HELP fn_prefill_seconds_total Wall time of prompts by kind of work\n# TYPE fn_prefill_seconds_total counter\n";
    for (int i = 0; i < FN_PREFILL_N_KINDS; ++i) {
        char value[32];
        snprintf(value, sizeof(value), "%.6f", times->total_us[i].load()/1e6);
        out += std::string("fn_prefill_seconds_total{kind=\"") + fn_prefill_kind_name((fn_prefill_kind) i) + "\"} " + value + "\n";
    }
    auto count = [&](const char * name, const char * help, int64_t value) {
        out += std::string("# HELP fn_prefill_") + name + " " + help + "\n# TYPE fn_prefill_" + name + " counter\nfn_prefill_" + name + " " +
            std::to_string(value) + "\n";
    };
    count("prompts_total",       "Prompts that were timed",       times->total_prompts);
    count("micro_batches_total", "Micro-batches that were timed", times->total_ubatches);
    count("tokens_total",        "Tokens of these",               times->total_tokens);
    if (size > 0) {
        const size_t n = std::min(size - 1, out.size());
        memcpy(buf, out.data(), n);
        buf[n] = 0;
    }
    return out.size();
}

size_t fn_prefill_times_metrics(llama_context * ctx, char * buf, size_t size) {
    return fn_prefill_times::metrics(ctx, buf, size);
}

void fn_prefill_times_deleter::operator()(fn_prefill_times * times) const {
    delete times;
}

fn_prefill_times_ptr fn_prefill_times_make(const llama_model & model, const llama_cparams & cparams) {
    const char * text = getenv("FN_PREFILL_TIMES");
    if (!text || strcmp(text, "0") == 0) {
        return nullptr;
    }
    if (strcmp(text, "1") != 0) {
        throw std::runtime_error(std::string("FN_PREFILL_TIMES=") + text + ": neither 0 nor 1");
    }
    if (cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || cparams.ctx_other || model.hparams.no_alloc) {
        return nullptr;
    }
    if (cparams.cb_eval) {
        fn_prefill_marker("off", "{\"reason\":\"the evaluation callback is in use\"}");
        return nullptr;
    }
    return fn_prefill_times_ptr(new fn_prefill_times(model));
}

fn_prefill_timer::fn_prefill_timer(fn_prefill_times * times, const llama_ubatch & ubatch) : times(times) {
    if (times) {
        times->begin(ubatch);
    }
}

void fn_prefill_timer::watch(ggml_backend_sched_t s, ggml_cgraph * graph) {
    if (times && times->active) {
        sched = s;
        times->watch(s, graph);
    }
}

fn_prefill_timer::~fn_prefill_timer() {
    if (sched) {
        ggml_backend_sched_set_eval_callback(sched, nullptr, nullptr);
    }
    if (times && times->active) {
        times->end();
    }
}
