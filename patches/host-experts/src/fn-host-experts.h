#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <string>
#include <vector>

struct ggml_context;
struct ggml_tensor;
struct llama_model_loader;

// Placement of tensors in page-locked host memory, and a load that reads into it from several threads.
// LLAMA_MMAP_PIN_HOST=0 leaves all of it to the stock loader.

// The host buffer type that an override asks for, or nullptr. The stock loader swaps it for plain memory when the file
// is mapped.
ggml_backend_buffer_type_t fn_host_override(const llama_model_loader & ml, const std::string & tensor_name);

// Throws when an override of the user matches no tensor of the file, with the nearest names.
void fn_host_check_overrides(const llama_model_loader & ml);

// Memory for the tensors of ctx, or nullptr when the stock allocation applies. Nothing is read or locked yet.
// Throws when the memory cannot be had.
ggml_backend_buffer_t fn_host_alloc(const llama_model_loader & ml, ggml_context * ctx, ggml_backend_buffer_type_t buft);

// Reads and locks those of the tensors that are in memory from fn_host_alloc. False when the callback asks to stop.
// Throws on a short file, and when locking fails with the tensor, the bytes and the limits.
bool fn_host_load(const llama_model_loader & ml, const std::vector<ggml_tensor *> & tensors,
                  bool (*progress)(float progress, void * user_data), void * user_data);

// true when fn_host_load has read the tensor
bool fn_host_loaded(const ggml_tensor * tensor);
