"""Arms from profiles and from commands."""

from pathlib import Path

import pytest
import yaml

from flashnext import builds
from flashnext.bench import checks
from flashnext.bench.arms import Arm, from_commands, from_profile, kill_switches, timed
from flashnext.errors import ArmUnknownError
from flashnext.model.memory import layer_devices
from flashnext.profile.load import load


class Installed:
    """As much of a build as the arms ask for."""

    def __init__(self, *features: str) -> None:
        self.features = dict.fromkeys(features, "")


@pytest.fixture
def abc(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed build ``abc`` that lacks topk, and a vanilla one."""
    known = {"abc": Installed("tiled-qsa", "phase-prefill"), "vanilla": Installed()}
    monkeypatch.setattr(builds, "get_build", known.__getitem__)


@pytest.mark.usefixtures("abc")
def test_the_qualified_profile_gives_arms_that_load_again(tmp_path: Path) -> None:
    names = ["candidate", "control", "bypass", "vanilla", "without:expert-cache", "without:topk"]
    made = from_profile("2x3090", names, tmp_path, named={"without:topk": "abc"})
    assert made.context == 261888
    assert not list(tmp_path.iterdir()), "planning writes nothing"
    made.write()
    profiles = {a.name: load(str(a.profile)).profile for a in made.arms}
    assert profiles["candidate"] == load("2x3090").profile
    assert profiles["control"].phase_prefill is None and profiles["control"].expert_cache is not None
    assert profiles["bypass"].phase_prefill.mode == "bypass"  # type: ignore[union-attr]
    vanilla = profiles["vanilla"]
    assert (vanilla.expert_cache, vanilla.mtp, vanilla.phase_prefill) == (None, None, None)
    assert not vanilla.load.pin_host and {r.memory for r in vanilla.placement} == {"host"}
    assert profiles["without:expert-cache"].expert_cache is None
    assert profiles["without:expert-cache"].phase_prefill is None
    assert profiles["without:topk"].phase_prefill is not None
    assert {a.name: a.build for a in made.arms}["without:topk"] == "abc"
    assert all(p.kind == "experimental" for n, p in profiles.items() if n != "candidate")


def test_lean_prefill_and_the_transaction_are_arms_of_one_run(tmp_path: Path) -> None:
    made = from_profile("bench-1gpu-lean", ["control", "candidate", "transaction"], tmp_path)
    made.write()
    control, candidate, transaction = (load(str(a.profile)).profile for a in made.arms)
    assert (control.lean_prefill, control.phase_prefill) == (None, None)
    assert candidate.lean_prefill is not None and candidate.phase_prefill is None
    assert transaction.lean_prefill is None
    assert transaction.phase_prefill is not None and transaction.phase_prefill.mode == "transaction"
    assert [a.min_tokens for a in made.arms] == [None, None, 2048]


def test_the_bench_model_on_two_cards_differs_in_devices_alone(tmp_path: Path) -> None:
    one, two = (load(name).profile.model_dump() for name in ("bench-1gpu-lean", "bench-2gpu-lean"))
    assert {key for key in one if one[key] != two[key]} == {"name", "summary", "devices", "mtp"}
    assert {key for key in one["mtp"] if one["mtp"][key] != two["mtp"][key]} == {"device"}
    made = from_profile("bench-2gpu-lean", ["control", "candidate", "transaction"], tmp_path)
    made.write()
    for arm in made.arms:
        devices = load(str(arm.profile)).profile.devices
        assert (devices.count, devices.split) == (2, (11, 15))
        assert layer_devices(12, devices.split or ()) == [0] * 6 + [1] * 7, "the last one is the output"


def test_what_an_arm_must_look_like_from_outside(tmp_path: Path) -> None:
    made = from_profile("2x3090", ["control", "candidate"], tmp_path)
    control, candidate = made.arms
    assert candidate.environment["LLAMA_PHASE_PREFILL_UBATCH"] == "2048"
    assert candidate.environment["LLAMA_PHASE_PREFILL_REHEARSE"] == "1", "of the supervisor's ready check"
    assert not any(name.startswith("LLAMA_PHASE") for name in control.environment)
    assert (control.min_tokens, candidate.min_tokens) == (None, 2048)
    assert (control.facts["prefill_micro_batch"], candidate.facts["prefill_micro_batch"]) == (512, 2048)
    assert made.remarks == ()


def test_arms_stay_on_loopback_without_a_key(tmp_path: Path) -> None:
    data = yaml.safe_load(Path(load("demo").file).read_text())
    data["server"] |= {"host": "0.0.0.0", "api_key_file": "/etc/keys", "control_port": 8081}
    path = tmp_path / "open.yaml"
    path.write_text(yaml.safe_dump(data))
    made = from_profile(str(path), ["control", "candidate"], tmp_path / "arms")
    made.write()
    for arm in made.arms:
        server = load(str(arm.profile)).profile.server
        assert (server.host, server.api_key_file, server.control_port) == ("127.0.0.1", None, None)


def test_a_profile_without_the_transaction_is_called_a_comparison_with_itself(tmp_path: Path) -> None:
    text = Path(load("demo").file).read_text()
    data = {k: v for k, v in yaml.safe_load(text).items() if k != "phase_prefill"}
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(data))
    made = from_profile(str(path), ["control", "candidate"], tmp_path / "arms")
    assert "no transaction" in made.remarks[0]


@pytest.mark.parametrize("arm", ["fastest", "ubatch:9000", "ubatch:x", "without:fn-vgpu", "without:nothing"])
def test_unknown_arms_are_refused(tmp_path: Path, arm: str) -> None:
    with pytest.raises(ArmUnknownError, match=arm.partition(":")[2] or arm) as caught:
        from_profile("demo", [arm], tmp_path)
    if arm == "fastest":
        for known in (
            "candidate",
            "control",
            "transaction",
            "bypass",
            "vanilla",
            "resident",
            "ubatch:",
            "without:",
        ):
            assert known in caught.value.advice


def test_a_build_for_no_arm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArmUnknownError, match="vanila"):
        from_profile("demo", ["vanilla"], tmp_path, named={"vanila": "abc"})


@pytest.mark.usefixtures("abc")
def test_features_that_no_profile_turns_off_are_turned_off_by_their_switch(tmp_path: Path) -> None:
    made = from_profile("demo", ["control", "vanilla", "without:topk"], tmp_path)
    off = {a.name: dict(a.switches) for a in made.arms}
    assert off["control"] == {} and off["without:topk"] == {"FN_TOPK": "0"}
    assert off["vanilla"] == {name: "0" for name in kill_switches().values()}
    assert {"FN_TOPK", "FN_TILED_QSA"} <= set(off["vanilla"])
    assert all(a.direct for a in made.arms), "the supervisor passes no such variable on"
    assert made.arms[2].environment["FN_TOPK"] == "0"
    alone = from_profile("2x3090", ["candidate", "without:topk"], tmp_path).arms[0]
    assert "LLAMA_PHASE_PREFILL_REHEARSE" not in alone.environment, "nobody would take the rehearsal"
    named = from_profile(
        "demo", ["vanilla", "without:topk"], tmp_path, named={"vanilla": "vanilla", "without:topk": "abc"}
    )
    assert [dict(a.switches) for a in named.arms] == [{}, {}]
    assert not from_profile("demo", ["control", "candidate"], tmp_path).arms[0].direct


def test_an_arm_whose_prompts_are_timed(tmp_path: Path) -> None:
    """Without the supervisor, which would take the rehearsal and passes no switch on."""
    arm = timed(from_profile("2x3090", ["candidate"], tmp_path).arms[0])
    assert arm.direct and arm.switches == {"FN_PREFILL_TIMES": "1"}
    assert arm.environment["FN_PREFILL_TIMES"] == "1"
    assert "LLAMA_PHASE_PREFILL_UBATCH" in arm.environment
    assert "LLAMA_PHASE_PREFILL_REHEARSE" not in arm.environment
    command = timed(from_commands(["a=FN_TOPK=0 server {port}"]).arms[0])
    assert not command.direct and command.environment == {"FN_TOPK": "0", "FN_PREFILL_TIMES": "1"}
    url = from_commands(["a=http://127.0.0.1:1"]).arms[0]
    assert timed(url) == url


def test_a_profile_with_lean_prefill_uploads_once_per_chunk(tmp_path: Path) -> None:
    made = from_profile("bench-1gpu-lean", ["control", "candidate", "resident"], tmp_path)
    made.write()
    assert [a.facts["prefill_micro_batch"] for a in made.arms] == [512, 8192, 8192]
    assert [a.min_tokens for a in made.arms] == [None, None, None], "there is no transaction to count"
    profiles = [load(str(a.profile)).profile for a in made.arms]
    assert [p.lean_prefill is not None for p in profiles] == [False, True, False]
    assert profiles[2].context.micro_batch == 8192
    text = Path(load("bench-1gpu-lean").file).read_text().replace("chunk: 8192", "chunk: auto")
    path = tmp_path / "auto.yaml"
    path.write_text(text)
    assert from_profile(str(path), ["candidate"], tmp_path).arms[0].facts["prefill_micro_batch"] is None


def test_the_resident_arm_has_its_experts_on_the_devices_and_no_limit(tmp_path: Path) -> None:
    made = from_profile("bench-1gpu", ["candidate", "ubatch:2048", "resident"], tmp_path)
    made.write()
    candidate, larger, resident = made.arms
    profile = load(str(resident.profile)).profile
    assert [r.tensors for r in profile.placement] == ["per_layer_token_embd\\.weight"]
    assert (profile.expert_cache, profile.mtp, profile.phase_prefill) == (None, None, None)
    assert profile.context.micro_batch == 2048
    assert candidate.limited and not resident.limited
    assert "without a limit" in made.remarks[0]
    larger_profile = load(str(larger.profile)).profile
    assert larger_profile.context.micro_batch == 2048 and larger_profile.phase_prefill is None
    assert larger_profile.expert_cache is not None and larger.min_tokens is None


def test_commands_take_their_environment_and_their_port() -> None:
    made = from_commands(
        ["a=LLAMA_X=1 FN_BENCH_MIN_TOKENS=9 srv --port {port} 'b c'", "b=http://127.0.0.1:1/"]
    )
    first, second = made.arms
    assert first.environment == {"LLAMA_X": "1"}
    assert first.min_tokens == 9
    assert first.command == "srv --port '{port}' 'b c'"
    phase = "a=LLAMA_PHASE_PREFILL_UBATCH=2048 LLAMA_PHASE_PREFILL_MIN_TOKENS=2048 srv {port}"
    assert from_commands([phase]).arms[0].min_tokens == 2048
    assert second.url == "http://127.0.0.1:1"
    for bad in (
        "srv --port {port}", "a=", "a=srv --port 80", "a=srv 'open {port}",
        "a=FN_BENCH_MIN_TOKENS=few srv {port}", "a=http://127.0.0.1:port", "a=http://",
    ):  # fmt: skip
        with pytest.raises(ArmUnknownError):
            from_commands([bad])


def test_the_environment_of_a_process_is_read_and_compared() -> None:
    arm = Arm("x", command="srv", environment={"LLAMA_A": "1", "OTHER": "2"})
    assert checks.environment_problems(arm, {"LLAMA_A": "1", "CUDA_VISIBLE_DEVICES": "0"}) == []
    problems = checks.environment_problems(arm, {"LLAMA_A": "2", "GGML_B": "3"})
    assert problems == ["LLAMA_A is '2', must be '1'", "GGML_B='3' must not be set"]


def test_a_log_is_scanned_behind_the_supervisors_prefix() -> None:
    found = checks.scan(
        [
            'server| fn:phase:begin {"release_ms": 2, "reserve_ms": 3.5}\n',
            "server| srv  update_slots: all slots are idle\n",
            'server| fn:phase:end {"total_ms": 4, "restore_ms": 3}\n',
            'fn:phase:begin {"ms": 1}\n',
            "server| CUDA error: an illegal memory access was encountered\n",
        ]
    )
    assert (found.begins, found.ends) == (2, 1)
    assert found.transitions[0]["total_ms"] == 9.5
    assert found.transitions[0]["parts_ms"] == {"begin.release": 2, "begin.reserve": 3.5, "end.restore": 3}
    assert len(found.problems) == 1


def test_a_marker_with_its_total_and_its_parts_is_not_counted_twice() -> None:
    begin = (
        '{"n_tokens":8192,"mode":"transaction","ms":9.0,"quiesce_ms":1.0,"release_ms":5.0,"reserve_ms":2.5}'
    )
    end = '{"n_tokens":8192,"mode":"transaction","ms":4.0,"restore_ms":3.0,"bytes":77,"generation":3}'
    lines = [
        'server| fn:phase:decided {"id_task":1,"n_tokens":8192,"n_cached":0,"min_tokens":2048,"begin":true}',
        f"server| fn:phase:begin {begin}",
        f"server| fn:phase:end {end}",
    ]
    found = checks.scan(lines)
    assert (found.begins, found.ends, found.problems) == (1, 1, [])
    transition = found.transitions[0]
    assert (transition["total_ms"], transition["begin_ms"], transition["end_ms"]) == (13.0, 9.0, 4.0)
    assert transition["parts_ms"]["begin.release"] == 5.0
    assert transition["end"]["bytes"] == 77


def test_begins_ends_and_prompts_must_agree() -> None:
    scan = checks.Scan(begins=2, ends=2)
    arm = Arm("x", min_tokens=100)
    assert checks.count_problems(arm, scan, [100, 99, 250]) == []
    assert checks.count_problems(arm, scan, [100]) == ["2 begins, 1 prompts that should have had one"]
    assert checks.count_problems(arm, scan, [100], exact=False) == []
    assert checks.count_problems(Arm("y"), scan, [100]) != []
    assert checks.count_problems(arm, checks.Scan(begins=1), [100]) == ["1 begins, 0 ends"]
