#include "fn-expert-rows.h"

#include "ggml-cpu.h"
#include "vec.h"

#include <cstring>

bool fn_expert_mat_supported(ggml_type type) {
    return ggml_get_type_traits_cpu(type)->vec_dot != nullptr;
}

ggml_type fn_expert_mat_input_type(const fn_expert_mat & mat) {
    return ggml_get_type_traits_cpu(mat.type)->vec_dot_type;
}

void fn_expert_mat_quantize(const fn_expert_mat & mat, const float * x, void * dst) {
    const ggml_type type = fn_expert_mat_input_type(mat);
    if (type == GGML_TYPE_F32) {
        memcpy(dst, x, mat.n_in*sizeof(float));
        return;
    }
    ggml_get_type_traits_cpu(type)->from_float(x, dst, mat.n_in);
}

void fn_expert_mat_rows(const fn_expert_mat & mat, int32_t expert, int64_t r0, int64_t r1, const void * xq, float * y) {
    const ggml_vec_dot_t vec_dot = ggml_get_type_traits_cpu(mat.type)->vec_dot;

    const uint8_t * rows = mat.data + expert*mat.nb_expert;

    for (int64_t r = r0; r < r1; ++r) {
        vec_dot((int) mat.n_in, y + r, 0, rows + r*mat.nb_row, 0, xq, 0, 1);
    }
}

void fn_expert_swiglu(int64_t n, float * h, const float * gate, const float * up) {
    ggml_vec_swiglu_f32((int) n, h, gate, up);
}
