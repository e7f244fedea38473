#include "fn-phase-host.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>

static int n_failed = 0;

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); n_failed++; } } while (0)

// an inner type that counts
static int n_alloc = 0;
static int n_live  = 0;

static ggml_backend_buffer_t count_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    buffer->buft = buft;
    n_alloc++;
    n_live++;
    static auto free_cpu = buffer->iface.free_buffer;
    buffer->iface.free_buffer = [](ggml_backend_buffer_t b) {
        n_live--;
        free_cpu(b);
    };
    return buffer;
}

int main() {
    ggml_backend_buffer_type inner = *ggml_backend_cpu_buffer_type();
    inner.iface.alloc_buffer = count_alloc;
    {
        fn_phase_host host(&inner);
        ggml_backend_buffer_type_t type = host.type();

        CHECK(ggml_backend_buft_is_host(type));
        CHECK(ggml_backend_buft_get_alignment(type) == ggml_backend_buft_get_alignment(&inner));

        ggml_backend_buffer_t a = ggml_backend_buft_alloc_buffer(type, 1000);
        void * base = ggml_backend_buffer_get_base(a);
        CHECK(ggml_backend_buffer_get_type(a) == type);
        CHECK(ggml_backend_buffer_get_size(a) == 1000);
        ggml_backend_buffer_clear(a, 7);
        ggml_backend_buffer_free(a);
        CHECK(n_alloc == 1 && n_live == 1);

        // larger: the memory grows
        a = ggml_backend_buft_alloc_buffer(type, 4000);
        CHECK(n_alloc == 2 && n_live == 1);
        base = ggml_backend_buffer_get_base(a);

        // a second one at the same time has memory of its own
        ggml_backend_buffer_t b = ggml_backend_buft_alloc_buffer(type, 500);
        CHECK(n_alloc == 3 && n_live == 2);
        CHECK(ggml_backend_buffer_get_base(b) != base);
        ggml_backend_buffer_free(b);
        CHECK(n_live == 1);
        ggml_backend_buffer_free(a);

        // smaller, and as large as before: the same memory, nothing allocated
        for (size_t size : { (size_t) 10, (size_t) 4000 }) {
            a = ggml_backend_buft_alloc_buffer(type, size);
            CHECK(ggml_backend_buffer_get_base(a) == base);
            CHECK(ggml_backend_buffer_get_size(a) == size);
            ggml_backend_buffer_free(a);
        }
        CHECK(n_alloc == 3 && n_live == 1);
    }
    CHECK(n_live == 0);
    return n_failed == 0 ? 0 : 1;
}
