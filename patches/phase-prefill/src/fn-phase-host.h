#pragma once

#include "ggml-backend.h"
#include "../ggml/src/ggml-backend-impl.h"
#include "ggml-cpp.h"

// A host buffer type that keeps its memory. The workspace of a context has a part in page-locked host memory, and locking
// is slow: about 0.1 s for each 256 MiB, in both directions of every transaction. Nothing is gained by giving it back.
//
// One buffer at a time gets the kept memory, which grows to the largest asked for; others come from the inner type.
class fn_phase_host {
public:
    explicit fn_phase_host(ggml_backend_buffer_type_t inner);

    fn_phase_host(const fn_phase_host &) = delete;
    fn_phase_host & operator=(const fn_phase_host &) = delete;

    // no buffer of this type may be left when this object goes
    ggml_backend_buffer_type_t type() { return &buft; }

    const ggml_backend_buffer_type_t inner;

private:
    ggml_backend_buffer_t alloc(size_t size);

    ggml_backend_buffer_type buft;
    ggml_backend_buffer_ptr  kept;
    bool                     used = false;
};
