"""The report: what is in it, and that planted secrets are not."""

from __future__ import annotations

import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashnext import services
from flashnext.cli import report as report_verb
from flashnext.errors import ReportWriteError
from flashnext.report import collect
from flashnext.report.redact import Redactor, for_this_machine

KEY = "sesame-open-4711"
SECRETS = {
    "key": KEY,
    "prompt": "my diagnosis is gout",
    "user": "wilhelmina",
    "other user": "ottokar",
    "host": "ministry-box",
    "mail": "w.secret@example.org",
    "token": "hf_abcdefghijklmnop",
    "password": "hunter2hunter2",
    "answer": "you should see a doctor",
}
LOG = f"""vgpu0| fn:vgpu:listening {{"host": "127.0.0.1", "port": 50836, "note": "{SECRETS["prompt"]}"}}
server| 0.00.092.444 I srv    load_model: loading model '/home/{SECRETS["other user"]}/models/x.gguf'
server| 0.01.092.444 I srv    load_model: loading model '/home/{SECRETS["user"]}/models/y.gguf'
server| 0.02.000.001 I slot print_timing: id  0 | task 7 | n_decoded = 12, tg = 34.30 t/s
server| 0.02.100.001 D srv  log_server_r: request:  {{"prompt": "{SECRETS["prompt"]}"}}
server| 0.02.100.002 D srv  log_server_r: response: {SECRETS["answer"]}
server| 0.02.200.001 W srv    operator(): got exception: the output '{SECRETS["answer"]}' is not valid
server| 0.02.200.002 W srv  update_chat_: does not match the expected format: {SECRETS["answer"]}
server| 0.02.300.001 W srv  middleware: Invalid key, Authorization: Bearer {KEY}
server| 0.02.300.002 I srv  fetch: from http://{SECRETS["user"]}:{SECRETS["password"]}@{SECRETS["host"]}/x
server| 0.02.300.003 I srv  info: {SECRETS["mail"]} uses {SECRETS["token"]}
server| {SECRETS["prompt"]}, said {SECRETS["user"]}
server| error: {SECRETS["prompt"]}
{SECRETS["answer"]}
server| CUDA error: out of memory
server| fn:phase:failed {{"check":"generation","expected":3,"found":4}}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with one past service, and secrets wherever a person or a server may leave them."""
    home = tmp_path / SECRETS["user"]
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.setenv("USER", SECRETS["user"])
    monkeypatch.setenv("LOGNAME", SECRETS["user"])
    monkeypatch.setenv("LLAMA_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", SECRETS["token"])
    monkeypatch.setattr("socket.gethostname", lambda: SECRETS["host"])
    keys = home / "keys.txt"
    keys.parent.mkdir(parents=True)
    keys.write_text(f"# mine\n{KEY}\n")
    log = home / "serve.log"
    log.write_text(LOG)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    reason = f"degenerate text: '{SECRETS['answer']}'"
    service = services.Service(
        profile="demo",
        kind="demo",
        profile_file=str(home / "my.yaml"),
        port=8123,
        url=f"http://{SECRETS['host']}:8123",
        state="fatal",
        reason=reason,
        started=at,
        supervisor=services.Process(name="flashnext", pid=2**22 + 1, started=1.0),
        transitions=(services.Transition(at=at, state="fatal", reason=reason),),
        argv=("llama-server", "--api-key-file", str(keys), "--model", str(home / "m.gguf")),
        last_lines=tuple(LOG.splitlines()),
        log=str(log),
    )
    file = services.state_file(8123)
    file.parent.mkdir(parents=True)
    file.write_text(service.model_dump_json())
    return home


def read(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        found = {}
        for member in tar.getmembers():
            assert (member.uname, member.gname, member.uid) == ("", "", 0)
            stream = tar.extractfile(member)
            assert stream is not None
            found[member.name.removeprefix("flashnext-report/")] = stream.read().decode()
        return found


def test_planted_secrets_do_not_appear(machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.tar.gz"
    done = CliRunner().invoke(report_verb.app, ["--out", str(out)])
    assert done.exit_code == 0, done.output
    found = read(out)
    assert set(found) == {
        "versions.json",
        "builds.json",
        "profile.json",
        "plan.json",
        "doctor.json",
        "services/8123/state.json",
        "services/8123/log.txt",
    }
    for name, text in found.items():
        for kind, secret in SECRETS.items():
            assert secret not in text, f"{kind} in {name}"
            assert secret.split()[0] not in text.split() or kind in ("prompt", "answer"), f"{kind} in {name}"
    # and yet it says what a developer asks for
    log = found["services/8123/log.txt"]
    assert "print_timing: id  0 | task 7 | n_decoded = 12, tg = 34.30 t/s" in log
    assert "CUDA error: out of memory" in log
    assert '"check": "generation", "expected": 3' in log
    assert "loading model '~/models/y.gguf'" in log or "loading model '/home/USER/models/y.gguf'" in log
    assert "(3 lines of unknown shape left out" in log
    state = json.loads(found["services/8123/state.json"])
    assert (state["state"], state["reason"]) == ("fatal", "degenerate text:")
    assert state["argv"][-1].startswith("~") and "LLAMA_API_KEY" in found["doctor.json"]
    assert json.loads(found["versions.json"])["pin"]


def test_an_existing_file_is_not_replaced(machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.tar.gz"
    out.write_text("mine")
    with pytest.raises(ReportWriteError):
        collect.write(out, {"a": "b"})
    assert out.read_text() == "mine"


def test_a_piece_that_cannot_be_made_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(collect.builds, "list_builds", broken)
    from flashnext.profile.load import load

    found = collect.pieces(load("demo"), None, None)
    assert json.loads(found["builds.json"]) == {"not made": "OSError", "reason": "no such thing"}


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1, max_size=60))
def test_free_text_is_never_a_log_line(text: str) -> None:
    """Whatever a client says, on a line of its own or after the words that a server puts in front."""
    spoken = f"zz{text}zz"
    redactor = Redactor(())
    lines = [spoken, f"server| {spoken}", f"server| 0.01.002.003 D srv  log: request: {spoken}"]
    assert not any(spoken in line for line in redactor.log(lines))


@given(st.text(min_size=4, max_size=40).filter(lambda key: key.strip() == key and "KEY".find(key) < 0))
def test_a_known_key_is_replaced_wherever_it_stands(key: str) -> None:
    redactor = for_this_machine([key], env={"HOME": "/", "USER": ""})
    assert key not in redactor.text(f'{{"a": "{key}", "b": "x{key}y"}}').replace("KEY", "")


def test_a_key_that_json_escapes_is_replaced_too() -> None:
    redactor = for_this_machine(['se"sä\\me'], env={"HOME": "/", "USER": ""})
    assert redactor.text(json.dumps({"a": 'se"sä\\me'})) == '{"a": "KEY"}'
