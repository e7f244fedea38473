#include "fn-lean-impl.h"

#include "fn-cache-marker.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <exception>

// up to here a larger chunk is worth lending slots for it, which costs their refill after every prompt
static constexpr int32_t FN_LEAN_CHUNK_GOOD = 4096;

static constexpr int32_t FN_LEAN_CHUNKS[] = { 16384, 8192, 4096, 2048, 1024, 512 };

// CUDA's expert matmul keeps 4 bytes per token in shared memory: 25,000 tokens on the smallest (sm_86)
static constexpr int32_t FN_LEAN_CHUNK_MAX = 24576;

static constexpr size_t FN_LEAN_MARGIN = 256*1024*1024;

// the workspaces of the stock graph hold copies of experts on the first device, which are not needed any more
void fn_lean::free_workspace() {
    for (auto & res : ctx.gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
    ctx.gf_res_prev_active = nullptr;
    ctx.sched.reset();
    ctx.sched.reset(ggml_backend_sched_new(
            ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(), 8, false, ctx.cparams.op_offload));
    ctx.sched_need_reserve = true;
}

bool fn_lean::set_memory(bool borrowed, std::string & why) {
    lending = borrowed;
    for (auto & device : devices) {
        fn_lean_stage & stage = *device->stage;
        stage.free();
        const std::string name = ggml_backend_dev_name(stage.dev);
        size_t free_bytes = 0, total = 0;
        ggml_backend_dev_memory(stage.dev, &free_bytes, &total);
        if (borrowed) {
            if (!device->lent_base) {
                why = name + ": the expert cache has not the " + std::to_string(stage.need_bytes()) + " bytes of " + std::to_string(n_ring) + " staged layers to lend";
            } else if (!stage.borrow(device->lent_buffer, device->lent_base)) {
                why = name + ": a staging tensor was refused";
            }
        } else if (stage.need_bytes() > free_bytes || !stage.alloc()) {
            why = name + ": staging memory for " + std::to_string(n_ring) + " layers needs " + std::to_string(stage.need_bytes()) + " bytes of " +
                std::to_string(free_bytes) + " free";
        }
        if (!why.empty()) {
            for (auto & other : devices) {
                other->stage->free();
            }
            return false;
        }
    }
    return true;
}

bool fn_lean::start(std::string & why) {
    for (auto & device : devices) {
        device->stage->slot_map      = slot_map;
        device->stage->slot_map_data = this;
        if (!device->stage->start()) {
            why = std::string(ggml_backend_dev_name(device->stage->dev)) + ": no second stream";
            return false;
        }
    }
    guard_slots();
    return true;
}

// what the devices need beyond buffers while they compute: the expert matmul's quantised rows, and what drivers take
size_t fn_lean::margin_bytes(int32_t n) const {
    const size_t n_embd = ctx.get_model().hparams.n_embd;
    return FN_LEAN_MARGIN + (size_t) n*n_used*n_embd*9/8;
}

bool fn_lean::try_chunk(int32_t n, bool borrowed, size_t margin, std::string & why) {
    const bool is_set = devices[0]->stage->size_bytes + devices[0]->stage->lent_bytes > 0 && lending == borrowed;
    free_workspace();
    if (!is_set && !set_memory(borrowed, why)) {
        return false;
    }
    ctx.cparams.n_ubatch   = n;
    ctx.sched_need_reserve = true;
    try {
        ctx.sched_reserve();
    } catch (const std::exception & e) {
        why = e.what();
        return false;
    }
    for (auto & device : devices) {
        size_t total = 0;
        ggml_backend_dev_memory(device->stage->dev, &device->free_bytes, &total);
        if (device->free_bytes < margin) {
            why = std::string(ggml_backend_dev_name(device->stage->dev)) + ": " + std::to_string(device->free_bytes) + " bytes left, " +
                std::to_string(margin) + " are kept for matrix products";
            return false;
        }
    }
    return true;
}

int32_t fn_lean::choose_chunk() {
    const int32_t n_most = (int32_t) std::min<uint32_t>(std::min(ctx.cparams.n_batch, ctx.cparams.n_ctx), FN_LEAN_CHUNK_MAX);

    std::vector<int32_t> candidates;
    if (requested == FN_LEAN_AUTO) {
        for (const int32_t n : FN_LEAN_CHUNKS) {
            if (n <= n_most) {
                candidates.push_back(n);
            }
        }
        if (candidates.empty()) {
            candidates.push_back(n_most);
        }
    } else if (requested > n_most) {
        return refuse(FN_LEAN_BAD_PARAMS, "--lean-prefill " + std::to_string(requested) + ": a chunk is at most the batch (" +
                std::to_string(ctx.cparams.n_batch) + "), the context (" + std::to_string(ctx.cparams.n_ctx) + ") and " +
                std::to_string(FN_LEAN_CHUNK_MAX));
    } else {
        candidates.push_back(requested);
    }

    // memory of its own, then the cache's; then what is worse than lending, before nothing
    struct attempt_t {
        int32_t n;
        bool    borrowed;
        bool    margin;
    };
    std::vector<attempt_t> attempts;
    const int32_t n_good = requested == FN_LEAN_AUTO ? std::min(FN_LEAN_CHUNK_GOOD, n_most) : requested;
    for (const bool good : { true, false }) {
        for (const bool borrowed : { false, true }) {
            for (const int32_t n : candidates) {
                const bool lendable = lend == 1 || (lend < 0 && devices[0]->lent_base);
                if (borrowed ? lendable && good : lend < 1 && (n >= n_good) == good) {
                    attempts.push_back({ n, borrowed, true });
                }
            }
        }
    }
    // a number is the caller's decision, so it does without the margin; first with what leaves the most
    for (size_t i = requested == FN_LEAN_AUTO ? 0 : attempts.size(); i > 0; --i) {
        attempts.push_back({ attempts[i - 1].n, attempts[i - 1].borrowed, false });
    }

    std::string tried, why;
    for (const attempt_t & attempt : attempts) {
        why.clear();
        const bool fits = try_chunk(attempt.n, attempt.borrowed, attempt.margin ? margin_bytes(attempt.n) : 0, why);
        tried += std::string(tried.empty() ? "" : ",") + "{\"chunk\":" + std::to_string(attempt.n) + ",\"lent\":" + (attempt.borrowed ? "true" : "false") +
            ",\"fits\":" + (fits ? "true" : "false") + (why.empty() ? "" : ",\"why\":" + fn_cache_json_string(why)) + "}";
        choice = "[" + tried + "]";
        if (fits) {
            n_chunk = attempt.n;
            break;
        }
    }
    if (!n_chunk) {
        return refuse(FN_LEAN_NO_MEMORY, "no chunk fits beside the weights, the cache and " + std::to_string(n_ring) + " staged layers: " + why);
    }
    if (!start(why)) {
        return refuse(FN_LEAN_NO_MEMORY, why);
    }
    return FN_LEAN_OK;
}
