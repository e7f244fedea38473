#pragma once

// Included by C and C++.

#include "ggml.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Elements of the result from which a node's rows are gathered by all threads: 103 tokens of the real model. Where two threads
// no longer lose; one takes 0.1 to 1 ms for it, waking the others tens of microseconds (README.md, Numbers).
#define FN_GET_ROWS_MIN ((int64_t) 1 << 18)

// Threads that gather the rows of a GET_ROWS node, which is not empty: the stock path's one, or all of them.
static inline int fn_get_rows_tasks(const struct ggml_tensor * node, const int n_threads) {
    if (node->op != GGML_OP_GET_ROWS || ggml_nelements(node) < FN_GET_ROWS_MIN) {
        return 1;
    }
    // only a prompt comes here, twice a micro-batch: a look into the environment is cheaper than state
    const char * value = getenv("FN_GET_ROWS");
    return value && strcmp(value, "0") == 0 ? 1 : n_threads;
}
