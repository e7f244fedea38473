#pragma once

#include "ggml.h"

#include <stdlib.h>
#include <string.h>

// waking the threads costs some microseconds, a gathered row about one
#define FN_GET_ROWS_MIN 512

// Threads that gather a node's rows on the CPU: upstream's one, or all for as many rows as only a prompt asks for.
static inline int fn_get_rows_tasks(const struct ggml_tensor * node, int n_threads) {
    if (node->op != GGML_OP_GET_ROWS || ggml_nelements(node->src[1]) < FN_GET_ROWS_MIN) {
        return 1;
    }
    const char * text = getenv("FN_GET_ROWS");
    return text && strcmp(text, "0") == 0 ? 1 : n_threads;
}
