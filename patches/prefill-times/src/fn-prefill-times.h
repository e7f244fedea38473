#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Prometheus text of a context's prompts by kind of work. Returns the size needed without the zero (0 when off); writes at
// most size bytes, the zero included.
LLAMA_API size_t fn_prefill_times_metrics(struct llama_context * ctx, char * buf, size_t size);

#ifdef __cplusplus
}
#endif
