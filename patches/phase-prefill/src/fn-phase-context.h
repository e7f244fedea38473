#pragma once

#include "fn-phase-host.h"
#include "fn-phase-link.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct llama_context;

// What the transaction does with one context. It is the only part that reaches into llama_context.
struct fn_phase_context {
    explicit fn_phase_context(llama_context & ctx) : ctx(ctx) {}

    // nothing in flight, no graph that could be used again
    void quiesce();

    // frees the compute buffers and the pools of every device; the scheduler is an empty one afterwards.
    // prompt: they served a prompt, so they say how large a prompt's pools get
    void release(bool prompt);

    // the host's part of the workspace keeps its memory from the next release on, until it is let go
    void keep_host();
    void let_host_go();

    // reserves for this physical micro-batch, as a new context would, and pools as large as any before. While a prompt
    // runs, a pool that cannot grow further is an error of decode() (-2) instead of an abort.
    // false: what failed is in error
    bool reserve(uint32_t n_ubatch, bool prompt, std::string & error);

    // device memory of the compute buffers
    size_t workspace_bytes() const;

    // outputs, KV and recurrent state
    uint64_t hash() const;

    // for tests: changes one byte of the first tensor of the memory. false when it holds nothing
    bool corrupt();

    uint32_t n_ubatch()  const; // physical
    uint32_t n_batch()   const;
    uint32_t n_seq_max() const;
    bool     embeddings() const;

    fn_phase_link & link();

    llama_context & ctx;

private:
    void drop_scheduler();

    std::unique_ptr<fn_phase_host> host;

    // largest pool seen per backend: while decoding, and in a prompt
    std::vector<size_t> pool_bytes[2];
};
