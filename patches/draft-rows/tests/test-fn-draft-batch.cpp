// Rows that are lent to a batch: which memory a micro-batch reads.

#include "fn-draft-batch.h"

#include "llama-batch.h"
#include "llama-vocab.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

static constexpr int N_EMBD   = 8;
static constexpr int N_TOKENS = 10;

static llama_batch_ext tokens(int n_seq) {
    llama_batch_ext batch(64, N_EMBD, N_EMBD, 4, nullptr, 1000, 1);
    for (int i = 0; i < N_TOKENS; ++i) {
        const llama_pos pos = i/n_seq;
        batch.add_token(i%n_seq);
        CHECK(batch.set_token_id(i, 100 + i) && batch.set_token_pos(i, &pos));
    }
    return batch;
}

int main() {
    llama_vocab        vocab;
    llama_batch_allocr allocr(1);

    std::vector<float> rows(N_TOKENS*N_EMBD);
    for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = i;
    }

    // one sequence: the rows themselves, from the micro-batch's first token on
    auto one = tokens(1);
    fn_draft_batch_lend(&one, rows.data());
    CHECK(allocr.init(one, vocab, false));
    const auto first  = allocr.split_simple(4);
    const auto second = allocr.split_simple(4);
    const auto last   = allocr.split_simple(4);
    CHECK(first.n_tokens == 4 && first.embd == rows.data() && first.data->embd.empty());
    CHECK(second.embd == rows.data() + 4*N_EMBD && second.token[0] == 104);
    CHECK(last.n_tokens == 2 && last.embd == rows.data() + 8*N_EMBD);

    // tokens of two sequences in turn: one's do not lie behind each other, so their rows are copied
    auto two = tokens(2);
    fn_draft_batch_lend(&two, rows.data());
    CHECK(allocr.init(two, vocab, false));
    const auto seq = allocr.split_seq(4);
    CHECK(seq.n_tokens == 4 && seq.embd == seq.data->embd.data());
    for (uint32_t i = 0; i < seq.n_tokens; ++i) {
        CHECK(seq.embd[i*N_EMBD] == rows[(seq.token[i] - 100)*N_EMBD]);
    }

    // rows of its own are copied, and a batch that was cleared has none
    auto own = tokens(1);
    for (int i = 0; i < N_TOKENS; ++i) {
        CHECK(own.set_token_embd(i, { rows.data() + i*N_EMBD, 1, N_EMBD }));
    }
    CHECK(allocr.init(own, vocab, false));
    const auto copied = allocr.split_simple(4);
    CHECK(copied.embd == copied.data->embd.data() && copied.embd[N_EMBD] == rows[N_EMBD]);

    one.clear();
    const llama_pos pos = 0;
    one.add_token(0);
    CHECK(one.set_token_id(0, 1) && one.set_token_pos(0, &pos));
    CHECK(allocr.init(one, vocab, false));
    CHECK(!allocr.split_simple(4).embd);

    printf("lent rows: ok\n");
    return 0;
}
