// Without arguments: the unit checks of fn_inline_states. With the path of a model: kept states against those of prompts that
// end there. To the byte where the number of tokens in a micro-batch does not itself move a CPU's sums; elsewhere, and with
// `bound` behind the path (a GPU) everywhere, by no more than it moves them without the feature.

#include "fn-inline-checkpoints.h"
#include "fn-inline-states.h"

#include "common.h"
#include "llama-cpp.h"
#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

using bytes_t = std::vector<uint8_t>;

static constexpr uint32_t N_PLANES = 3; // as with three drafts

static void test_states() {
    llama_seq_id   seq      = 0;
    int32_t        n_seq_id = 1;
    llama_seq_id * seq_id   = &seq;
    llama_pos      pos[1]   = { 100 };

    llama_ubatch ub = {};
    ub.n_tokens     = 50; // 100 to 149
    ub.n_seq_tokens = 50;
    ub.n_seqs       = 1;
    ub.n_seq_id     = &n_seq_id;
    ub.seq_id       = &seq_id;
    ub.pos          = pos;

    fn_inline_states states;
    fn_rs_range      range;

    range.record(ub);
    CHECK(range.allows(0, 2));

    // no plan: as many as there are, the i-th i tokens before the end
    const auto stock = states.planes(ub);
    CHECK(!stock.active && stock.count(4) == 4 && stock.plane(2) == 2 && stock.seen(2, 50) == 48 && stock.seen(3, 2) == -1);
    states.record(ub, range);
    CHECK(range.allows(0, 2));

    // before the first token, behind it, in the middle, behind the last one, beyond
    const llama_pos wanted[] = { 100, 101, 120, 150, 151 };
    states.want(0, wanted, 5);
    const auto planes = states.planes(ub);
    CHECK(planes.active && planes.states.size() == 3 && planes.count(4) == 4);
    CHECK(planes.plane(0) == 0 && planes.seen(0, 50) == 50);
    CHECK(planes.plane(1) == 2 && planes.seen(1, 50) == 1);
    CHECK(planes.plane(2) == 3 && planes.seen(2, 50) == 20);
    CHECK(planes.plane(3) == 4 && planes.seen(3, 50) == 50);
    CHECK(!(planes == stock));

    CHECK(!states.kept(1));
    states.record(ub, range);
    CHECK(!states.kept(0) && states.kept(1) && states.kept(2) && states.kept(3) && !states.kept(4) && !states.kept(5));
    CHECK(!range.allows(0, 1));

    // another sequence's tokens are stock
    seq = 1;
    CHECK(!states.planes(ub).active);
    seq = 0;

    // a micro-batch of the plan that none of the states is in
    const llama_pos far = 400;
    states.want(0, &far, 1);
    CHECK(states.planes(ub).active && states.planes(ub).count(4) == 1);

    states.want(0, nullptr, 0);
    CHECK(states.planes(ub) == stock);

    CHECK(!fn_inline_states::largest(0, 50).active && !fn_inline_states::largest(3, 3).active);
    const auto largest = fn_inline_states::largest(3, 4);
    CHECK(largest.active && largest.count(4) == 4 && largest.seen(1, 4) == 1 && largest.seen(3, 4) == 3);

    printf("states: ok\n");
}

struct history {
    llama_model * model;
    uint32_t      n_ubatch;
    int           n_tokens;

    llama_context_ptr context() const {
        auto params = llama_context_default_params();
        params.n_ctx           = 512;
        params.n_batch         = 512;
        params.n_ubatch        = n_ubatch;
        params.n_seq_max       = 1;
        params.n_rs_seq        = N_PLANES;
        params.n_threads       = 1;
        params.n_threads_batch = 1;
        params.type_k          = GGML_TYPE_F32; // what is left to compare is the graph, not the storage
        params.type_v          = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        llama_context_ptr ctx(llama_init_from_model(model, params));
        CHECK(ctx);
        return ctx;
    }

    // a context that has read the first n tokens, those from before on in a call of their own
    llama_context_ptr read(int before, int n) const {
        auto ctx = context();
        if (before > 0) {
            decode(ctx.get(), 0, before);
        }
        if (n > before) {
            decode(ctx.get(), before, n);
        }
        return ctx;
    }

    // the tokens from begin to end in one call; the last one's logits
    std::vector<float> decode(llama_context * ctx, int begin, int end) const {
        common_batch batch(ctx);
        for (int i = begin; i < end; ++i) {
            batch.add((i*7 + i*i/3) % 200, i, 0, i == end - 1);
        }
        CHECK(llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0);
        const float * row = llama_get_logits_ith(ctx, -1);
        return { row, row + llama_vocab_n_tokens(llama_model_get_vocab(model)) };
    }
};

static bytes_t state(llama_context * ctx) {
    bytes_t res(llama_state_seq_get_size_ext(ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
    CHECK(llama_state_seq_get_data_ext(ctx, res.data(), res.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == res.size());
    return res;
}

// largest difference of two states' values; what is not a value is equal
static float distance(const bytes_t & a, const bytes_t & b) {
    CHECK(a.size() == b.size());
    float res = 0.0f;
    for (size_t i = 0; i + sizeof(float) <= a.size(); i += sizeof(float)) {
        float x;
        float y;
        memcpy(&x, &a[i], sizeof(x));
        memcpy(&y, &b[i], sizeof(y));
        res = x == y ? res : std::max(res, std::fabs(x - y));
    }
    return res;
}

// how far the state behind n tokens is moved by the micro-batch alone
static float shape_bound(const history & h, int n) {
    std::vector<bytes_t> states;
    for (uint32_t n_ubatch : { 16, 64, 256 }) {
        const history other = { h.model, n_ubatch, h.n_tokens };
        states.push_back(state(other.read(0, n).get()));
        states.push_back(state(other.read(std::max(0, n - 4), n).get())); // a GPU has other kernels for a few tokens
    }
    float res = 0.0f;
    for (size_t i = 0; i < states.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
            res = std::max(res, distance(states[i], states[j]));
        }
    }
    return res;
}

// Two calls: `before` tokens, then the rest with these states kept.
static void check_kept(const history & h, int before, const std::vector<llama_pos> & wanted, bool exact) {
    auto plain  = h.read(before, before);
    auto inside = h.read(before, before);
    auto * ctx  = inside.get();
    const auto logits = h.decode(plain.get(), before, h.n_tokens);

    CHECK(fn_inline_checkpoints_max(ctx) == (int32_t) N_PLANES);
    CHECK(fn_inline_checkpoints_want(ctx, 0, wanted.data(), wanted.size()));
    CHECK(h.decode(ctx, before, h.n_tokens) == logits);
    CHECK(state(ctx) == state(plain.get()));

    // no token can be taken back: the planes hold other states
    CHECK(!llama_memory_seq_rm(llama_get_memory(ctx), 0, h.n_tokens - 1, -1));

    std::vector<bytes_t> kept;
    for (size_t i = 0; i < wanted.size(); ++i) {
        CHECK(fn_inline_checkpoints_kept(ctx, i));
        fn_inline_checkpoints_show(ctx, i, true);
        kept.push_back(state(ctx));
        fn_inline_checkpoints_show(ctx, i, false);
        CHECK(state(ctx) != kept.back());

        auto shorter = h.read(before, wanted[i]);
        if (!exact) {
            const float diff  = distance(kept.back(), state(shorter.get()));
            const float bound = shape_bound(h, wanted[i]);
            printf("kept: before %d, largest difference %g, bound %g\n", wanted[i], diff, bound);
            CHECK(diff <= bound);
            continue;
        }
        CHECK(kept.back() == state(shorter.get()));

        // one that has read more, and one from which the rest is taken with the state, go on alike
        const auto expected = h.decode(shorter.get(), wanted[i], wanted[i] + 5);
        auto longer = h.read(before, h.n_tokens);
        CHECK(llama_state_seq_set_data_ext(longer.get(), kept.back().data(), kept.back().size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) > 0);
        CHECK(llama_memory_seq_rm(llama_get_memory(longer.get()), 0, wanted[i], -1));
        CHECK(h.decode(longer.get(), wanted[i], wanted[i] + 5) == expected);
    }
    CHECK(!fn_inline_checkpoints_kept(ctx, wanted.size()));

    // the next decode is stock: its tokens can be taken back
    fn_inline_checkpoints_want(ctx, 0, nullptr, 0);
    CHECK(h.decode(ctx, h.n_tokens, h.n_tokens + 3) == h.decode(plain.get(), h.n_tokens, h.n_tokens + 3));
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, h.n_tokens + 1, -1));
    CHECK(!fn_inline_checkpoints_kept(ctx, 0));

    printf("kept: %zu states of %zu bytes, micro-batch %u, %d tokens behind %d\n", wanted.size(), kept[0].size(), h.n_ubatch, h.n_tokens, before);
}

static void check_refusals(const history & h) {
    auto ctx = h.context();
    const llama_pos many[N_PLANES + 1] = { 1, 2, 3, 4 };
    CHECK(!fn_inline_checkpoints_want(ctx.get(), 0, many, N_PLANES + 1));

    setenv("FN_INLINE_CHECKPOINTS", "0", 1);
    CHECK(fn_inline_checkpoints_max(ctx.get()) == 0);
    CHECK(!fn_inline_checkpoints_want(ctx.get(), 0, many, 1));
    unsetenv("FN_INLINE_CHECKPOINTS");
    printf("refusals: ok\n");
}

int main(int argc, char ** argv) {
    test_states();
    if (argc < 2) {
        return 0;
    }
    auto params = llama_model_default_params();
    params.use_extra_bufts = false; // as with --no-repack
    llama_model_ptr model(llama_model_load_from_file(argv[1], params));
    CHECK(model);

    const bool exact = argc < 3 || strcmp(argv[2], "bound") != 0;
    check_kept({ model.get(), 256, 200 },  0, { 60, 130, 196 }, exact);
    check_kept({ model.get(), 256, 200 }, 90, { 94, 198 },      exact);
    check_kept({ model.get(), 256, 200 },  0, { 4 },            exact);
    check_kept({ model.get(),  64, 200 },  0, { 64, 192, 196 }, exact); // behind a micro-batch, inside another one
    check_kept({ model.get(),  64, 200 },  0, { 70, 75, 80 },   false); // of one micro-batch, with others behind it
    check_kept({ model.get(), 256, 200 }, 90, { 91, 150, 199 }, false); // behind the first token, before the last one
    check_refusals({ model.get(), 64, 10 });
    return 0;
}
