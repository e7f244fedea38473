#include "fn-mtp-qwen4exp.h"

#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"

// The draft's cells can be trimmed to any position, so a partial checkpoint (which saves what cannot be trimmed) has
// nothing to save. The pinned cache ignores the flag and copies every row: 2 KB per token and checkpoint here.
static bool fn_mtp_state_skipped(llama_state_seq_flags flags) {
    return (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0;
}

// dense attention: a plain cache of the MTP layer
class fn_mtp_memory_dense : public llama_kv_cache {
public:
    using llama_kv_cache::llama_kv_cache;

    void state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override {
        if (!fn_mtp_state_skipped(flags)) {
            llama_kv_cache::state_write(io, seq_id, flags);
        }
    }

    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override {
        if (!fn_mtp_state_skipped(flags)) {
            llama_kv_cache::state_read(io, seq_id, flags);
        }
    }
};

// Sparse attention: the trunk's memory with the MTP layer in its attention and indexer caches and no recurrent layer.
// The recurrent part is an empty shell, and must neither veto a trim nor bound the positions.
class fn_mtp_memory_sparse : public llama_memory_hybrid_idx {
public:
    using llama_memory_hybrid_idx::llama_memory_hybrid_idx;

    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override {
        shell_forget(seq_id);

        const bool ok_idx  = get_mem_idx ()->seq_rm(seq_id, p0, p1);
        const bool ok_attn = get_mem_attn()->seq_rm(seq_id, p0, p1);

        return ok_idx && ok_attn;
    }

    llama_pos seq_pos_min(llama_seq_id seq_id) const override { return get_mem_attn()->seq_pos_min(seq_id); }
    llama_pos seq_pos_max(llama_seq_id seq_id) const override { return get_mem_attn()->seq_pos_max(seq_id); }

    void state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override {
        if (!fn_mtp_state_skipped(flags)) {
            get_mem_attn()->state_write(io, seq_id, flags);
            get_mem_idx ()->state_write(io, seq_id, flags);
        }
    }

    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override {
        if (fn_mtp_state_skipped(flags)) {
            return;
        }

        shell_forget(seq_id);

        // the indexer takes over the attention's cells, so that cell j stays one token in both
        llama_kv_cache::slot_info_vec_t sinfos;

        try {
            get_mem_attn()->state_read_sinfo(io, seq_id, flags, &sinfos, nullptr);
            get_mem_idx ()->state_read_sinfo(io, seq_id, flags, nullptr, &sinfos);
        } catch (...) {
            if (seq_id < 0) {
                clear(true);
            } else {
                get_mem_attn()->state_clear(seq_id);
                get_mem_idx ()->state_clear(seq_id);
            }
            throw;
        }
    }

private:
    // the shell would find the next batch's positions out of order
    void shell_forget(llama_seq_id seq_id) {
        if (seq_id < 0) {
            get_mem_recr()->clear(false);
        } else {
            get_mem_recr()->seq_rm(seq_id, -1, -1);
        }
    }
};

llama_memory_i * fn_mtp_qwen4exp_create_memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams) {
    const auto & hparams = model.hparams;

    if (model.arch != LLM_ARCH_QWEN4EXP || params.ctx_type != LLAMA_CONTEXT_TYPE_MTP) {
        return nullptr;
    }

    const int32_t il_mtp = hparams.n_layer();

    const llama_memory_i::layer_filter_cb filter_mtp  = [=](int32_t il) { return il >= il_mtp; };
    const llama_memory_i::layer_filter_cb filter_none = [ ](int32_t)    { return false; };

    if (hparams.dsv4_compress_ratios[il_mtp] == 0) {
        return new fn_mtp_memory_dense(
                model, hparams,
                params.type_k, params.type_v, !cparams.flash_attn,
                cparams.offload_kqv, cparams.kv_unified,
                cparams.n_ctx_seq, cparams.n_seq_max,
                1, hparams.n_swa, hparams.swa_type,
                nullptr, filter_mtp, nullptr, nullptr);
    }

    return new fn_mtp_memory_sparse(
            model,
            params.type_k, params.type_v, !cparams.flash_attn,
            cparams.n_ctx_seq, 1, hparams.n_swa, hparams.swa_type,
            GGML_TYPE_F32, GGML_TYPE_F32, std::max((uint32_t) 1, cparams.n_seq_max),
            cparams.n_seq_max, 0, cparams.offload_kqv, cparams.kv_unified,
            filter_mtp, filter_none, filter_mtp);
}
