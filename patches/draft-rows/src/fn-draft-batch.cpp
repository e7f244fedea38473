#include "fn-draft-batch.h"

#include "llama-batch.h"
#include "llama-context.h"

int32_t fn_draft_ubatch(const llama_context * ctx) {
    return (int32_t) ctx->get_cparams().n_ubatch;
}

void fn_draft_batch_lend(llama_batch_ext * batch, const float * rows) {
    batch->fn_rows = rows;
}
