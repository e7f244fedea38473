#include "fn-draft-ubatch.h"

#include "llama-context.h"

int32_t fn_draft_ubatch(const llama_context * ctx) {
    return (int32_t) ctx->get_cparams().n_ubatch;
}
