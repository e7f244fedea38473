"""The API key file: what llama-server will take from it, and what is wrong with it. Keys are never shown."""

from __future__ import annotations

import re
from pathlib import Path

from flashnext.errors import ProfileInvalidError
from flashnext.profile.load import Loaded

_FORM = re.compile(r"[\x21-\x7e]+")  # what fits into a header; llama-server compares byte by byte
_OTHERS = 0o007


def first_key(loaded: Loaded) -> tuple[str, tuple[str, ...]]:
    """(the key that our own probes carry, warnings). Raises ProfileInvalidError with all that is wrong.

    llama-server takes every line for a key but empty ones and those that begin with a hash, blanks and all.
    """
    file = Path(str(loaded.profile.server.api_key_file)).expanduser()
    place = loaded.place(("server", "api_key_file"))
    try:
        lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        open_to_all = file.stat().st_mode & _OTHERS
    except OSError as error:
        raise ProfileInvalidError("the API key file cannot be read", context=[f"{place}: {error}"]) from None
    keys = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    wrong = [
        f"{file}:{number}: a key is printable ASCII without blanks; this line has something else (or CRLF)"
        for number, line in keys
        if not _FORM.fullmatch(line)
    ]
    if not keys:
        wrong = [f"{place}: {file}"]
    if wrong:
        title = (
            "the API key file has no key" if not keys else "the API key file has lines that cannot be keys"
        )
        raise ProfileInvalidError(title, context=wrong, hint="write one key a line; # begins a comment")
    warning = f"{file} can be read by every user of this machine: chmod 600 {file}"
    return keys[0][1], (warning,) if open_to_all else ()
