#pragma once

#include "common.h"
#include "fn-draft-batch.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

// Up to here a batch may be one of drafts to verify, whose rows are all needed; more are a prompt's. The largest that upstream
// makes by default is ngram-mod's of 64 drafts.
static constexpr int32_t FN_DRAFT_ROWS_MIN = 128;

// Whether so many rows of one batch take the stock path.
inline bool fn_draft_rows_stock(const int32_t n_rows) {
    if (n_rows <= FN_DRAFT_ROWS_MIN) {
        return true;
    }
    // only a prompt comes here, twice a batch
    const char * value = getenv("FN_DRAFT_ROWS");
    return value && strcmp(value, "0") == 0;
}

// Whether the rows of n tokens lie one behind the other in memory, as those of a target's batch do.
inline bool fn_draft_rows_adjacent(const common_batch & batch, const int32_t off, const int32_t n) {
    const llama_embd & first = batch.tokens[off].embd;
    for (int32_t i = 0; i < n; ++i) {
        if (!first.data || batch.tokens[off + i].embd.data != first.data + (size_t) i*first.n_rows*first.n_embd) {
            return false;
        }
    }
    return true;
}

// n tokens with their rows lent instead of copied.
inline llama_batch_ext * fn_draft_rows_lent(common_batch & batch, const int32_t off, const int32_t n) {
    std::vector<llama_embd> embds(n, llama_embd{ nullptr, 0, 0 });
    const auto swap = [&]() {
        for (int32_t i = 0; i < n; ++i) {
            std::swap(batch.tokens[off + i].embd, embds[i]);
        }
    };
    swap();
    llama_batch_ext * piece = batch.get_sub_batch(off, n);
    swap(); // another head may read the batch next
    fn_draft_batch_lend(piece, batch.tokens[off].embd.data);
    return piece;
}

// Decodes the batch in the draft context, a prompt by one micro-batch after the other: the same micro-batches as in one call.
// That call copies every token's row three times, into memory that is new to the process. Here a micro-batch reads the target's
// own rows; only the first one is copied, whose first row is an older one. The first code that is not 0.
inline int32_t fn_draft_rows_process(llama_context * ctx, common_batch & batch) {
    const int32_t n_rows  = batch.size();
    const bool    stock   = fn_draft_rows_stock(n_rows);
    const int32_t n_piece = stock ? n_rows : fn_draft_ubatch(ctx);
    for (int32_t off = 0; off < n_rows; off += n_piece) {
        const int32_t n    = std::min(n_piece, n_rows - off);
        const bool    lend = !stock && fn_draft_rows_adjacent(batch, off, n);
        llama_batch_ext * piece = lend ? fn_draft_rows_lent(batch, off, n) : batch.get_sub_batch(off, n);
        const int32_t code = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, piece);
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

// How many of a sequence's last rows have to be kept: after a prompt the last one, after drafts any may be asked for.
inline int32_t fn_draft_rows_kept(const int32_t n_rows, const int32_t n_draft_max) {
    return fn_draft_rows_stock(n_rows) || n_rows <= n_draft_max + 1 ? n_rows : 1;
}
