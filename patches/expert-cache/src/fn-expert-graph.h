#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// Routing from a trace instead of the router, or nullptr: the graph's own.
ggml_tensor * fn_expert_routing_override(const llm_graph_context & graph, int64_t n_rows, int il);

// The experts of one layer over the context's cache: weighted and summed [n_embd, n_tokens], or nullptr when the stock
// path applies (no cache, too many tokens, warm-up, a phase without slots).
//   cur:     [n_embd, n_tokens]
//   ids:     [n_used, n_tokens]
//   weights: [1, n_used, n_tokens]
ggml_tensor * fn_expert_cache_build(const llm_graph_context & graph, ggml_tensor * cur, ggml_tensor * ids, ggml_tensor * weights, int il);
