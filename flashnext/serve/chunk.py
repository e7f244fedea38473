"""Which chunk lean prefill took, and why, from its marker ``lean:attached``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def told(data: Mapping[str, Any]) -> str:
    """One sentence for `flashnext status` and /status; tolerant of a marker of another version."""
    asked = "auto" if data.get("requested") == "auto" else "as asked"
    whose = "lent slots" if data.get("lent") else "memory of its own"
    text = f"chunk {_tokens(data)} ({asked}), staged in {whose}"
    tried = data.get("tried")
    tried = [one for one in tried if isinstance(one, Mapping)] if isinstance(tried, list) else []
    refused = [_attempt(one) for one in tried if not one.get("fits")]
    if refused:
        return f"{text}; did not fit: {'; '.join(refused)}"
    return f"{text}; the first that was tried" if tried else text


def _attempt(one: Mapping[str, Any]) -> str:
    return f"{_tokens(one)}{' lent' if one.get('lent') else ''} ({one.get('why') or 'no reason given'})"


def _tokens(data: Mapping[str, Any]) -> str:
    chunk = data.get("chunk")
    return f"{chunk:,}" if isinstance(chunk, int) else "of unknown size"
