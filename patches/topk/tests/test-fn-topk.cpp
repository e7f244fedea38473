// Top-k on the first GPU against a reference of our own, and with --bench its time against the stock path and the block
// scores. Exit code 77 (skipped): no GPU device.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

struct fn_case {
    const char * kind;
    int64_t      ncols;
    int64_t      nrows;
    int          k;
};

static std::vector<float> fn_make_rows(const fn_case & c, std::mt19937 & rng) {
    std::vector<float>              x(c.ncols * c.nrows);
    std::normal_distribution<float> normal(10.0f, 3.0f);
    const std::string               kind = c.kind;
    for (int64_t r = 0; r < c.nrows; ++r) {
        float * row = x.data() + r * c.ncols;
        // causal rows: the tail is masked, more or less of it by row
        const int64_t visible = kind == "causal" ? 1 + (int64_t) (rng() % c.ncols) : c.ncols;
        for (int64_t i = 0; i < c.ncols; ++i) {
            float v = normal(rng);
            if (kind == "tied") {
                v = (float) (rng() % 5);
            } else if (kind == "constant") {
                v = -1.5f;
            } else if (kind == "denormal") {
                v = (float) ((int) (rng() % 2000) - 1000) * 1e-43f;
            } else if (kind == "zeros") { // rectified scores: most are zero, of either sign
                v = rng() % 100 == 0 ? v : (rng() % 2 ? 0.0f : -0.0f);
            } else if (kind == "blocks" && i % 4) { // the four columns of a block share its score
                v = row[i - 1];
            } else if (kind == "narrow") { // values that differ in the last bits only
                const uint32_t bits = 0x41200000u + rng() % 64;
                memcpy(&v, &bits, sizeof(v));
            } else if (kind == "wide") { // every bit pattern but NaN
                uint32_t bits = rng();
                if ((bits & 0x7F800000u) == 0x7F800000u) {
                    bits &= 0xFF800000u;
                }
                memcpy(&v, &bits, sizeof(v));
            }
            row[i] = i < visible ? v : -INFINITY;
        }
    }
    return x;
}

struct fn_runner {
    ggml_backend_t        backend;
    ggml_context *        ctx   = nullptr;
    ggml_tensor *         src   = nullptr;
    ggml_tensor *         dst   = nullptr;
    ggml_cgraph *         graph = nullptr;
    ggml_backend_buffer_t buf   = nullptr;

    fn_runner(ggml_backend_t backend, const fn_case & c) : backend(backend) {
        ggml_init_params params = { ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true };
        ctx   = ggml_init(params);
        src   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.ncols, c.nrows);
        dst   = ggml_top_k(ctx, src, c.k);
        graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, dst);
        buf = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (!buf) {
            fprintf(stderr, "out of device memory\n");
            exit(1);
        }
    }

    ~fn_runner() {
        ggml_backend_buffer_free(buf);
        ggml_free(ctx);
    }

    void compute() {
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "graph failed\n");
            exit(1);
        }
    }
};

static bool fn_check(ggml_backend_t backend, const fn_case & c, std::mt19937 & rng) {
    const std::vector<float> x = fn_make_rows(c, rng);
    fn_runner                run(backend, c);
    std::vector<int32_t>     out(c.k * c.nrows, -1);
    ggml_backend_tensor_set(run.src, x.data(), 0, ggml_nbytes(run.src));
    ggml_backend_tensor_set(run.dst, out.data(), 0, ggml_nbytes(run.dst)); // poison
    run.compute();
    ggml_backend_tensor_get(run.dst, out.data(), 0, ggml_nbytes(run.dst));

    std::vector<int32_t> want(c.ncols);
    for (int64_t r = 0; r < c.nrows; ++r) {
        const float * row = x.data() + r * c.ncols;
        std::iota(want.begin(), want.end(), 0);
        auto first = [row](int32_t a, int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; };
        std::nth_element(want.begin(), want.begin() + (c.k - 1), want.end(), first);
        std::vector<int32_t> a(want.begin(), want.begin() + c.k);
        std::vector<int32_t> b(out.begin() + r * c.k, out.begin() + (r + 1) * c.k);
        std::sort(a.begin(), a.end());
        std::sort(b.begin(), b.end());
        if (a != b) {
            printf("FAIL %-9s ncols %8lld nrows %5lld k %4d: row %lld differs\n", c.kind, (long long) c.ncols,
                   (long long) c.nrows, c.k, (long long) r);
            return false;
        }
    }
    return true;
}

static double fn_time_us(ggml_backend_t backend, ggml_cgraph * graph, const double budget_s) {
    std::vector<double> us;
    const auto          now   = [] { return std::chrono::steady_clock::now(); };
    const auto          start = now();
    for (int i = 0; i < 3; ++i) {
        ggml_backend_graph_compute(backend, graph);
    }
    while (us.size() < 5 || (std::chrono::duration<double>(now() - start).count() < budget_s && us.size() < 200)) {
        const auto t0 = now();
        ggml_backend_graph_compute(backend, graph);
        us.push_back(std::chrono::duration<double, std::micro>(now() - t0).count());
    }
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

// relu(keys x queries) summed over 4 heads of 128: what the indexer pays for the scores of `ncols` columns in blocks of 4
static double fn_time_scores_us(ggml_backend_t backend, const fn_case & c) {
    const int64_t    n_blocks = c.ncols / 4;
    ggml_init_params params   = { ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true };
    ggml_context *   ctx      = ggml_init(params);
    ggml_tensor *    keys     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 128, n_blocks);
    ggml_tensor *    query    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 128, 4 * c.nrows);
    ggml_tensor *    score    = ggml_relu(ctx, ggml_mul_mat(ctx, keys, query));
    score                     = ggml_reshape_3d(ctx, score, n_blocks, 4, c.nrows);
    ggml_tensor * sum         = nullptr;
    for (int h = 0; h < 4; ++h) {
        ggml_tensor * slice = ggml_view_2d(ctx, score, n_blocks, c.nrows, score->nb[2], h * score->nb[1]);
        sum                 = sum ? ggml_add(ctx, sum, slice) : ggml_cont(ctx, slice);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, sum);
    ggml_backend_buffer_t buf = ggml_backend_alloc_ctx_tensors(ctx, backend);
    double                us  = NAN;
    if (buf) {
        std::vector<float> fill(128 * n_blocks);
        for (size_t i = 0; i < fill.size(); ++i) {
            fill[i] = (float) ((int) (i * 2654435761u >> 16) % 1000) * 1e-3f;
        }
        ggml_backend_tensor_set(keys, fill.data(), 0, ggml_nbytes(keys));
        us = fn_time_us(backend, graph, 0.5);
        ggml_backend_buffer_free(buf);
    }
    ggml_free(ctx);
    return us;
}

// only_ncols: 0 for all
static void fn_bench(ggml_backend_t backend, const char * label, const int64_t only_ncols) {
    std::mt19937 rng(1);
    for (const int64_t ncols : { 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576 }) {
        for (const int64_t nrows : { 1, 4, 32, 128, 512, 2048 }) {
            if (ncols * nrows > (int64_t) 1 << 31 || (only_ncols != 0 && ncols != only_ncols)) {
                continue;
            }
            const fn_case c = { "blocks", ncols, nrows, (int) std::min<int64_t>(2051, ncols) };
            fn_runner     run(backend, c);
            fn_case       one = c;
            one.nrows         = std::min<int64_t>(nrows, 16);
            const std::vector<float> x = fn_make_rows(one, rng);
            for (int64_t r = 0; r < nrows; r += one.nrows) {
                const int64_t n = std::min(one.nrows, nrows - r);
                ggml_backend_tensor_set(run.src, x.data(), r * ncols * sizeof(float), n * ncols * sizeof(float));
            }
            const double us     = fn_time_us(backend, run.graph, 0.4);
            const double scores = ncols == 1048576 && nrows <= 512 ? fn_time_scores_us(backend, c) : NAN;
            printf("{\"arm\":\"%s\",\"ncols\":%lld,\"nrows\":%lld,\"k\":%d,\"us\":%.1f", label, (long long) ncols,
                   (long long) nrows, c.k, us);
            if (!std::isnan(scores)) {
                printf(",\"scores_us\":%.1f", scores);
            }
            printf("}\n");
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    ggml_backend_load_all();
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    if (!dev) {
        printf("no GPU device: top-k not tested\n");
        return 77;
    }
    ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
    if ((argc == 3 || argc == 4) && strcmp(argv[1], "--bench") == 0) {
        fn_bench(backend, argv[2], argc == 4 ? atoll(argv[3]) : 0);
        ggml_backend_free(backend);
        return 0;
    }
    std::mt19937 rng(42);
    int          n = 0;
    int          bad = 0;
    for (const char * kind : { "random", "tied", "constant", "denormal", "zeros", "blocks", "narrow", "wide", "causal" }) {
        const fn_case cases[] = {
            { kind, 8192, 1, 1 },        { kind, 8192, 4, 2051 },     { kind, 8193, 3, 2051 },    { kind, 8192, 300, 64 },
            { kind, 9999, 7, 2051 },     { kind, 65536, 5, 2051 },    { kind, 65537, 1, 2051 },   { kind, 262144, 1, 2051 },
            { kind, 262144, 33, 2051 },  { kind, 261888, 140, 2051 }, { kind, 1048576, 1, 2051 }, { kind, 1048575, 2, 2051 },
            { kind, 8192, 4096, 16 },    { kind, 16384, 2, 16384 },   { kind, 40000, 3, 20000 },
        };
        for (const fn_case & c : cases) {
            bad += !fn_check(backend, c, rng);
            n++;
        }
    }
    // below 8,192 columns the stock path serves, which promises no order of ties: distinct values only
    for (const int64_t ncols : { 16, 100, 1024, 4096, 8191 }) {
        for (const int64_t nrows : { 1, 17 }) {
            const fn_case c = { "random", ncols, nrows, (int) std::min<int64_t>(ncols, 16) };
            bad += !fn_check(backend, c, rng);
            n++;
        }
    }
    printf("%d cases, %d failed\n", n, bad);
    ggml_backend_free(backend);
    return bad ? 1 : 0;
}
