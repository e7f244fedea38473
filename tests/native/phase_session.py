"""A child process with the real library in it: one model on virtual GPUs, driven by commands.

The child reads one JSON command a line and answers one JSON object a line. It is a process of its own because
a lost device aborts it, and because the library keeps a device registered for the life of its process.

    python phase_session.py BIN MODEL ENDPOINT,ENDPOINT
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from flashnext.native import Library, Mode, Phase, PhaseRefusedError

# The structs of the pinned llama.h, passed by value; defaults are compared, so a moved field is noticed.
CDEF = """
struct llama_model_params {
    void * devices; const void * tensor_buft_overrides;
    int32_t n_gpu_layers; int32_t split_mode; int32_t load_mode; int32_t lazy_mode; int32_t main_gpu;
    const float * tensor_split; void * progress_callback; void * progress_callback_user_data;
    const void * kv_overrides;
    bool vocab_only; bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; uint32_t n_rs_seq;
    uint32_t n_outputs_max; uint32_t n_outputs_max_per_seq; int32_t n_threads; int32_t n_threads_batch;
    int32_t ctx_type; int32_t rope_scaling_type; int32_t pooling_type; int32_t attention_type;
    int32_t flash_attn_type;
    float rope_freq_base; float rope_freq_scale; float yarn_ext_factor; float yarn_attn_factor;
    float yarn_beta_fast; float yarn_beta_slow; uint32_t yarn_orig_ctx; float defrag_thold;
    void * cb_eval; void * cb_eval_user_data; int32_t type_k; int32_t type_v;
    void * abort_callback; void * abort_callback_data;
    bool embeddings; bool offload_kqv; bool no_perf; bool op_offload; bool swa_full; bool kv_unified;
    void * samplers; size_t n_samplers; struct llama_context * ctx_other;
};
struct llama_batch {
    int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id; int32_t ** seq_id;
    int8_t * logits;
};
struct fn_override { const char * pattern; void * buft; };
struct fn_expert_cache_params { int32_t n_slots; int32_t n_inserts; };
struct fn_expert_cache_stats {
    int32_t phase; int32_t n_slots; int32_t n_inserts; int32_t n_layers; int32_t n_devices;
    int32_t n_inserts_max;
    uint64_t generation; uint64_t n_steps; uint64_t capacity; uint64_t size_bytes;
    uint64_t hits; uint64_t misses; uint64_t uploads; uint64_t cpu_rows;
};
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
void * llama_model_load_from_file(const char *, struct llama_model_params);
struct llama_context * llama_init_from_model(void *, struct llama_context_params);
void llama_free(struct llama_context *);
uint32_t llama_n_ubatch(const struct llama_context *);
void * llama_get_memory(const struct llama_context *);
void llama_memory_clear(void *, bool);
int32_t llama_memory_seq_pos_max(void *, int32_t);
struct llama_batch llama_batch_get_one(int32_t *, int32_t);
int32_t llama_decode(struct llama_context *, struct llama_batch);
float * llama_get_logits_ith(struct llama_context *, int32_t);
void * llama_model_get_vocab(void *);
int32_t llama_vocab_n_tokens(void *);
size_t llama_state_get_size(struct llama_context *);
size_t llama_state_get_data(struct llama_context *, uint8_t *, size_t);
void ggml_backend_load_all(void);
void * ggml_backend_reg_by_name(const char *);
void * ggml_backend_reg_get_proc_address(void *, const char *);
void ggml_backend_register(void *);
void * ggml_backend_cpu_buffer_type(void);
int32_t fn_expert_cache_attach(struct llama_context *, struct fn_expert_cache_params);
void * fn_expert_cache_get(struct llama_context *);
void fn_expert_cache_get_stats(void *, struct fn_expert_cache_stats *);
int32_t fn_expert_cache_quiesce(void *);
"""


class Session:
    """The child's side: at most one pair of contexts at a time."""

    def __init__(self, folder: Path, model: Path, endpoints: list[str]) -> None:
        self.lib = Library(folder, CDEF)
        self.c, self.ffi = self.lib.c, self.lib.ffi
        self.stack = contextlib.ExitStack()
        self.target: Any = None
        self.phase: Phase | None = None
        self._check_layout()
        self._add_devices(endpoints)
        self.model = self._load(model)
        self.n_vocab = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))

    def _check_layout(self) -> None:
        c, m = self.c.llama_context_default_params(), self.c.llama_model_default_params()
        found = (
            c.n_batch,
            c.n_ubatch,
            c.n_seq_max,
            c.type_k,
            c.offload_kqv,
            c.n_samplers,
            m.split_mode,
            m.load_mode,
        )
        assert found == (2048, 512, 1, 1, True, 0, 1, -1), f"llama.h has other structs: {found}"

    def _add_devices(self, endpoints: list[str]) -> None:
        self.c.ggml_backend_load_all()
        rpc = self.c.ggml_backend_reg_by_name(b"RPC")
        add = self.c.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
        add = self.ffi.cast("void * (*)(const char *)", add)
        for endpoint in endpoints:
            self.c.ggml_backend_register(add(endpoint.encode()))

    def _load(self, path: Path) -> Any:
        params = self.c.llama_model_default_params()
        self._pattern = self.ffi.new("char[]", b"exps")
        self._overrides = self.ffi.new(
            "struct fn_override[]",
            [[self._pattern, self.c.ggml_backend_cpu_buffer_type()], [self.ffi.NULL, self.ffi.NULL]],
        )
        params.tensor_buft_overrides = self._overrides
        params.n_gpu_layers = 99
        params.use_extra_bufts = False
        params.load_mtp = True
        model = self.c.llama_model_load_from_file(str(path).encode(), params)
        assert model != self.ffi.NULL, "the model does not load"
        return model

    def _context(self, n_ctx: int, batch: int, micro_batch: int, **fields: Any) -> Any:
        params = self.c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, batch, micro_batch
        params.n_threads = params.n_threads_batch = 1
        params.n_outputs_max = 32
        for name, value in fields.items():
            setattr(params, name, value)
        context = self.c.llama_init_from_model(self.model, params)
        assert context != self.ffi.NULL, "no context"
        self.stack.callback(self.c.llama_free, context)
        return context

    # commands

    def open(
        self,
        *,
        micro_batch: int,
        prompt: int | None = None,
        n_ctx: int = 2048,
        batch: int = 1024,
        slots: int = 16,
        draft: bool = False,
        mode: str = "TRANSACTION",
        verify: bool = False,
    ) -> dict[str, Any]:
        """``micro_batch``: of the contexts. ``prompt``: that of the transaction; None: no transaction."""
        self.close()
        self.target = self._context(n_ctx, batch, micro_batch)
        attached = self.c.fn_expert_cache_attach(self.target, [slots, 2])
        second = None
        if draft:
            second = self._context(n_ctx, batch, micro_batch, ctx_type=1, ctx_other=self.target)
        if prompt is not None:
            try:
                opened = Phase.open(
                    self.lib, self.target, second, micro_batch=prompt, mode=Mode[mode], verify=verify
                )
                self.phase = self.stack.enter_context(opened)
            except PhaseRefusedError as e:
                return {"refused": str(e)}
        return {"attached": attached, **self.state()}

    def close(self) -> dict[str, Any]:
        self.stack.close()
        self.target = self.phase = None
        return {}

    def begin(self, n: int = 0) -> dict[str, Any]:
        assert self.phase
        return {"result": self.phase.begin(n).name, **self.state()}

    def end(self) -> dict[str, Any]:
        assert self.phase
        return {"result": self.phase.end().name, **self.state()}

    def fault(self, text: str) -> dict[str, Any]:
        assert self.phase
        return {"result": self.phase.set_fault(text).name}

    def stop_after(self, n: int | None) -> dict[str, Any]:
        assert self.phase
        self.phase.stop_after(n)
        return {}

    def decode(self, tokens: list[int]) -> dict[str, Any]:
        """One batch; the answer has the logits of its last token as a digest, and the best token."""
        ids = self.ffi.new("int32_t[]", tokens)
        code = self.c.llama_decode(self.target, self.c.llama_batch_get_one(ids, len(tokens)))
        answer: dict[str, Any] = {"code": code, "pos": self.pos()}
        if self.phase:
            answer["done"] = self.phase.tokens_done
            if answer["done"] != len(tokens):
                return answer
        if code == 0:
            row = self.c.llama_get_logits_ith(self.target, -1)
            raw = bytes(self.ffi.buffer(row, 4 * self.n_vocab))
            values = memoryview(raw).cast("f")
            answer |= {
                "logits": hashlib.sha256(raw).hexdigest(),
                "best": max(range(self.n_vocab), key=values.__getitem__),
            }
        return answer

    def generate(self, token: int, n: int) -> dict[str, Any]:
        """Greedy tokens one at a time, after this one."""
        digest, found = hashlib.sha256(), []
        for _ in range(n):
            step = self.decode([token])
            assert step["code"] == 0, step
            digest.update(step["logits"].encode())
            token = step["best"]
            found.append(token)
        return {"tokens": found, "logits": digest.hexdigest()}

    def clear(self) -> dict[str, Any]:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.target), True)
        return {}

    def pos(self) -> int:
        return int(self.c.llama_memory_seq_pos_max(self.c.llama_get_memory(self.target), 0))

    def quiesce_cache(self) -> dict[str, Any]:
        """What nobody but the transaction may do; a test does."""
        return {"code": self.c.fn_expert_cache_quiesce(self.c.fn_expert_cache_get(self.target))}

    def digest(self) -> dict[str, Any]:
        """Of the whole state of the target: KV, recurrent state, outputs."""
        size = self.c.llama_state_get_size(self.target)
        buf = self.ffi.new("uint8_t[]", size)
        n = self.c.llama_state_get_data(self.target, buf, size)
        return {"digest": hashlib.sha256(bytes(self.ffi.buffer(buf, n))).hexdigest()}

    def state(self) -> dict[str, Any]:
        cache = self.c.fn_expert_cache_get(self.target)
        stats = self.ffi.new("struct fn_expert_cache_stats *")
        answer: dict[str, Any] = {"seen": self.c.llama_n_ubatch(self.target)}
        if cache != self.ffi.NULL:
            self.c.fn_expert_cache_get_stats(cache, stats)
            for name in ("phase", "generation", "capacity", "size_bytes", "hits", "misses", "uploads"):
                answer[name] = getattr(stats, name)
        if self.phase:
            answer |= {
                "state": self.phase.state.name,
                "check": self.phase.last_check,
                "detail": self.phase.last_detail,
                "stats": self.phase.stats._asdict(),
            }
        return answer

    def rss(self) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE")}

    def info(self) -> dict[str, Any]:
        return {"version": self.lib.version, "features": self.lib.features, "n_vocab": self.n_vocab}

    def metrics(self) -> dict[str, Any]:
        assert self.phase
        return {"text": self.phase.metrics()}


def main() -> None:
    session = Session(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
    print(json.dumps(session.info()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(session, command.pop("op"))(**command)
        print(json.dumps(answer), flush=True)
    session.close()


if __name__ == "__main__":
    main()
