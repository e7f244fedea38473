#pragma once

// Included by server-context.cpp alone, after the definition of server_slot: that file keeps its types to itself.

#include "fn-phase-marker.h"
#include "fn-phase-server.h"

template <typename Slots> void fn_phase_server::reconcile(const Slots & slots, int32_t off) {
    if (!phase) {
        return;
    }
    for (const auto & slot : slots) {
        if (off >= 0 && slot.state == SLOT_STATE_DONE_PROMPT && slot.i_batch >= off) {
            dump_logits(slot.task->id, slot.task->n_tokens(), slot.i_batch - off);
        }
    }
    for (const auto & slot : slots) {
        if (slot.state == SLOT_STATE_PROCESSING_PROMPT) {
            follow(slot.task->id, slot.task->n_tokens() - slot.prompt.n_tokens(), slot.prompt.n_tokens());
            return;
        }
    }
    follow(-1, 0, 0);
}

template <typename Batch, typename Slots> void fn_phase_server::cut(Batch & batch, Slots & slots, int32_t off) {
    const int32_t n_done = phase ? fn_phase_tokens_done(phase.get()) : 0;
    if (!phase || n_done >= batch.view.size()) {
        return;
    }
    for (auto & slot : slots) {
        if (slot.state == SLOT_STATE_PROCESSING_PROMPT || slot.state == SLOT_STATE_DONE_PROMPT) {
            slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - (batch.size() - off - n_done));
            slot.state   = SLOT_STATE_PROCESSING_PROMPT;
            slot.i_batch = -1;
        }
    }
    fn_phase_marker("stopped", "{\"n_tokens\":" + std::to_string(n_done) + ",\"n_batch\":" + std::to_string(batch.size() - off) + "}");

    batch.tokens.resize(off + n_done);
    batch.render(off, n_done);
}
