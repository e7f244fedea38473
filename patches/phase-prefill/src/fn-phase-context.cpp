#include "fn-phase-context.h"

#include "llama-context.h"
#include "llama-io.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

namespace {

// FNV-1a over 8 bytes at a time: it has to notice any change, not to resist an attacker
struct fn_hash {
    uint64_t value = 0xcbf29ce484222325ull;

    void add(const void * data, size_t size) {
        const uint8_t * p = (const uint8_t *) data;
        for (; size >= 8; p += 8, size -= 8) {
            uint64_t word;
            memcpy(&word, p, 8);
            mix(word);
        }
        for (; size > 0; ++p, --size) {
            mix(*p);
        }
    }

    void mix(uint64_t word) {
        value = (value ^ word)*0x100000001b3ull;
        value ^= value >> 29;
    }
};

class fn_hash_io : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        hash.add(src, size);
        n_written += size;
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        buf.resize(size);
        ggml_backend_tensor_get(tensor, buf.data(), offset, size);
        write(buf.data(), size);
    }

    size_t n_bytes() override { return n_written; }

    fn_hash hash;

private:
    std::vector<uint8_t> buf;
    size_t               n_written = 0;
};

class fn_flip_io : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        GGML_UNUSED(src);
        GGML_UNUSED(size);
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (!done && size > 0) {
            uint8_t byte;
            ggml_backend_tensor_get(tensor, &byte, offset, 1);
            byte ^= 1;
            ggml_backend_tensor_set(tensor, &byte, offset, 1);
            done = true;
        }
    }

    size_t n_bytes() override { return 0; }

    bool done = false;
};

using fn_release_pools_t = size_t (*)(ggml_backend_t);
using fn_grow_pool_t     = bool   (*)(ggml_backend_t, size_t);
using fn_guard_pools_t   = void   (*)(ggml_backend_t, bool);

template <typename T> T fn_proc(ggml_backend_t backend, const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    return (T) ggml_backend_reg_get_proc_address(reg, name);
}

}

void fn_phase_context::quiesce() {
    ctx.synchronize();
    for (auto & res : ctx.gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
    ctx.gf_res_prev_active = nullptr;
}

// an empty scheduler instead of none: the context can be destroyed, or asked for its sizes, at any time
void fn_phase_context::drop_scheduler() {
    ctx.sched.reset();
    ctx.sched.reset(ggml_backend_sched_new(
            ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(), 8, false, ctx.cparams.op_offload));
    ctx.sched_need_reserve = true;
}

void fn_phase_context::keep_host() {
    for (size_t i = 0; i < ctx.backend_ptrs.size(); ++i) {
        if (!host && ggml_backend_buft_is_host(ctx.backend_buft[i])) {
            host.reset(new fn_phase_host(ctx.backend_buft[i]));
            ctx.backend_buft[i] = host->type();
        }
    }
}

void fn_phase_context::let_host_go() {
    if (!host) {
        return;
    }
    quiesce();
    std::replace(ctx.backend_buft.begin(), ctx.backend_buft.end(), host->type(), host->inner);
    drop_scheduler();
    host.reset();
}

void fn_phase_context::release(bool prompt) {
    quiesce();
    drop_scheduler();

    std::vector<size_t> & largest = pool_bytes[prompt];
    largest.resize(ctx.backend_ptrs.size());

    for (size_t i = 0; i < ctx.backend_ptrs.size(); ++i) {
        ggml_backend_t backend = ctx.backend_ptrs[i];
        if (auto release_pools = fn_proc<fn_release_pools_t>(backend, "fn_phase_release_pools")) {
            largest[i] = std::max(largest[i], release_pools(backend));
        }
    }
}

bool fn_phase_context::reserve(uint32_t n_ubatch, bool prompt, std::string & error) {
    const bool pipeline = ctx.cparams.pipeline_parallel;

    ctx.cparams.n_ubatch   = n_ubatch;
    ctx.sched_need_reserve = true;
    try {
        ctx.sched_reserve();
    } catch (const std::exception & e) {
        error = e.what();
        return false;
    }
    if (ctx.cparams.pipeline_parallel != pipeline) {
        error = "pipeline parallelism was lost";
        return false;
    }
    for (ggml_backend_t backend : ctx.backend_ptrs) {
        if (auto guard_pools = fn_proc<fn_guard_pools_t>(backend, "fn_phase_guard_pools")) {
            guard_pools(backend, prompt);
        }
    }
    for (size_t i = 0; i < pool_bytes[prompt].size(); ++i) {
        ggml_backend_t backend = ctx.backend_ptrs[i];
        auto grow_pool = fn_proc<fn_grow_pool_t>(backend, "fn_phase_grow_pool");
        if (grow_pool && !grow_pool(backend, pool_bytes[prompt][i])) {
            error = std::string(ggml_backend_name(backend)) + ": no memory for a pool of " + std::to_string(pool_bytes[prompt][i]) + " bytes";
            return false;
        }
    }
    return true;
}

size_t fn_phase_context::workspace_bytes() const {
    size_t size = 0;
    for (size_t i = 0; i < ctx.backend_ptrs.size(); ++i) {
        if (!ggml_backend_buft_is_host(ctx.backend_buft[i])) {
            size += ggml_backend_sched_get_buffer_size(ctx.sched.get(), ctx.backend_ptrs[i]);
        }
    }
    return size;
}

uint64_t fn_phase_context::hash() const {
    fn_hash_io io;
    if (ctx.memory) {
        ctx.memory->state_write(io);
    }
    io.hash.add(ctx.logits.data,     ctx.logits.data     ? ctx.logits.size    *sizeof(float) : 0);
    io.hash.add(ctx.embd_nextn.data, ctx.embd_nextn.data ? ctx.embd_nextn.size*sizeof(float) : 0);
    io.hash.add(ctx.output_ids.data(), ctx.output_ids.size()*sizeof(ctx.output_ids[0]));
    return io.hash.value;
}

bool fn_phase_context::corrupt() {
    fn_flip_io io;
    if (ctx.memory) {
        ctx.memory->state_write(io);
    }
    return io.done;
}

uint32_t fn_phase_context::n_ubatch()   const { return ctx.cparams.n_ubatch;   }
uint32_t fn_phase_context::n_batch()    const { return ctx.cparams.n_batch;    }
uint32_t fn_phase_context::n_seq_max()  const { return ctx.cparams.n_seq_max;  }
bool     fn_phase_context::embeddings() const { return ctx.cparams.embeddings; }

fn_phase_link & fn_phase_context::link() { return ctx.fn_phase; }
