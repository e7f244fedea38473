"""Small parts of the supervisor: log lines, endings, text checks, states, the log file, help texts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnext import markers
from flashnext.failures import PHASE_FAILED, Action, classify, ending, failure, refusal
from flashnext.loopback import Reply
from flashnext.serve import chunk, metrics, prober, timings
from flashnext.serve.binary import known_flags
from flashnext.serve.endings import Trouble
from flashnext.serve.logfile import LogFile
from flashnext.serve.sanity import degenerate
from flashnext.serve.states import TRANSITIONS, State, check_transition

FAKES = Path(__file__).parents[1] / "fakes"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["fits", "chunk"]), inner),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("line", "kind", "action"),
    [
        ("CUDA error: out of memory", "vram", Action.RESTART),
        (
            "phase-prefill: CUDA0: no memory for the scratch space of the prompt: 66 MiB more are needed",
            "prompt-memory",
            Action.WARN,
        ),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory",
            "vram",
            Action.RESTART,
        ),
        (
            "CUBLAS error: an unsupported value or parameter was passed to the function",
            "vram",
            Action.RESTART,
        ),
        ("CUDA error: an illegal memory access was encountered", "gpu-fault", Action.RESTART),
        ("NVRM: GPU at PCI:0000:01:00: GPU has fallen off the bus", "device-lost", Action.GIVE_UP),
        ("Xid (PCI:0000:01:00): 79, pid=1", "device-lost", Action.GIVE_UP),
        ("warning: no usable GPU found, --gpu-layers option will be ignored", "no-gpu", Action.GIVE_UP),
        ("ggml_abort: GGML_ASSERT(n > 0) failed", "abort", Action.RESTART),
        ("Remote RPC server crashed or returned malformed response", "virtual-gpu-lost", Action.RESTART),
        ("error: invalid argument: --draft-max", "argument", Action.GIVE_UP),
        ("0.00.1 E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1", "port", Action.GIVE_UP),
        ("The model output does not match the expected format", "parse-failure", Action.COUNT),
    ],
)
def test_lines_that_mean_something(line: str, kind: str, action: Action) -> None:
    finding = classify(line)
    assert finding is not None
    assert (finding.kind, finding.action) == (kind, action)


@pytest.mark.parametrize(
    "line", ["", "prompt eval time = 1 ms", "model loaded", "no errors", "CUDA0: 24 GiB"]
)
def test_lines_that_do_not(line: str) -> None:
    assert classify(line) is None


@given(st.text())
def test_any_line_can_be_classified(line: str) -> None:
    classify(line)


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        (
            'fn:cache:refused {"code":2,"reason":"150 slots need 9 bytes, 5 are free","n_slots":150}',
            "cache-refused",
            "the expert cache cannot be had: 150 slots need 9 bytes, 5 are free",
        ),
        (
            'fn:mtp:refused {"reason":"the head is 128 wide, the model 256","reasons":["width"]}',
            "mtp-refused",
            "the draft head and the model do not go together: the head is 128 wide, the model 256",
        ),
        (
            'fn:host:refused {"tensor":"blk.0.ffn_up_exps.weight","bytes":9,"reason":"cannot be pinned"}',
            "host-refused",
            "the experts cannot be held as the profile places them: cannot be pinned",
        ),
        (
            'fn:phase:refused {"wrong":["batch (-b) is 1024, expected 4096","embeddings are on"]}',
            "phase-refused",
            "the settings are not those of the memory transaction: "
            "batch (-b) is 1024, expected 4096; embeddings are on",
        ),
        ('fn:new:refused {"n":1}', "new-refused", 'the native code refuses (new): {"n": 1}'),
    ],
)
def test_refusals_in_the_markers_own_words(line: str, kind: str, text: str) -> None:
    marker = markers.parse(line)
    assert marker is not None
    finding = refusal(marker)
    assert finding is not None and failure(marker) is None
    assert (finding.kind, finding.action, finding.text) == (kind, Action.GIVE_UP, text)
    assert Trouble(finding.kind, finding.text).final


LEAN = (
    'fn:lean:attached {"chunk":4096,"requested":"auto","lent":true,"tried":['
    '{"chunk":8192,"lent":false,"fits":false,"why":"CUDA0: 9 bytes left"},'
    '{"chunk":8192,"lent":true,"fits":false,"why":"CUDA1: 7 bytes left"},'
    '{"chunk":4096,"lent":true,"fits":true}]}'
)


def test_the_chunk_of_lean_prefill_is_told_with_what_did_not_fit() -> None:
    marker = markers.parse(LEAN)
    assert marker is not None
    assert chunk.told(marker.data) == (
        "chunk 4,096 (auto), staged in lent slots; did not fit: "
        "8,192 (CUDA0: 9 bytes left); 8,192 lent (CUDA1: 7 bytes left)"
    )
    first = {"chunk": 2048, "requested": 2048, "lent": False, "tried": [{"chunk": 2048, "fits": True}]}
    assert (
        chunk.told(first) == "chunk 2,048 (as asked), staged in memory of its own; the first that was tried"
    )


@given(st.dictionaries(st.sampled_from(["chunk", "requested", "lent", "tried"]), JUNK))
def test_any_marker_of_lean_prefill_is_told(data: dict[str, object]) -> None:
    assert chunk.told(data).startswith("chunk ")


def test_failed_transition_is_a_reason_to_restart() -> None:
    marker = markers.parse('fn:phase:failed {"check":"quiesce","detail":"fault","begins":0,"ends":0}')
    assert marker is not None
    finding = failure(marker)
    assert finding is not None and refusal(marker) is None
    assert (finding.kind, finding.action) == ("phase-failed", Action.RESTART)
    assert finding.text == "the memory transaction failed: quiesce: fault"
    assert not Trouble(finding.kind, finding.text).final
    assert ending(PHASE_FAILED).endswith("transition of the memory transaction (exit code 75)")


def test_a_virtual_gpu_that_refuses_memory_is_no_refusal_of_the_server() -> None:
    marker = markers.parse('fn:vgpu:refused {"name":"VGPU0","asked_bytes":9,"free_bytes":5}')
    assert marker is not None and refusal(marker) is None


def test_polls_leave_more_than_a_second_while_somebody_waits() -> None:
    assert prober.EVERY_SLOTS_BUSY_S > 1.5, "llama-server's wait for a result is one second"


def test_endings_have_four_texts() -> None:
    texts = {n: ending(-n) for n in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)}
    assert len({t.partition(" (")[0] for t in texts.values()}) == 4
    assert "134" in texts[signal.SIGABRT] and "137" in texts[signal.SIGKILL]
    assert "139" in texts[signal.SIGSEGV] and "143" in texts[signal.SIGTERM]
    assert ending(134) == ending(-6)
    assert ending(1) == "gave up with code 1"


@pytest.mark.parametrize(
    ("text", "tokens", "bad"),
    [
        ("////////////", (), True),
        ("abababababababab", (), True),
        ("", (), True),
        ("   \n", (), True),
        ("x", [7] * 24, True),
        ("x", [7, 8] * 12, True),
        ("The harbour smelled of tar.", (), False),
        ("ok", (), False),
        ("???", list(range(24)), False),
    ],
)
def test_degenerate_text(text: str, tokens: list[int], bad: bool) -> None:
    assert (degenerate(text, tokens) is not None) is bad


@given(st.text(), st.lists(st.integers(), max_size=50))
def test_any_text_gets_a_verdict(text: str, tokens: list[int]) -> None:
    degenerate(text, tokens)


def test_judge_names_status_and_text() -> None:
    assert prober.judge("x", Reply(500, "boom", None)) == prober.CheckFailed(
        "x", "a completion was answered with 500: boom", insane=False
    )
    bad = prober.judge("x", Reply(200, "", {"content": "//////////"}))
    assert isinstance(bad, prober.CheckFailed) and bad.insane


def test_slots_are_condensed_and_tolerant() -> None:
    slot = {
        "id_task": 5,
        "is_processing": True,
        "n_prompt_tokens": 100,
        "n_prompt_tokens_processed": 40,
        "n_prompt_tokens_cache": 10,
        "next_token": [{"n_decoded": 3}],
    }
    slots = prober.read_slots([slot, "junk", {}])
    assert (slots.busy, slots.read, slots.written) == (True, 50, 3)
    assert (
        prober.read_slots([{**slot, "next_token": [{"n_decoded": 4}]}]).mark != prober.read_slots([slot]).mark
    )


@pytest.mark.parametrize("old", State)
def test_only_listed_ways_exist(old: State) -> None:
    for new in State:
        if new in TRANSITIONS[old]:
            check_transition(old, new)
        else:
            with pytest.raises(AssertionError, match="no way"):
                check_transition(old, new)


def test_every_state_can_be_reached_and_every_live_state_can_stop() -> None:
    assert set().union(*TRANSITIONS.values()) == set(State)
    live = set(State) - {State.STOPPED, State.FATAL, State.STOPPING}
    assert all(State.STOPPING in TRANSITIONS[s] for s in live)


def test_acceptance_forgets_slowly() -> None:
    account = timings.Drafts()
    for _ in range(10):
        account = account.add(timings.Acceptance(100, 100))
    for _ in range(20):
        account = account.add(timings.Acceptance(0, 100))
    assert account.rate < 0.2
    assert timings.DRAFTS_ENOUGH <= account.drafted <= 2 * timings.DRAFTS_ENOUGH
    assert timings.Drafts().rate == 0.0


def test_acceptance_line_of_the_pin() -> None:
    line = "id  0 | draft acceptance = 0.57576 (   19 accepted /    33 generated), mean len =  2.73"
    assert timings.parse(line) == timings.Acceptance(19, 33)
    assert timings.parse("draft acceptance rate unknown") is None


def test_progress_line_of_the_pin() -> None:
    line = "prompt processing, n_tokens =   4096, progress = 0.46, t =   4.10 s / 999.02 tokens per second"
    progress = timings.parse(line)
    assert progress == timings.PromptProgress(0.46, 4096, 999.02)
    assert isinstance(progress, timings.PromptProgress)
    assert progress.tokens(cached=0) == 8904 and progress.left_s(0) == pytest.approx(4.81, abs=0.01)
    assert progress.tokens(cached=504) == 10_000, "what was cached is read, too"
    assert timings.PromptProgress(0.0, 0, 0.0).left_s(0) == 0.0


METRICS = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 400
llamacpp:prompt_seconds_total 2
llamacpp:tokens_predicted_total 90
llamacpp:tokens_predicted_seconds_total 3
llamacpp:kv_cache_usage_ratio nan
fn_expert_cache_hits_total{device="RPC0"} 60
fn_expert_cache_hits_total{device="RPC1"} 15
fn_expert_cache_misses_total{device="RPC0"} 25
llamacpp:spec_decode_num_draft_tokens_total 10
llamacpp:spec_decode_num_accepted_tokens_total 8
process_open_fds 12
junk
"""


def test_metrics_are_summed_over_devices_and_told_in_words() -> None:
    found = metrics.parse(METRICS)
    assert found["fn_expert_cache_hits_total"] == 75
    assert "process_open_fds" not in found and "llamacpp:kv_cache_usage_ratio" not in found
    words = ["prompts 200 t/s", "answers 30.0 t/s", "cache hits 75.0%", "acceptance 80.0%"]
    assert metrics.summary(found) == words
    assert metrics.summary({}) == []


@given(st.text())
def test_any_text_is_metrics_or_nothing(text: str) -> None:
    metrics.parse(text)


def test_log_is_capped_and_keeps_the_last_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "l.log", cap_bytes=10_000)
    for number in range(5000):
        log.write("server", [f"line {number}"])
    log.close()
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert size <= 20_000
    assert log.tail(1) == ["server| line 4999"] and len(log.tail()) == 100
    assert "line 4999" in (tmp_path / "l.log").read_text()


def test_a_log_that_cannot_be_written_loses_lines_only(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "l.log")
    log.close()
    log.write("server", ["a", "b"])
    assert log.lost == 2 and log.tail() == ["server| a", "server| b"]


def test_full_disk_does_not_raise() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    log = LogFile(full)
    log.write("server", ["a"])
    assert log.lost == 1


def test_flags_of_a_help_text() -> None:
    flags = known_flags((FAKES / "llama_server_help.txt").read_text())
    assert {"--model", "-m", "--no-repack", "--fit", "--spec-draft-n-max", "--no-webui"} <= flags
    assert not {"--draft-max", "--draft"} & flags, "removed ones are not known"
