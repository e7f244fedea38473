#pragma once

#include "common.cuh"

// Top-k of every row in one selection. Returns false where the stock path is the better one (short rows,
// FN_TOPK=0): nothing has been written then.
//
// src: F32 [ncols, rows...], contiguous, NaN-free. dst: I32 [k, rows...], the column indices of the k largest values in
// no particular order; of values that are equal at the edge the lowest index wins (-0 and +0 are equal).
bool fn_topk(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
