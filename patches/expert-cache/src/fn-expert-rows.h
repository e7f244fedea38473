#pragma once

#include "ggml.h"
#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

// One expert's matrices in host memory and the same row products as the CPU backend's expert matmul.
// Compiled into ggml-cpu, so that it has that library's instruction set and its dot products.

struct fn_expert_mat {
    const uint8_t * data = nullptr; // expert 0, row 0
    ggml_type type = GGML_TYPE_F32;
    int64_t   n_in  = 0; // elements of a row
    int64_t   n_out = 0; // rows of an expert
    size_t    nb_row    = 0; // bytes
    size_t    nb_expert = 0; // bytes
};

// false when the CPU has no dot product for the type
GGML_BACKEND_API bool fn_expert_mat_supported(ggml_type type);

// type that the input rows must have for this matrix
GGML_BACKEND_API ggml_type fn_expert_mat_input_type(const fn_expert_mat & mat);

// x: n_in floats; dst: ggml_row_size(fn_expert_mat_input_type(mat), n_in) bytes
GGML_BACKEND_API void fn_expert_mat_quantize(const fn_expert_mat & mat, const float * x, void * dst);

// y[r] = row r of the expert times the quantized input, for r in r0..r1-1
GGML_BACKEND_API void fn_expert_mat_rows(const fn_expert_mat & mat, int32_t expert, int64_t r0, int64_t r1, const void * xq, float * y);

// h = silu(gate)*up
GGML_BACKEND_API void fn_expert_swiglu(int64_t n, float * h, const float * gate, const float * up);
