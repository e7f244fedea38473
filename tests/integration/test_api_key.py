"""The API key: from a file, carried by our own probes, demanded of clients, and never shown anywhere."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
from serve_home import FakeHome, free_port, until

from flashnext.loopback import request

pytestmark = pytest.mark.timeout(90)

KEY = "sesame-4711-open"


def key_file(home: FakeHome, text: str, mode: int = 0o600) -> Path:
    file = home.root / "keys"
    file.write_bytes(text.encode())
    file.chmod(mode)
    return file


def test_own_probes_carry_the_key_and_nobody_shows_it(home: FakeHome) -> None:
    keys = key_file(home, f"# keys of the house\n\n{KEY}\nanother-key-0815\n")
    # the log as a talkative server would write it
    home.behave({"busy": False, "lines": [[0.2, "srv  start: api_keys: 2 keys loaded"]]})
    profile = home.profile(server={"api_key_file": str(keys)}, life={"text_check_s": 1})
    running = home.serve("--verbose", profile=profile)
    state = running.until_state("ready")
    server, control = (("127.0.0.1", p) for p in (running.port, int(state["control"].rpartition(":")[2])))

    assert request(server, "/slots").status == 401, "clients have to know it"
    assert request(server, "/completion", body={"prompt": "x"}).status == 401
    assert request(server, "/slots", key="another-key-0815").status == 200, "every line is a key"
    until(lambda: "busy" in running.state()["counters"], "an answer about the slots")
    assert running.state()["state"] == "ready" and not running.state()["warnings"]

    shown = [request(control, path).text for path in ("/status", "/metrics", "/logs", "/readyz", "/")]
    for verb in (["status"], ["status", "--json"], ["logs"], ["doctor", "--profile", str(profile), "--json"]):
        done = home.run(*verb)
        shown += [done.stdout, done.stderr]
    report = home.root / "report.tar.gz"
    done = home.run("report", "--profile", str(profile), "--out", str(report))
    assert done.returncode == 0, done.stderr
    with tarfile.open(report) as archive:
        members = [m for m in archive.getmembers() if m.isfile()]
        shown += [archive.extractfile(m).read().decode() for m in members]  # type: ignore[union-attr]
    printed = home.run("serve", "--profile", str(profile), "--print-command")
    assert f"--api-key-file {keys}" in printed.stdout
    shown += [printed.stdout, home.run("service", "show", "--profile", str(profile), "--user").stdout]
    running.signal(15)
    running.end()
    shown += [running.out, running.err, json.dumps(home.launches("server")), json.dumps(running.state())]
    shown += [f.read_text() for f in (home.root / "state").rglob("*") if f.is_file()]
    assert len(shown) > 25 and not [text for text in shown if "sesame" in text or "key-0815" in text]


def test_a_file_that_others_can_read_is_a_warning(home: FakeHome) -> None:
    keys = key_file(home, f"{KEY}\n", mode=0o644)
    running = home.serve(profile=home.profile(server={"api_key_file": str(keys)}))
    (warning,) = running.until_state("ready")["warnings"]
    assert warning == f"{keys} can be read by every user of this machine: chmod 600 {keys}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the API key file has no key"),
        ("# only a comment\n\n", "the API key file has no key"),
        (f"{KEY}\r\n", ":1: a key is printable ASCII without blanks"),
        (f"{KEY}\nsesame two\n sesame-3\nsésame\n", ":2: a key is .*:3: a key is .*:4: a key is "),
    ],
)
def test_files_whose_keys_no_client_could_send(home: FakeHome, text: str, words: str) -> None:
    keys = key_file(home, text)
    running = home.serve(profile=home.profile(server={"api_key_file": str(keys)}))
    assert running.end() == 3
    assert "error[profile-invalid]" in running.err and re.search(words, running.err, re.DOTALL)
    assert "sesame" not in running.err and home.launches("vgpu") == []


def test_a_file_that_is_not_there(home: FakeHome) -> None:
    running = home.serve(profile=home.profile(server={"api_key_file": str(home.root / "none")}))
    assert running.end() == 3
    assert "the API key file cannot be read" in running.err and "test.yaml:" in running.err


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.org", "0", "127.1", ""])
def test_a_host_beyond_loopback_needs_a_key_file(home: FakeHome, host: str) -> None:
    done = home.run(
        "serve", "--profile", str(home.profile(server={"host": host})), "--port", str(free_port())
    )
    assert done.returncode == 3, done.stderr
    assert "server.host" in done.stderr
    assert home.launches("vgpu") == []


def test_bound_to_all_with_a_key_file_our_probes_stay_on_loopback(home: FakeHome) -> None:
    keys = key_file(home, f"{KEY}\n")
    profile = home.profile(server={"host": "0.0.0.0", "api_key_file": str(keys)})
    running = home.serve(profile=profile)
    running.until_state("ready")
    argv = home.launches("server")[0]["argv"]
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
