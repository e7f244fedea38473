#include "fn-phase-host.h"

static fn_phase_host & fn_self(ggml_backend_buffer_type_t buft) {
    return *(fn_phase_host *) buft->context;
}

fn_phase_host::fn_phase_host(ggml_backend_buffer_type_t inner) : inner(inner), buft{} {
    buft.device  = inner->device;
    buft.context = this;

    buft.iface.get_name       = [](ggml_backend_buffer_type_t t) { return ggml_backend_buft_name(fn_self(t).inner); };
    buft.iface.alloc_buffer   = [](ggml_backend_buffer_type_t t, size_t size) { return fn_self(t).alloc(size); };
    buft.iface.get_alignment  = [](ggml_backend_buffer_type_t t) { return ggml_backend_buft_get_alignment(fn_self(t).inner); };
    buft.iface.get_max_size   = [](ggml_backend_buffer_type_t t) { return ggml_backend_buft_get_max_size(fn_self(t).inner); };
    buft.iface.get_alloc_size = [](ggml_backend_buffer_type_t t, const ggml_tensor * tensor) {
        return ggml_backend_buft_get_alloc_size(fn_self(t).inner, tensor);
    };
    buft.iface.is_host        = [](ggml_backend_buffer_type_t t) { return ggml_backend_buft_is_host(fn_self(t).inner); };
}

ggml_backend_buffer_t fn_phase_host::alloc(size_t size) {
    if (used) {
        return ggml_backend_buft_alloc_buffer(inner, size);
    }
    if (!kept || ggml_backend_buffer_get_size(kept.get()) < size) {
        kept.reset(); // before the larger one is asked for
        kept.reset(ggml_backend_buft_alloc_buffer(inner, size));
        if (!kept) {
            return nullptr;
        }
    }

    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(ggml_backend_buffer_get_base(kept.get()), size);
    buffer->buft = &buft;
    buffer->iface.free_buffer = [](ggml_backend_buffer_t b) { fn_self(b->buft).used = false; };
    used = true;
    return buffer;
}
