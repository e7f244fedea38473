#pragma once

// The MTP (next token prediction) head of qwen4exp: loading its three published forms, its graph, its memory and
// the borrowing of the two tensors that the shared form leaves out. The hooks in the vendored files only call these.

#include "models/models.h"

#include "llama-cparams.h"
#include "llama-memory.h"

#include "ggml-cpp.h"

#include <memory>
#include <vector>

// Creates the tensors of the MTP block, if the model has one. Returns true if the file holds nothing but a head:
// the caller has no trunk to load then. With load_mtp off, the block of an embedded file is skipped.
bool fn_mtp_qwen4exp_load_tensors(llama_model_qwen4exp & model);

// The graph of one MTP step: token + wide residual row in, draft logits + wide residual row out.
std::unique_ptr<llm_graph_context> fn_mtp_qwen4exp_build_graph(const llama_model_qwen4exp & model, const llm_graph_params & params);

// The driver reads a residual row for every token of the target's batch (unmasked), so the last layer must not drop any.
bool fn_mtp_qwen4exp_keeps_rows(const llama_cparams & cparams);

// Whether a trunk has begun to export its residual: an output more makes another memory plan. A graph that differs in
// nothing else would go on with the old one, which gives the residual's memory away; and what the export costs shows at
// once, not in the middle of the first prompt.
bool fn_mtp_qwen4exp_exports(const llama_model & model, const llama_cparams & cparams);

// Publishes the trunk's residual [n_embd, hc, n] and, if the rows were kept, crops it to the output rows.
ggml_tensor * fn_mtp_qwen4exp_export(llm_graph_result * res, ggml_context * ctx0, const llama_cparams & cparams,
        ggml_tensor * res_hc, ggml_tensor * inp_out_ids);

// The memory of an MTP context of this architecture; nullptr for every other context.
llama_memory_i * fn_mtp_qwen4exp_create_memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams);

// Takes the target model that a shared head borrows from. Throws if there is none or if it does not fit.
const llama_model * fn_mtp_qwen4exp_target(const llama_model & model, const llama_context_params & params);

// The borrowed tensors may live on devices that the head itself does not use.
void fn_mtp_qwen4exp_add_backends(const llama_model & model, const llama_cparams & cparams, std::vector<ggml_backend_ptr> & backends);
