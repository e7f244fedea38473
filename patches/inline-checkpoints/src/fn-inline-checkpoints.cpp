#include "fn-inline-checkpoints.h"

#include "fn-inline-graph.h"
#include "llama-arch.h"
#include "llama-context.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <cstdlib>
#include <cstring>

static bool fn_inline_on() {
    const char * value = getenv("FN_INLINE_CHECKPOINTS");
    return !value || strcmp(value, "0") != 0;
}

// nullptr: nothing can be kept in this context
static llama_memory_recurrent * fn_inline_memory(llama_context * ctx) {
    if (ctx->get_model().arch != LLM_ARCH_QWEN4EXP || ctx->get_cparams().n_seq_max != 1 || !fn_inline_on()) {
        return nullptr;
    }
    auto * memory = dynamic_cast<llama_memory_hybrid *>(ctx->get_memory());
    return memory ? memory->get_mem_recr() : nullptr;
}

fn_inline_planes llama_memory_recurrent_context::fn_inline(const llama_ubatch & ubatch) const {
    if (is_full) { // the graph is reserved, not computed
        return fn_inline_states::largest(ubatch.n_seqs == 1 && fn_inline_on() ? mem->n_rs_seq : 0, ubatch.n_seq_tokens);
    }
    return mem->fn_inline.planes(ubatch);
}

int32_t fn_inline_checkpoints_max(llama_context * ctx) {
    const auto * memory = fn_inline_memory(ctx);
    return memory ? (int32_t) memory->n_rs_seq : 0;
}

bool fn_inline_checkpoints_want(llama_context * ctx, llama_seq_id seq_id, const llama_pos * pos, size_t n) {
    auto * memory = fn_inline_memory(ctx);
    if (n > (memory ? memory->n_rs_seq : 0)) {
        return false;
    }
    if (memory) {
        memory->fn_inline.want(seq_id, pos, n);
    }
    return true;
}

bool fn_inline_checkpoints_kept(llama_context * ctx, size_t i) {
    const auto * memory = fn_inline_memory(ctx);
    return memory && memory->fn_inline.kept(i);
}

void fn_inline_checkpoints_show(llama_context * ctx, size_t i, bool on) {
    auto * memory = fn_inline_memory(ctx);
    GGML_ASSERT(memory && memory->fn_inline.kept(i));
    memory->fn_inline_show(i, on);
}

void llama_memory_recurrent::fn_inline_show(size_t i, bool on) {
    const llama_seq_id seq_id = fn_inline.seq_id();
    auto & cell = cells[cells[seq_id].tail];
    if (on) {
        GGML_ASSERT(rs_idx[seq_id] == 0);
        fn_inline.last = cell.pos;
    }
    cell.pos = on ? fn_inline.pos(i) - 1 : fn_inline.last;
    set_rs_idx(seq_id, on ? fn_inline_states::plane(i) : 0);
}
