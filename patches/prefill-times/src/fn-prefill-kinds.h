#pragma once

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <vector>

// What a prompt's time is for. Uploads, transfers and what is between micro-batches are no nodes of a graph.
enum fn_prefill_kind : uint8_t {
    FN_PREFILL_UPLOAD,           // copies of weights into the workspace
    FN_PREFILL_WAIT,             // for staged experts (lean prefill)
    FN_PREFILL_EXPERTS,          // router, routed experts, their sum, the shared expert
    FN_PREFILL_ATTENTION,        // full attention with its projections, masks and cache
    FN_PREFILL_INDEXER,          // scores of the sparse attention
    FN_PREFILL_TOP_K,            // its selection
    FN_PREFILL_LINEAR_ATTENTION, // gated delta net with its projections and convolution
    FN_PREFILL_RESIDUAL,         // hyper-connections: mixing and combining the residual streams
    FN_PREFILL_TRANSFER,         // inputs and activations from one device to another
    FN_PREFILL_OTHER,            // embeddings, head; building a graph, filling its inputs
    FN_PREFILL_BETWEEN,          // between two micro-batches: the draft head, checkpoints, the server
    FN_PREFILL_N_KINDS,
};

const char * fn_prefill_kind_name(fn_prefill_kind kind);

// views and the like: never the first node of a split
bool fn_prefill_computes_nothing(const ggml_tensor * t);

// what has to be copied before a node can run
enum fn_prefill_copies : uint8_t { FN_PREFILL_NO_COPY, FN_PREFILL_COPY, FN_PREFILL_COPY_WEIGHTS };

// Consecutive nodes of one kind that the scheduler runs as one piece: it ends where the kind changes and wherever the
// scheduler may begin a split, since copies come there.
struct fn_prefill_piece {
    int               begin; // index of its first node
    fn_prefill_kind   kind;
    fn_prefill_copies copies;
};

// is_recr: whether a layer has linear attention. backend_of: any value that differs between backends.
// The graph is as the scheduler left it: copies of sources are in place.
std::vector<fn_prefill_piece> fn_prefill_pieces(
        ggml_cgraph * graph, const std::function<bool(int)> & is_recr, const std::function<const void *(ggml_tensor *)> & backend_of);
