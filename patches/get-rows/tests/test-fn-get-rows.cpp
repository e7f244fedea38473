// Rows gathered by one thread and by several, to the byte; how many threads a graph is planned for; and with --bench the
// time of both.

#include "fn-get-rows.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

static constexpr int FN_N_THREADS = 7;  // divides no row count below

static int n_failed = 0;

static void fn_expect(const bool    good,
                      const char *  what,
                      const char *  type,
                      const int64_t ne0,
                      const int64_t n,
                      const int64_t m) {
    if (!good) {
        printf("FAIL %s: %s, rows of %lld, %lld x %lld\n", what, type, (long long) ne0, (long long) n, (long long) m);
        n_failed++;
    }
}

static void fn_switch(const char * value) {
    if (value) {
        setenv("FN_GET_ROWS", value, 1);
    } else {
        unsetenv("FN_GET_ROWS");
    }
}

static void fn_set_ids(ggml_tensor * ids, const int64_t n_rows, std::mt19937 & rng) {
    for (int64_t i = 0; i < ggml_nelements(ids); ++i) {
        ((int32_t *) ids->data)[i] = (int32_t) (rng() % n_rows);
    }
}

// A large table repeats itself: what matters is where its rows lie.
static void fn_set_table(ggml_tensor * t, std::mt19937 & rng) {
    const int64_t      n_own = std::min<int64_t>(ggml_nrows(t), 1000);
    std::vector<float> x(t->ne[0] * n_own);
    for (float & v : x) {
        v = (float) ((int) (rng() % 20001) - 10000) * 1e-3f;
    }
    if (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_I32) {
        memcpy(t->data, x.data(), x.size() * sizeof(float));  // as integers any bits will do
    } else {
        ggml_quantize_chunk(t->type, x.data(), t->data, 0, n_own, t->ne[0], nullptr);
    }
    for (int64_t r = n_own; r < ggml_nrows(t); r += n_own) {
        memcpy((char *) t->data + r * t->nb[1], t->data, std::min(n_own, ggml_nrows(t) - r) * t->nb[1]);
    }
}

// Tensors and a graph in memory of the CPU.
struct fn_graph {
    ggml_context *        ctx;
    ggml_cgraph *         graph;
    ggml_backend_buffer_t buf = nullptr;

    fn_graph() {
        ggml_init_params params = { ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true };
        ctx                     = ggml_init(params);
        graph                   = ggml_new_graph(ctx);
    }

    ~fn_graph() {
        ggml_backend_buffer_free(buf);
        ggml_free(ctx);
    }

    void alloc() {
        buf = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
        if (!buf) {
            fprintf(stderr, "out of memory\n");
            exit(1);
        }
    }

    ggml_tensor * gather(ggml_tensor * table, ggml_tensor * ids) {
        ggml_tensor * out = ggml_get_rows(ctx, table, ids);
        ggml_build_forward_expand(graph, out);
        return out;
    }

    // forced: for so many threads, whatever is planned; returns the threads
    int compute(const int n_threads, const bool forced) {
        ggml_cplan plan = ggml_graph_plan(graph, n_threads, nullptr);
        if (forced) {
            plan.n_threads = n_threads;
        }
        std::vector<uint8_t> work(plan.work_size);
        plan.work_data = work.data();
        if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "graph failed\n");
            exit(1);
        }
        return plan.n_threads;
    }
};

static std::vector<uint8_t> fn_bytes(fn_graph & graph, ggml_tensor * out, const int n_threads, int & n_planned) {
    memset(out->data, 0xA5, ggml_nbytes(out));  // poison
    n_planned            = graph.compute(n_threads, false);
    const uint8_t * data = (const uint8_t *) out->data;
    return std::vector<uint8_t>(data, data + ggml_nbytes(out));
}

// A graph planned for several threads gives each a part of the rows: if one of them had not taken part, its rows would still
// be poisoned.
static void fn_check(const ggml_type type, const int64_t ne0, const int64_t n, const int64_t m, std::mt19937 & rng) {
    fn_graph      graph;
    ggml_tensor * table = ggml_new_tensor_3d(graph.ctx, type, ne0, 301, m);
    ggml_tensor * ids   = ggml_new_tensor_2d(graph.ctx, GGML_TYPE_I32, n, m);
    ggml_tensor * out   = graph.gather(table, ids);
    graph.alloc();
    fn_set_table(table, rng);
    fn_set_ids(ids, table->ne[1], rng);

    const bool   many = ne0 * n * m >= FN_GET_ROWS_MIN;
    const char * name = ggml_type_name(type);
    int          n_planned;

    fn_switch(nullptr);
    const std::vector<uint8_t> want = fn_bytes(graph, out, 1, n_planned);
    fn_expect(n_planned == 1, "one thread stays one", name, ne0, n, m);

    const std::vector<uint8_t> found = fn_bytes(graph, out, FN_N_THREADS, n_planned);
    fn_expect(n_planned == (many ? FN_N_THREADS : 1), "threads", name, ne0, n, m);
    fn_expect(found == want, "bytes", name, ne0, n, m);

    fn_switch("0");
    const std::vector<uint8_t> stock = fn_bytes(graph, out, FN_N_THREADS, n_planned);
    fn_expect(n_planned == 1, "threads with the switch off", name, ne0, n, m);
    fn_expect(stock == want, "bytes with the switch off", name, ne0, n, m);

    // one thread's are the right ones: each row against its type's own conversion
    const ggml_to_float_t row_of = ggml_get_type_traits(type)->to_float;
    std::vector<float>    row(ne0);
    for (int64_t i = 0; i < n * m; ++i) {
        const int32_t id  = ((const int32_t *) ids->data)[i];
        const char *  src = (const char *) table->data + id * table->nb[1] + i / n * table->nb[2];
        if (type == GGML_TYPE_F32 || type == GGML_TYPE_I32) {
            memcpy(row.data(), src, ne0 * sizeof(float));
        } else {
            row_of(src, row.data(), ne0);
        }
        if (memcmp(row.data(), want.data() + i * ne0 * sizeof(float), ne0 * sizeof(float)) != 0) {
            fn_expect(false, "a row", name, ne0, n, m);
            break;
        }
    }
}

// The two gathers of a micro-batch, tokens and n-grams with the real model's rows, each alone and both, by one thread and by
// several whatever is planned. Threads sleep before each, as they do while a GPU computes. Median and range of 21.
static void fn_bench(const int n_threads, const int64_t n_ngrams) {
    const int64_t n_max = 8192, n_heads = 16;
    std::mt19937  rng(1);
    fn_graph      tables;
    ggml_tensor * tokens = ggml_new_tensor_2d(tables.ctx, GGML_TYPE_Q8_0, 2560, 248320);
    ggml_tensor * ngrams = ggml_new_tensor_2d(tables.ctx, GGML_TYPE_IQ4_NL, 160, n_ngrams);
    tables.alloc();
    fn_set_table(tokens, rng);
    fn_set_table(ngrams, rng);
    for (const char * what : { "tokens", "ngrams", "both" }) {
        for (const int64_t n :
             { (int64_t) 1, (int64_t) 4, (int64_t) 16, (int64_t) 32, (int64_t) 103, (int64_t) 512, n_max }) {
            fn_graph      graph;
            ggml_tensor * ids_t = ggml_new_tensor_1d(graph.ctx, GGML_TYPE_I32, n);
            ggml_tensor * ids_n = ggml_new_tensor_1d(graph.ctx, GGML_TYPE_I32, n * n_heads);
            if (what[0] != 'n') {
                graph.gather(tokens, ids_t);
            }
            if (what[0] != 't') {
                graph.gather(ngrams, ids_n);
            }
            graph.alloc();
            for (const int k : { 1, n_threads }) {
                std::vector<double> us;
                for (int i = 0; i < 22; ++i) {
                    fn_set_ids(ids_t, tokens->ne[1], rng);  // other rows, as another prompt asks for
                    fn_set_ids(ids_n, ngrams->ne[1], rng);
                    std::this_thread::sleep_for(std::chrono::milliseconds(5));
                    const auto t0 = std::chrono::steady_clock::now();
                    graph.compute(k, true);
                    us.push_back(
                        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count());
                }
                us.erase(us.begin());  // its memory is touched for the first time
                std::sort(us.begin(), us.end());
                printf(
                    "{\"what\":\"%s\",\"tokens\":%lld,\"ngram_rows\":%lld,\"threads\":%d,\"us\":%.0f,\"min_us\":%.0f,"
                    "\"max_us\":%.0f}\n",
                    what, (long long) n, (long long) n_ngrams, k, us[us.size() / 2], us.front(), us.back());
                fflush(stdout);
            }
        }
    }
}

// Without arguments the test. --bench [threads] [rows of the n-gram table; the real one has 320001536, 28.8 GB]
int main(int argc, char ** argv) {
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        fn_bench(argc > 2 ? atoi(argv[2]) : 2, argc > 3 ? atoll(argv[3]) : 32000000);
        return 0;
    }
    std::mt19937 rng(0);
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_I32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                                  GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K }) {
        const int64_t at = FN_GET_ROWS_MIN / 256;
        for (const int64_t n : { (int64_t) 1, (int64_t) 16, at - 1, at, at + 1, 4 * at + 2 }) {
            fn_check(type, 256, n, 1, rng);
        }
        fn_check(type, 256, at / 2 + 1, 2, rng);        // rows of two tables
    }
    fn_check(GGML_TYPE_Q8_0, 2560, 512, 1, rng);        // tokens of a micro-batch
    fn_check(GGML_TYPE_IQ4_NL, 160, 16 * 512, 1, rng);  // their n-grams
    printf("%s\n", n_failed ? "failed" : "passed");
    return n_failed ? 1 : 0;
}
