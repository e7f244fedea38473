"""What must not leave the machine: prompt text, keys, names of people and hosts.

Names and known keys are replaced wherever they stand. Log lines are kept by their shape alone, because a line
that we do not know may be a piece of somebody's prompt.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_MAX_LINE = 400
_MAX_QUOTED = 40
_CUT = "[...]"
# A line of llama-server: clock, level, part, function. Others are ours, the virtual GPU's, or a crash's.
_SERVER = re.compile(r"^\d+(?:\.\d{2,3}){3} [A-Z] [\w:~<>() ]{1,60}:")
_MARKER = re.compile(
    r"^(?P<before>(?:\d+(?:\.\d{2,3}){3} [A-Z] )?fn:[a-z0-9-]+:[a-z0-9-]+ )(?P<data>\{.*\})\s*$"
)
_CRASH = re.compile(
    r"^(CUDA error|CUBLAS|ggml_\w+:|llama_\w+:|GGML_ASSERT|[\w./-]*(ggml|llama|fn-)[\w./-]*\.\w+:\d+: "
    r"|#\d+ +0x|libggml|libllama|terminate called|Aborted|Segmentation fault"
    r"|error: invalid argument:|error while handling argument)"
)
# After these words a line goes on with what a client or the model said.
_SPEAKS = re.compile(
    r"(?i)(request|response|prompt|content|messages?|body|text|exception|expected format|generated)"
    r"(\b\"?\s*[:=]\s*).*"
)
_QUOTED = re.compile(rf"'[^']{{{_MAX_QUOTED},}}'|\"[^\"]{{{_MAX_QUOTED},}}\"")
_SECRETS = (
    (re.compile(r"(?i)(bearer\s+)[^\s\"',]+"), r"\1KEY"),
    (re.compile(r"\b(?:sk|pk|hf|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_-]{8,}"), "KEY"),
    (re.compile(r"(?i)((?:api[_-]?key|token|secret|passw(?:or)?d)\"?\s*[=:]\s*\"?)[^\s\"',}]+"), r"\1KEY"),
    (re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@"), r"\1USER:KEY@"),
    (re.compile(r"(?<![\w.])/(home|Users)/[^/\s\"']+"), r"/\1/USER"),
    (re.compile(r"(?<![\w.])/run/user/\d+"), "/run/user/UID"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "MAIL"),
)
_COMMON = frozenset({"root", "user", "admin", "ubuntu", "debian", "localhost", "server", "main", "test"})


@dataclass(frozen=True)
class Redactor:
    """Replaces words of this machine and known keys. ``words`` maps what is found to what is written."""

    words: tuple[tuple[str, str], ...]

    def text(self, text: str) -> str:
        for word, instead in self.words:
            if re.fullmatch(r"[\w.-]+", word) and instead != "KEY":
                text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", instead, text)
            else:
                text = text.replace(word, instead)
        for pattern, instead in _SECRETS:
            text = pattern.sub(instead, text)
        return text

    def log(self, lines: Iterable[str]) -> list[str]:
        """The lines whose shape is known, cut where they may go on with text; others only as a count."""
        kept: list[str] = []
        dropped = 0
        for line in lines:
            clean = _log_line(line)
            if clean is None:
                dropped += 1
                continue
            kept.append(self.text(clean)[:_MAX_LINE])
        if dropped:
            kept.append(f"({dropped} lines of unknown shape left out: they may hold text)")
        return kept


def for_this_machine(keys: Iterable[str] = (), env: Mapping[str, str] = os.environ) -> Redactor:
    """Knows the users' and the host's names, the home folder, and ``keys``, the longest first."""
    words: dict[str, str] = {}
    for key in keys:
        if len(key) >= 4:
            words |= {key: "KEY", json.dumps(key)[1:-1]: "KEY"}  # as it is, and as JSON writes it
    home = env.get("HOME") or str(Path.home())
    if home not in ("", "/"):
        words[home] = "~"
    names = {env.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")} | {_login()}
    for name in names:
        if len(name) >= 3 and name.lower() not in _COMMON:
            words[name] = "USER"
    for host in (socket.gethostname(), socket.gethostname().split(".")[0]):
        if len(host) >= 3 and host.lower() not in _COMMON:
            words.setdefault(host, "HOST")
    return Redactor(tuple(sorted(words.items(), key=lambda pair: -len(pair[0]))))


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _log_line(line: str) -> str | None:
    source, mark, rest = line.rstrip("\n").partition("| ")
    before, rest = (
        (source + mark, rest) if mark and re.fullmatch(r"\w{1,16}", source) else ("", line.rstrip("\n"))
    )
    marker = _MARKER.match(rest)
    if marker is not None:
        data = _marker(marker["data"])
        return None if data is None else before + marker["before"] + data
    if not _SERVER.match(rest) and not _CRASH.match(rest):
        return None
    rest = re.sub(r"\{.*", _CUT, rest)
    rest = _SPEAKS.sub(rf"\1\2{_CUT}", rest)
    return before + _QUOTED.sub(f"'{_CUT}'", rest)


def _marker(text: str) -> str | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    plain = {k: v for k, v in data.items() if isinstance(v, int | float) or _is_word(v)}
    return json.dumps(plain)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.:/-]{0,64}", value) is not None
