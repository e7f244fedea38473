"""What is kept of a whole vocabulary's log probabilities."""

from __future__ import annotations

import random

from flashnext.bench.asking import kept


def vocabulary(size: int, seed: int = 1) -> list[tuple[int, float]]:
    rng = random.Random(seed)
    found = [(token, -rng.random() * 20) for token in range(size)]
    return sorted(found, key=lambda pair: -pair[1])


def test_the_likeliest_and_the_same_spread_whatever_the_values() -> None:
    first, second = (kept(vocabulary(100_000, seed), 50, 4000) for seed in (1, 2))
    assert first[:50] == vocabulary(100_000, 1)[:50]
    strewn = [{token for token, _ in found[50:]} for found in (first, second)]
    assert 3600 < len(strewn[0]) < 4400
    assert len(strewn[0] ^ strewn[1]) <= 100, "but for those that are among the likeliest of one"
    places = [token // 10_000 for token in strewn[0]]
    assert all(300 < places.count(part) < 500 for part in range(10))


def test_without_a_spread_only_the_likeliest() -> None:
    assert kept(vocabulary(1000), 7, 0) == vocabulary(1000)[:7]
    assert kept([], 7, 100) == []


def test_padding_and_impossible_tokens_are_left_out() -> None:
    real = vocabulary(265)
    padded = [*real, *((token, -99.0) for token in range(265, 5000))]
    assert kept(padded, 1000, 4000) == real
    assert kept([*real, (265, -3.4e38)], 10, 265)[-1][1] > -100
