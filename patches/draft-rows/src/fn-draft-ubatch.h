#pragma once

#include "llama.h"

#include <stdint.h>

// The context's physical micro-batch: llama_n_ubatch() says another number while a feature of ours has enlarged it.
LLAMA_API int32_t fn_draft_ubatch(const struct llama_context * ctx);
