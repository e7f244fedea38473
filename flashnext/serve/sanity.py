"""Is a completion text, or what a broken cache or a broken kernel writes?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MIN_PIECES = 8


def degenerate(text: str, tokens: Sequence[int] = ()) -> str | None:
    """Why a completion cannot be right, None when nothing speaks against it.

    Judges tokens where the server returns them, else characters. Says nothing about meaning: random weights
    pass, one token repeated, a short cycle and an empty answer do not.
    """
    if not text.strip() and len(set(tokens)) <= 1:
        return "the answer is empty"
    pieces: Sequence[object] = tokens if len(tokens) >= MIN_PIECES else text
    if len(pieces) < MIN_PIECES:
        return None
    unit = "token" if pieces is tokens else "character"
    counts = Counter(pieces)
    top, most = counts.most_common(1)[0]
    if most / len(pieces) > 0.8:
        return f"{most} of {len(pieces)} {unit}s are {top!r}"
    runs = [tuple(pieces[i : i + 3]) for i in range(len(pieces) - 2)]
    if len(set(runs)) <= len(runs) // 4:
        return f"the {unit}s go round in a circle: {len(set(runs))} different runs of three among {len(runs)}"
    return None
