#pragma once

#include "common.h"
#include "fn-draft-ubatch.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

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

// Decodes the batch in the draft context, a prompt by one micro-batch after the other: the same micro-batches as in one call, which
// copies every token's row three times into memory that is new to the process. The first code that is not 0.
inline int32_t fn_draft_rows_process(llama_context * ctx, common_batch & batch) {
    const int32_t n_rows  = batch.size();
    const int32_t n_piece = fn_draft_rows_stock(n_rows) ? n_rows : fn_draft_ubatch(ctx);
    for (int32_t off = 0; off < n_rows; off += n_piece) {
        const int32_t n    = std::min(n_piece, n_rows - off);
        const int32_t code = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get_sub_batch(off, n));
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
