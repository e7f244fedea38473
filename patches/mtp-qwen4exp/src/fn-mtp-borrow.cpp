#include "fn-mtp-qwen4exp.h"

#include "llama-ext.h"
#include "llama-impl.h"

// The shared form leaves out token_embd and output: the graph takes the target's tensors. Nothing is copied, and the
// link is a field of its own: the driver reads "the other context is the target" as "they share one KV cache".

const llama_model * fn_mtp_qwen4exp_target(const llama_model & model, const llama_context_params & params) {
    if (model.arch != LLM_ARCH_QWEN4EXP || params.ctx_type != LLAMA_CONTEXT_TYPE_MTP) {
        return nullptr;
    }
    if (model.tok_embd != nullptr && model.output != nullptr) {
        return nullptr;
    }

    if (params.ctx_other == nullptr) {
        throw std::runtime_error("a shared qwen4exp MTP head needs a target context to borrow token_embd and output from "
                "(this warning is normal during memory fitting)");
    }

    const llama_model * target = llama_get_model(params.ctx_other);

    auto check = [&](const char * name, const ggml_tensor * own, const ggml_tensor * other) {
        if (own != nullptr) {
            return;
        }
        if (other == nullptr) {
            throw std::runtime_error(format("the MTP head borrows %s, which the target does not have", name));
        }
        if (other->ne[0] != model.hparams.n_embd || other->ne[1] != (int64_t) model.vocab.n_tokens()) {
            throw std::runtime_error(format("the MTP head borrows %s as [%u, %u], the target has [%lld, %lld]", name,
                        model.hparams.n_embd, model.vocab.n_tokens(), (long long) other->ne[0], (long long) other->ne[1]));
        }
        LLAMA_LOG_INFO("fn_mtp: the MTP head borrows %s from the target\n", name);
    };

    check("token_embd", model.tok_embd, target->tok_embd);
    check("output",     model.output,   target->output);

    return target;
}

void fn_mtp_qwen4exp_add_backends(const llama_model & model, const llama_cparams & cparams, std::vector<ggml_backend_ptr> & backends) {
    if (cparams.fn_mtp_target == nullptr) {
        return;
    }

    const ggml_tensor * borrowed[] = {
        model.tok_embd ? nullptr : cparams.fn_mtp_target->tok_embd,
        model.output   ? nullptr : cparams.fn_mtp_target->output,
    };

    for (const ggml_tensor * t : borrowed) {
        if (t == nullptr || t->buffer == nullptr || ggml_backend_buffer_is_host(t->buffer)) {
            continue; // the CPU backend, always present, reads host memory
        }

        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(t->buffer);
        ggml_backend_dev_t         dev  = ggml_backend_buft_get_device(buft);

        bool found = dev == nullptr;
        for (const auto & backend : backends) {
            found = found || ggml_backend_get_device(backend.get()) == dev;
        }
        if (found) {
            continue;
        }

        ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
        if (backend == nullptr) {
            throw std::runtime_error(format("failed to initialize %s for the borrowed tensor %s", ggml_backend_dev_name(dev), t->name));
        }

        LLAMA_LOG_INFO("fn_mtp: adding %s, which holds the borrowed tensor %s\n", ggml_backend_dev_name(dev), t->name);
        backends.emplace_back(backend);
    }
}
