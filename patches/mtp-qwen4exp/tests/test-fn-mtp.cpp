// Without arguments: the unit checks of fn_rs_range. With a mode: the part of the feature's tests that needs the
// library's inside; a Python test drives it, holds the expectations and compares.
//
//   test-fn-mtp step     TRUNK HEAD N_TOKENS CHUNK QUIET OUT   one MTP pass over N tokens in chunks, dumped to OUT for
//                        the reference; the first QUIET tokens are decoded without outputs, as a catch-up does
//   test-fn-mtp rollback TRUNK                           what seq_rm allows, and that it is exact where it does
//   test-fn-mtp state    TRUNK HEAD                      the draft's memory: trimmed, saved and restored
//   test-fn-mtp shape    TRUNK SEED N_TOKENS DEPTH FA    how far the batch shape alone moves the logits; FA 0 or 1

#include "fn-rs-range.h"

#include "common.h"
#include "llama.h"
#include "llama-cpp.h"
#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

using tokens_t = std::vector<llama_token>;
using rows_t   = std::vector<float>;

// ---------------------------------------------------------------------------------------------------------------------

static void test_rs_range() {
    llama_seq_id   seq0 = 0;
    llama_seq_id   seq1 = 1;
    int32_t        n_seq_id[6] = { 1, 1, 1, 1, 1, 1 };
    llama_seq_id * seq_id  [6] = { &seq0, &seq0, &seq0, &seq1, &seq1, &seq1 };

    llama_ubatch ub = {};
    ub.n_tokens     = 6;
    ub.n_seq_tokens = 3;
    ub.n_seqs       = 2;
    ub.n_seq_id     = n_seq_id;
    ub.seq_id       = seq_id;

    fn_rs_range range;

    // nothing was decoded yet
    CHECK(!range.allows(0, 1));
    CHECK(!range.allows(-1, 1));

    range.record(ub);
    CHECK( range.allows(0, 2));
    CHECK(!range.allows(0, 3));
    CHECK( range.allows(1, 2));

    range.forget(1);
    CHECK( range.allows(0, 1));
    CHECK(!range.allows(1, 1));

    // a decode of one token leaves nothing to go back to
    ub.n_tokens     = 1;
    ub.n_seq_tokens = 1;
    ub.n_seqs       = 1;
    range.record(ub);
    CHECK(!range.allows(0, 1));

    ub.n_tokens     = 3;
    ub.n_seq_tokens = 3;
    range.record(ub);
    range.forget(-1);
    CHECK(!range.allows(0, 1));

    printf("rs_range: ok\n");
}

// ---------------------------------------------------------------------------------------------------------------------

static llama_model_ptr load(const char * path, bool mtp) {
    auto params = llama_model_default_params();
    params.load_mtp        = mtp;
    params.use_extra_bufts = false; // as with --no-repack
    llama_model_ptr model(llama_model_load_from_file(path, params));
    CHECK(model);
    return model;
}

// F32 caches and no flash attention: what is left to compare is the graph, not the storage
static llama_context_params context_params(uint32_t n_ctx, uint32_t n_batch) {
    auto params = llama_context_default_params();
    params.n_ctx           = n_ctx;
    params.n_batch         = n_batch;
    params.n_ubatch        = n_batch;
    params.n_seq_max       = 1;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.type_k          = GGML_TYPE_F32;
    params.type_v          = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return params;
}

static int32_t n_vocab(llama_context * ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

// decodes tokens[i0, i1) at their positions, by default with every row an output
static void decode(llama_context * ctx, const tokens_t & tokens, int i0, int i1, const float * rows = nullptr, int n_embd = 0, bool output = true) {
    common_batch batch(ctx);
    for (int i = i0; i < i1; ++i) {
        const int32_t idx = batch.add(tokens[i], i, 0, output);
        if (rows) {
            CHECK(batch.set_embd(idx, { rows + (size_t) i*n_embd, 1, (size_t) n_embd }));
        }
    }
    CHECK(llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0);
}

static void append_logits(llama_context * ctx, int n, rows_t & out) {
    for (int i = 0; i < n; ++i) {
        const float * row = llama_get_logits_ith(ctx, i);
        out.insert(out.end(), row, row + n_vocab(ctx));
    }
}

static tokens_t random_tokens(int n, int vocab, int seed) {
    std::mt19937 rng(seed);
    tokens_t res(n);
    for (auto & t : res) {
        t = rng() % vocab;
    }
    return res;
}

// ---------------------------------------------------------------------------------------------------------------------

// file: int32 {n_tokens, width, vocab}, int32 tokens[n], f32 hidden[n, width] as fed, f32 residual[n, width], f32 logits[n, vocab];
// the output rows of quiet tokens are NaN
static int mode_step(const char * trunk, const char * head, int n, int chunk, int quiet, const char * path) {
    auto model_tgt = load(trunk, false);
    auto model_dft = load(head,  true);

    auto params = context_params(n + 64, chunk);
    llama_context_ptr tgt(llama_init_from_model(model_tgt.get(), params));
    CHECK(tgt);

    params.ctx_type  = LLAMA_CONTEXT_TYPE_MTP;
    params.ctx_other = tgt.get();
    llama_context_ptr dft(llama_init_from_model(model_dft.get(), params));
    CHECK(dft);

    llama_set_embeddings_nextn(tgt.get(), true, /*masked*/ false);
    llama_set_embeddings_nextn(dft.get(), true, /*masked*/ true);

    const int n_embd = llama_model_n_embd_out(model_dft.get());
    CHECK(n_embd == llama_model_n_embd_out(model_tgt.get()));

    // leave out the control tokens at the end of the vocabulary
    const tokens_t tokens = random_tokens(n, n_vocab(tgt.get()) - 3, 7);

    // the token at p goes with the row of p-1; the first row is zero
    rows_t hidden((size_t) n*n_embd, 0.0f);
    for (int i0 = 0; i0 < n; i0 += chunk) {
        const int i1 = std::min(n, i0 + chunk);
        decode(tgt.get(), tokens, i0, i1);
        for (int i = i0; i < i1 && i + 1 < n; ++i) {
            memcpy(hidden.data() + (size_t) (i + 1)*n_embd, llama_get_embeddings_nextn_ith(tgt.get(), i - i0), n_embd*sizeof(float));
        }
    }

    rows_t residual;
    rows_t logits;
    for (int i0 = 0; i0 < n; i0 += chunk) {
        const int i1 = std::min(n, i0 + chunk);
        if (i0 < quiet) {
            decode(dft.get(), tokens, i0, i1, hidden.data(), n_embd, false);
            residual.resize((size_t) i1*n_embd,             NAN);
            logits  .resize((size_t) i1*n_vocab(dft.get()), NAN);
            continue;
        }
        decode(dft.get(), tokens, i0, i1, hidden.data(), n_embd);
        append_logits(dft.get(), i1 - i0, logits);
        for (int i = 0; i < i1 - i0; ++i) {
            const float * row = llama_get_embeddings_nextn_ith(dft.get(), i);
            residual.insert(residual.end(), row, row + n_embd);
        }
    }

    FILE * f = fopen(path, "wb");
    CHECK(f);
    const int32_t dims[3] = { n, n_embd, n_vocab(dft.get()) };
    fwrite(dims,            sizeof(dims[0]),   3,               f);
    fwrite(tokens.data(),   sizeof(tokens[0]), tokens.size(),   f);
    fwrite(hidden.data(),   sizeof(float),     hidden.size(),   f);
    fwrite(residual.data(), sizeof(float),     residual.size(), f);
    fwrite(logits.data(),   sizeof(float),     logits.size(),   f);
    CHECK(fclose(f) == 0);

    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------

struct rollback_run {
    llama_model * model;
    tokens_t      tokens;
    uint32_t      n_rs_seq = 4;
    int           n_prompt = 40;

    llama_context_ptr start(int m) const {
        auto params = context_params(256, 64);
        params.n_rs_seq = n_rs_seq;
        llama_context_ptr ctx(llama_init_from_model(model, params));
        CHECK(ctx);
        decode(ctx.get(), tokens, 0, n_prompt);
        decode(ctx.get(), tokens, n_prompt, n_prompt + m);
        return ctx;
    }

    // two other tokens after a history of n: their logits
    rows_t go_on(llama_context * ctx, int n) const {
        tokens_t other = tokens;
        other[n]     = (other[n]     + 1) % 200;
        other[n + 1] = (other[n + 1] + 2) % 200;
        rows_t res;
        decode(ctx, other, n, n + 2);
        append_logits(ctx, 2, res);
        return res;
    }

    // the same without a rollback; the kept tokens in one decode of the shape that wrote them
    rows_t fresh(int kept) const {
        auto ctx = start(kept);
        return go_on(ctx.get(), n_prompt + kept);
    }
};

// the range k <= min(n_rs_seq, m - 1), one at a time, exact where allowed, false elsewhere
static void check_ranges(const rollback_run & run) {
    for (int m = 1; m <= 6; ++m) {
        for (int k = 1; k <= m + 1; ++k) {
            auto   ctx = run.start(m);
            auto * mem = llama_get_memory(ctx.get());

            const int  n_all = run.n_prompt + m;
            const bool valid = k <= std::min<int>(run.n_rs_seq, m - 1);

            CHECK(llama_memory_seq_rm(mem, 0, n_all - k, -1) == valid);
            printf("rollback: decode of %d, back by %d: %s\n", m, k, valid ? "done" : "refused");

            if (!valid) {
                // a refusal leaves the state as it was
                CHECK(llama_memory_seq_pos_max(mem, 0) == n_all - 1);
                continue;
            }

            // one at a time
            CHECK(!llama_memory_seq_rm(mem, 0, n_all - k - 1, -1));

            const rows_t a = run.go_on(ctx.get(), n_all - k);
            const rows_t b = run.fresh(m - k);
            CHECK(a.size() == b.size());

            float diff = 0.0f;
            for (size_t i = 0; i < a.size(); ++i) {
                diff = std::max(diff, std::fabs(a[i] - b[i]));
            }
            printf("rollback:   largest logit difference to a fresh context %g\n", diff);
            CHECK(diff == 0.0f);
        }
    }
}

// a state saved while a rollback is pending is the rolled back one; a restored state has no snapshots
static void check_checkpoint(const rollback_run & run) {
    const int m = 4;
    const int k = 2;

    auto   ctx = run.start(m);
    auto * mem = llama_get_memory(ctx.get());
    const int n_kept = run.n_prompt + m - k;

    CHECK(llama_memory_seq_rm(mem, 0, n_kept, -1));

    for (llama_state_seq_flags flags : { (llama_state_seq_flags) LLAMA_STATE_SEQ_FLAGS_NONE, (llama_state_seq_flags) LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY }) {
        std::vector<uint8_t> state(llama_state_seq_get_size_ext(ctx.get(), 0, flags));
        CHECK(llama_state_seq_get_data_ext(ctx.get(), state.data(), state.size(), 0, flags) == state.size());

        if (flags == LLAMA_STATE_SEQ_FLAGS_NONE) {
            auto other = run.start(1);
            auto * mem_other = llama_get_memory(other.get());
            CHECK(llama_memory_seq_rm(mem_other, 0, -1, -1));
            CHECK(llama_state_seq_set_data_ext(other.get(), state.data(), state.size(), 0, flags) == state.size());
            CHECK(llama_memory_seq_pos_max(mem_other, 0) == n_kept - 1);
            CHECK(!llama_memory_seq_rm(mem_other, 0, n_kept - 1, -1));
            CHECK(run.go_on(other.get(), n_kept) == run.go_on(ctx.get(), n_kept));
        }
    }
    printf("rollback: saved with a rollback pending, restored, no snapshots after it\n");
}

static int mode_rollback(const char * trunk) {
    auto model = load(trunk, false);
    const rollback_run run = { model.get(), random_tokens(64, 200, 3) };

    check_ranges(run);
    check_checkpoint(run);

    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------

struct state_run {
    llama_model *        head;
    llama_context_params params;
    tokens_t             tokens;
    rows_t               rows;
    int                  n_embd;

    llama_context_ptr start(int n) const {
        llama_context_ptr ctx(llama_init_from_model(head, params));
        CHECK(ctx);
        llama_set_embeddings_nextn(ctx.get(), true, /*masked*/ true);
        feed(ctx.get(), 0, n);
        return ctx;
    }

    void feed(llama_context * ctx, int i0, int i1) const {
        for (int i = i0; i < i1; i += 32) {
            decode(ctx, tokens, i, std::min(i + 32, i1), rows.data(), n_embd);
        }
    }

    // the logits of four more tokens after a history of n
    rows_t go_on(llama_context * ctx, int n) const {
        rows_t res;
        decode(ctx, tokens, n, n + 4, rows.data(), n_embd);
        append_logits(ctx, 4, res);
        return res;
    }
};

static int mode_state(const char * trunk, const char * head) {
    auto model_tgt = load(trunk, false);
    auto model_dft = load(head,  true);

    auto params = context_params(512, 64);
    llama_context_ptr tgt(llama_init_from_model(model_tgt.get(), params));
    CHECK(tgt);
    params.ctx_type  = LLAMA_CONTEXT_TYPE_MTP;
    params.ctx_other = tgt.get();

    state_run run = { model_dft.get(), params, random_tokens(300, 200, 5), {}, llama_model_n_embd_out(model_dft.get()) };
    std::mt19937 rng(9);
    std::normal_distribution<float> normal;
    run.rows.resize(run.tokens.size()*run.n_embd);
    for (auto & x : run.rows) {
        x = normal(rng);
    }

    const int n = 160;
    const rows_t expected = run.go_on(run.start(n).get(), n);

    // any number of tokens can be taken back
    {
        auto   ctx = run.start(n + 70);
        auto * mem = llama_get_memory(ctx.get());
        CHECK(llama_memory_seq_rm(mem, 0, n + 30, -1));
        CHECK(llama_memory_seq_rm(mem, 0, n, -1));
        CHECK(llama_memory_seq_pos_max(mem, 0) == n - 1);
        CHECK(run.go_on(ctx.get(), n) == expected);
        printf("state: trimmed twice, goes on as if the tokens had never been there\n");
    }

    // a full state carries everything
    {
        auto ctx = run.start(n);
        std::vector<uint8_t> state(llama_state_seq_get_size_ext(ctx.get(), 0, LLAMA_STATE_SEQ_FLAGS_NONE));
        CHECK(llama_state_seq_get_data_ext(ctx.get(), state.data(), state.size(), 0, LLAMA_STATE_SEQ_FLAGS_NONE) == state.size());

        auto other = run.start(40);
        CHECK(llama_state_seq_set_data_ext(other.get(), state.data(), state.size(), 0, LLAMA_STATE_SEQ_FLAGS_NONE) == state.size());
        CHECK(run.go_on(other.get(), n) == expected);
        printf("state: %zu bytes restored elsewhere, goes on as the original\n", state.size());
    }

    // a partial one carries nothing, and restoring it leaves the cells as they are
    {
        auto ctx = run.start(n);
        std::vector<uint8_t> state(llama_state_seq_get_size_ext(ctx.get(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
        CHECK(state.size() < 64);
        CHECK(llama_state_seq_get_data_ext(ctx.get(), state.data(), state.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == state.size());
        run.feed(ctx.get(), n, n + 20);
        CHECK(llama_state_seq_set_data_ext(ctx.get(), state.data(), state.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == state.size());
        CHECK(llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, n, -1));
        CHECK(run.go_on(ctx.get(), n) == expected);
        printf("state: a checkpoint takes %zu bytes\n", state.size());
    }

    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------

// prints the largest distance between logits of tokens decoded one at a time and in other shapes: the batches of up to
// depth + 1 that verify drafts, and those that prompts are read in
static int mode_shape(const char * trunk, int seed, int n, int depth, bool flash) {
    auto model = load(trunk, false);

    const int n_prompt = 24;

    auto params = llama_context_default_params();
    params.n_ctx           = n_prompt + n + 64;
    params.n_seq_max       = 1;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.n_rs_seq        = depth;
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

    auto run = [&](int step) {
        llama_context_ptr ctx(llama_init_from_model(model.get(), params));
        CHECK(ctx);
        const tokens_t tokens = random_tokens(n_prompt + n, 200, seed);
        rows_t res;
        decode(ctx.get(), tokens, 0, n_prompt);
        for (int i = n_prompt; i < n_prompt + n; i += step) {
            const int i1 = std::min(i + step, n_prompt + n);
            decode(ctx.get(), tokens, i, i1);
            append_logits(ctx.get(), i1 - i, res);
        }
        return res;
    };

    const rows_t ref = run(1);
    float diff_all = 0.0f;
    std::vector<int> steps = { 8, 24, 64 };
    for (int step = 2; step <= depth + 1; ++step) {
        steps.push_back(step);
    }
    for (int step : steps) {
        const rows_t got = run(step);
        CHECK(got.size() == ref.size());
        float diff = 0.0f;
        for (size_t i = 0; i < ref.size(); ++i) {
            diff = std::max(diff, std::fabs(ref[i] - got[i]));
        }
        printf("batches of %d: %g\n", step, diff);
        diff_all = std::max(diff_all, diff);
    }
    printf("shape: %.9g\n", diff_all);

    return 0;
}

int main(int argc, char ** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";

    if (mode.empty()) {
        test_rs_range();
        return 0;
    }

    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);

    ggml_backend_load_all();
    llama_backend_init();

    if (mode == "step" && argc == 8) {
        return mode_step(argv[2], argv[3], atoi(argv[4]), atoi(argv[5]), atoi(argv[6]), argv[7]);
    }
    if (mode == "rollback" && argc == 3) {
        return mode_rollback(argv[2]);
    }
    if (mode == "state" && argc == 4) {
        return mode_state(argv[2], argv[3]);
    }
    if (mode == "shape" && argc == 7) {
        return mode_shape(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]) != 0);
    }

    fprintf(stderr, "usage: see the top of the source\n");
    return 2;
}
