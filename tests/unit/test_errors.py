"""The tree of errors keeps its promises."""

import re
from collections import Counter

from flashnext.errors import all_errors


def test_ids_are_unique_and_kebab_case() -> None:
    ids = Counter(cls.id for cls in all_errors())
    assert [i for i, n in ids.items() if n > 1] == []
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", i) for i in ids)


def test_every_error_has_a_hint_of_its_own_stage_or_its_own() -> None:
    for cls in all_errors():
        assert cls.hint.strip(), cls
        assert cls.exit_code in range(1, 12), cls
