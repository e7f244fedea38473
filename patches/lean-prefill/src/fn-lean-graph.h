#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// Where lean prefill takes this micro-batch: replaces the layer's experts by their staging tensors, and the ids by what
// a stop hands out once these are filled. Otherwise changes nothing.
//   n_rows: rows of this layer, which may be fewer than the micro-batch's tokens
//   ids:    [n_used, n_rows]
void fn_lean_build(const llm_graph_context & graph, int64_t n_rows, ggml_tensor *& ids, ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& down, int il);
