"""The pinned sdist comes from the index that pip uses, whole and verified, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import package_index
import pytest
from package_index import Index
from upstream import Ran, Upstream, refused, run_cli

from flashnext import net
from flashnext.build import fetch, index, tree

Check = Callable[..., Ran]


@pytest.fixture
def real_pip() -> None:
    """For the tests of what pip says: its own process is asked (a third of a second each time)."""


@pytest.fixture(autouse=True)
def pip_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No pip setting and no proxy of the machine's."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_TIMEOUT", "5")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(net, "_FIRST_PAUSE_S", 0.01)
    if "real_pip" not in request.fixturenames:
        monkeypatch.setattr(index, "ask_pip", _settings_of_the_environment)


def _settings_of_the_environment() -> index.PipSettings:
    return index.PipSettings(
        index_url=os.environ["PIP_INDEX_URL"],
        extra_index_urls=tuple(os.environ.get("PIP_EXTRA_INDEX_URL", "").split()),
        find_links=(),
        no_index=False,
        cert=None,
        client_cert=None,
        proxy="",
        timeout=float(os.environ["PIP_TIMEOUT"]),
        retries=int(os.environ["PIP_RETRIES"]),
        trusted_hosts=(),
    )


@pytest.fixture
def server(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with package_index.serve(Index(upstream.sdist, upstream.pin.sha256)) as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@pytest.fixture
def check(upstream: Upstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """`flashnext patch check`, which needs the source and so the sdist."""

    def run(*more: str) -> Ran:
        where = ["--patches", str(upstream.patches), "--pin", str(upstream.pin_file)]
        return run_cli(["patch", "check", *where, *more], capsys, monkeypatch)

    return run


def part(world: Upstream) -> Path:
    return fetch.cached_path(world.pin).with_name(world.sdist.name + ".part")


def nothing_used(world: Upstream) -> None:
    """Neither an sdist nor a source came of it."""
    assert not fetch.cached_path(world.pin).exists()
    assert not tree.pristine_path(world.pin).exists()


@pytest.mark.parametrize("form", ["json", "html"])
def test_fetched_once_and_verified(
    real_pip: None, upstream: Upstream, server: Index, check: Check, form: str
) -> None:
    server.form = form
    ran = check()
    assert ran.code == 0, ran
    assert "fetching small_llama-1.0.tar.gz" in ran.err
    assert fetch.cached_path(upstream.pin).read_bytes() == upstream.sdist.read_bytes()
    assert not part(upstream).exists()
    asked = len(server.log)
    assert check().code == 0
    assert fetch.fetch_sdist(upstream.pin) == fetch.cached_path(upstream.pin)
    assert len(server.log) == asked == 2


def test_an_index_without_hashes_is_fine(upstream: Upstream, server: Index, check: Check) -> None:
    server.offered_sha256 = ""
    assert check().code == 0


def test_a_cut_connection_is_resumed_at_once(upstream: Upstream, server: Index, check: Check) -> None:
    server.cut_after = [300, 400]
    assert check().code == 0
    assert [ranges for _, ranges in server.requests("/files/")] == [None, "bytes=300-", "bytes=700-"]


def test_a_cut_connection_is_resumed_by_the_next_command(
    upstream: Upstream, server: Index, check: Check
) -> None:
    server.cut_after, server.file_status = [300], [200, 503, 503, 200]
    said = refused(check(), code=5, id="http-status")
    assert "HTTP 503" in said
    assert part(upstream).stat().st_size == 300
    nothing_used(upstream)
    assert check().code == 0
    assert server.requests("/files/")[-1][1] == "bytes=300-"


def test_a_server_without_ranges_starts_anew(upstream: Upstream, server: Index, check: Check) -> None:
    server.cut_after, server.ranges = [300], False
    assert check().code == 0
    assert fetch.cached_path(upstream.pin).read_bytes() == upstream.sdist.read_bytes()


@pytest.mark.parametrize("size", [300, -1, 0, 5000])
def test_a_wrong_part_is_never_used(upstream: Upstream, server: Index, check: Check, size: int) -> None:
    """Bytes of something else, shorter than, as long as, or longer than the file."""
    length = upstream.pin.size_bytes
    wrong = {-1: length - 1, 0: length, 5000: length + 5000}.get(size, size)
    part(upstream).parent.mkdir(parents=True)
    part(upstream).write_bytes(b"x" * wrong)
    assert check().code == 0
    assert fetch.cached_path(upstream.pin).read_bytes() == upstream.sdist.read_bytes()


def test_wrong_content(upstream: Upstream, server: Index, check: Check) -> None:
    server.serve_other = bytes(upstream.pin.size_bytes)
    said = refused(check(), code=5, id="sdist-hash-mismatch")
    assert f"expected sha256 {upstream.pin.sha256}" in said
    assert "found    sha256 " in said
    nothing_used(upstream)
    assert not part(upstream).exists()


def test_content_that_does_not_end(upstream: Upstream, server: Index, check: Check) -> None:
    server.serve_other = bytes(upstream.pin.size_bytes + 1)
    refused(check(), code=5, id="sdist-size-mismatch")
    nothing_used(upstream)
    assert not part(upstream).exists()


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_a_truncated_file(
    upstream: Upstream, server: Index, check: Check, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """Asking for the rest is answered by 416: the tries end, however many there are."""
    monkeypatch.setenv("PIP_RETRIES", str(retries))
    server.truncate_to = 500
    said = refused(check(), code=5, id="sdist-truncated")
    assert f"expected {upstream.pin.size_bytes} bytes" in said
    nothing_used(upstream)


def test_the_index_offers_another_hash(upstream: Upstream, server: Index, check: Check) -> None:
    server.offered_sha256 = "0" * 64
    said = refused(check(), code=5, id="index-hash-mismatch")
    assert upstream.pin.sha256 in said
    assert server.requests("/files/") == []


def test_the_index_without_the_file(upstream: Upstream, server: Index, check: Check) -> None:
    server.lists_file = False
    said = refused(check(), code=5, id="index-without-file")
    assert "no small_llama-1.0.tar.gz" in said
    assert "1 other files are listed" in said


def test_the_index_without_the_project(upstream: Upstream, server: Index, check: Check) -> None:
    server.page_status = 404
    assert "no project small-llama" in refused(check(), code=5, id="index-without-file")
    assert len(server.log) == 1


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refused_file_is_not_asked_for_again(
    upstream: Upstream, server: Index, check: Check, status: int
) -> None:
    server.file_status = [status] * 9
    assert f"HTTP {status}" in refused(check(), code=5, id="http-status")
    assert len(server.requests("/files/")) == 1
    nothing_used(upstream)


def test_a_server_error_is_tried_again(upstream: Upstream, server: Index, check: Check) -> None:
    server.file_status = [500, 200]
    assert check().code == 0
    server.page_status = 500
    server.log.clear()
    part(upstream).with_suffix("").unlink()
    tree.pristine_path(upstream.pin).rename(upstream.root / "away")
    assert "HTTP 500" in refused(check(), code=5, id="http-status")
    assert len(server.log) == 2


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        ("application/vnd.pypi.simple.v1+json", "{"),
        ("application/vnd.pypi.simple.v1+json", '{"files": [{}]}'),
        ("application/vnd.pypi.simple.v1+json", "[]"),
        ("image/png", "x"),
    ],
)
def test_a_page_that_is_no_index(server: Index, check: Check, media_type: str, body: str) -> None:
    server.page_type, server.page_body = media_type, body
    refused(check(), code=5, id="index-unreadable")


def test_a_login_page_is_an_index_without_the_file(server: Index, check: Check) -> None:
    server.page_type, server.page_body = "text/html", "<html><a href=/login>log in</a></html>"
    refused(check(), code=5, id="index-without-file")


def test_no_network(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: refuses, and nobody else gets it
        monkeypatch.setenv(
            "PIP_INDEX_URL", f"http://someone:secret@127.0.0.1:{closed.getsockname()[1]}/simple"
        )
        said = refused(check(), code=5, id="index-unreachable")
    assert "127.0.0.1 cannot be reached" in said
    assert "--sdist FILE" in said
    assert "secret" not in said


def test_an_index_that_never_answers(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TIMEOUT", "0.2")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        assert "timed out" in refused(check(), code=5, id="index-unreachable")


def test_no_space_before_the_download(
    upstream: Upstream, server: Index, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = upstream.pin.size_bytes - 1

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    said = refused(check(), code=5, id="no-space")
    assert str(part(upstream).parent) in said
    assert server.requests("/files/") == []
    nothing_used(upstream)


def test_no_space_in_the_middle(upstream: Upstream, server: Index) -> None:
    """A file-size limit of the kernel's stands for the full disk: the write itself fails."""
    code = (
        "import resource, sys; from flashnext.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY)); main()"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "patch",
            "check",
            "--pin",
            upstream.pin_file,
            "--patches",
            upstream.patches,
        ],
        capture_output=True,
        text=True,
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 512
    refused(Ran(done.returncode, done.stdout, done.stderr), code=5, id="no-space")
    assert not part(upstream).exists()
    nothing_used(upstream)


def test_a_cache_that_cannot_be_written(check: Check, server: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    refused(check(), code=5, id="cache-not-writable")


def test_a_damaged_cached_sdist_is_fetched_again(upstream: Upstream, server: Index, check: Check) -> None:
    target = fetch.cached_path(upstream.pin)
    target.parent.mkdir(parents=True)
    target.write_bytes(upstream.sdist.read_bytes()[:-1])
    ran = check()
    assert ran.code == 0
    assert "the cached sdist is damaged" in ran.err
    assert target.read_bytes() == upstream.sdist.read_bytes()


def test_offline_with_sdist(upstream: Upstream, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    assert check("--sdist", str(upstream.sdist)).code == 0


@pytest.mark.parametrize(
    ("content", "id"),
    [(None, "sdist-not-found"), (b"short", "sdist-size-mismatch"), (b"same size", "sdist-hash-mismatch")],
)
def test_a_wrong_sdist_option(
    upstream: Upstream, check: Check, tmp_path: Path, content: bytes | None, id: str
) -> None:
    given = tmp_path / "given.tar.gz"
    if content is not None:
        given.write_bytes(content if content == b"short" else content.ljust(upstream.pin.size_bytes, b"."))
    assert str(given) in refused(check("--sdist", str(given)), code=5, id=id)
    nothing_used(upstream)


def test_a_folder_as_sdist(upstream: Upstream, check: Check, tmp_path: Path) -> None:
    refused(check("--sdist", str(tmp_path)), code=5, id="sdist-not-found")


def test_the_error_as_json(server: Index, check: Check) -> None:
    server.lists_file = False
    ran = check("--json")
    assert (ran.code, ran.error()["error"], ran.error()["exit_code"]) == (5, "index-without-file", 5)
    assert ran.error()["hint"]


def test_pips_configuration_file_names_the_index(
    real_pip: None,
    upstream: Upstream,
    server: Index,
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = {server.url}\nretries = 2\n")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.delenv("PIP_RETRIES")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert index.ask_pip().retries == 2
    assert check().code == 0
    assert len(server.requests("/simple/")) == 1


def test_without_a_setting_pips_own_default_is_asked_for(real_pip: None) -> None:
    assert not [name for name in os.environ if name.startswith("PIP_INDEX")]
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    default = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert index.ask_pip().indexes() == [default.stdout.strip()]


def test_the_extra_index_is_asked_too(
    real_pip: None, server: Index, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", server.url)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    assert check().code == 0


def test_every_failed_place_is_named(server: Index, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    server.lists_file = False
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:1/simple")
    said = refused(check(), code=5, id="index-unreachable")
    assert "also: the index has no small_llama-1.0.tar.gz" in said


def test_find_links_folder(
    real_pip: None, upstream: Upstream, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(upstream.sdist.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert check().code == 0


def test_no_index_and_nothing_found(
    real_pip: None, check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    refused(check(), code=5, id="index-without-file")


def test_an_index_that_is_a_folder(
    real_pip: None, upstream: Upstream, check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror" / "small-llama"
    mirror.mkdir(parents=True)
    upstream.sdist.rename(mirror / upstream.sdist.name)
    monkeypatch.setenv("PIP_INDEX_URL", mirror.parent.as_uri())
    assert check().code == 0


def test_user_name_and_password_of_the_index(
    real_pip: None, server: Index, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip does: also for the file, where it lies on the same host."""
    server.credentials = "me:secret"
    said = refused(check(), code=5, id="http-status")
    assert "HTTP 401" in said
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//me:secret@"))
    assert check().code == 0


def test_netrc(server: Index, check: Check, tmp_path: Path) -> None:
    server.credentials = "me:secret"
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert check().code == 0


def test_pips_proxy(
    real_pip: None, upstream: Upstream, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index whose name does not resolve is reached through the proxy that pip is given."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def answer() -> None:
            with contextlib.suppress(OSError):
                client, _ = proxy.accept()
                seen.append(client.recv(4096))
                client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                client.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        monkeypatch.setenv("PIP_PROXY", f"127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
        refused(check(), code=5, id="index-without-file")
        thread.join(5)
    assert seen[0].startswith(b"GET http://index.invalid/simple/small-llama/ HTTP/1.1")


def test_a_certificate_that_is_not_there(
    real_pip: None, check: Check, server: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere/ca.pem")
    assert "/nowhere/ca.pem" in refused(check(), code=5, id="index-unreachable")


@pytest.mark.parametrize("text", ["[global\n", "[global]\nretries = many\n"])
def test_a_broken_pip_configuration(
    real_pip: None, check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(text)
    monkeypatch.delenv("PIP_RETRIES")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    refused(check(), code=5, id="pip-not-usable")


def test_a_python_without_pip(real_pip: None, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ModuleNotFoundError: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(index.PipNotUsableError) as caught:
        index.ask_pip(str(python))
    assert "No module named pip" in caught.value.context[1]


def test_a_killed_download_is_resumed(upstream: Upstream, server: Index, check: Check) -> None:
    """SIGKILL while the body arrives; the next command asks only for the rest."""
    code = (
        "import os, signal; from flashnext import net; from flashnext.cli import main\n"
        "def die(n):\n    if n: os.kill(os.getpid(), signal.SIGKILL)\n"
        "real = net.Downloader.download\n"
        "net.Downloader.download = lambda *a, **k: real(*a, **{**k, 'at': die})\n"
        "main()"
    )
    arguments = ["patch", "check", "--pin", str(upstream.pin_file), "--patches", str(upstream.patches)]
    server.cut_after = [300]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    nothing_used(upstream)
    assert check().code == 0


def test_two_commands_at_once_download_once(upstream: Upstream, server: Index) -> None:
    """The second waits for the first's lock, and says so."""
    arrived, go = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        arrived.set()
        go.wait(20)

    server.on_body = hold
    command = [sys.executable, "-m", "flashnext", "patch", "check"]
    command += ["--pin", str(upstream.pin_file), "--patches", str(upstream.patches)]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    second = None
    try:
        assert arrived.wait(20)
        second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert "waiting for another flashnext" in second.stderr.readline()
        go.set()
        assert (first.wait(20), second.wait(20)) == (0, 0)
    finally:
        go.set()
        for child in (first, second):
            if child is not None:
                child.kill()
                child.wait()
                assert child.stderr is not None
                child.stderr.close()
    assert len(server.requests("/files/")) == 1


def test_out_of_space_is_told_from_other_faults(tmp_path: Path) -> None:
    left = tmp_path / "x.part"
    for number, id in (
        (errno.ENOSPC, "no-space"),
        (errno.EDQUOT, "no-space"),
        (errno.EACCES, "cache-not-writable"),
    ):
        left.write_bytes(b"")
        assert net._storage_error(OSError(number, "words"), left).id == id
        assert left.exists() == (id != "no-space")


def test_source_of_the_package_names_no_host_but_the_loopback() -> None:
    import re

    import flashnext

    schema_dialect = "json-schema.org"
    for path in Path(flashnext.__file__).parent.rglob("*.py"):
        hosts = set(re.findall(r"https?://([a-z0-9.-]+\.[a-z]{2,})\b", path.read_text().lower()))
        assert hosts <= {schema_dialect}, path
