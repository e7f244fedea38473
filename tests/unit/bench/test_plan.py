"""The order of processes and the requests of each."""

from collections import Counter

import pytest
import synthetic as made

from flashnext.bench.plan import estimate_s, items, make_plan, order
from flashnext.bench.scenarios import load_pace, load_scenarios
from flashnext.errors import ScenarioInvalidError, UsageError


def test_blocks_are_mirrored() -> None:
    arms = ["vanilla", "control", "candidate"]
    sessions = order(arms, 5, group="shared", seed=3)
    for block in range(5):
        names = [s.arm for s in sessions if s.block == block]
        assert names == names[::-1]
        assert Counter(names) == dict.fromkeys(arms, 2)
    assert [s.index for s in sessions] == list(range(30))


def test_every_arm_has_the_same_mean_place_in_a_block() -> None:
    sessions = order(["a", "b", "c"], 4, group="shared", seed=0)
    for block in range(4):
        own = [s for s in sessions if s.block == block]
        means = {arm: sum(s.index for s in own if s.arm == arm) / 2 for arm in "abc"}
        assert len(set(means.values())) == 1


def test_the_order_comes_from_the_seed() -> None:
    def arms(seed: int) -> list[str]:
        return [s.arm for s in order(["a", "b"], 8, group="shared", seed=seed)]

    assert arms(1) == arms(1)
    assert len({tuple(arms(seed)) for seed in range(8)}) > 1


def test_both_arms_of_a_half_block_are_asked_the_same() -> None:
    plan = made.plan(made.scenario("decode"), made.scenario("quality", "quality"))
    asked: dict[tuple[int, int], set[tuple[str, ...]]] = {}
    for session in plan.sessions:
        names = tuple(i.item for i in items(plan, session))
        asked.setdefault((session.block, session.half), set()).add(names)
    assert all(len(variants) == 1 for variants in asked.values())


def test_quality_asks_each_document_once_per_arm() -> None:
    plan = made.plan(made.scenario("quality", "quality", cells=[{"depth": 900, "requests": 2}]))
    for arm in plan.arms:
        names = Counter(i.item for s in plan.sessions if s.arm == arm for i in items(plan, s))
        assert set(names.values()) == {1}
        assert len(names) == 12


def test_speed_items_repeat_in_every_process() -> None:
    plan = made.plan(made.scenario("decode", cells=[{"depth": 900, "requests": 2}], cell_by="depth-and-seed"))
    cells = {tuple(i.cell for i in items(plan, s)) for s in plan.sessions}
    assert cells == {("900/s0", "900/s1")}


def test_what_does_not_fit_the_context_is_named() -> None:
    scenario = made.scenario("decode", cells=[{"depth": 100}, {"depth": 5000, "generate": 100}])
    plan = make_plan([scenario], profile="demo", arms=["control"], seed=1, pace=made.PACE, context=4096)
    assert plan.left_out == ("decode at 5000: 5100 tokens, the context holds 4096",)
    assert [c.depth for c in plan.scenarios[0].cells] == [100]


def test_odd_numbers_of_processes_and_repeated_arms_are_refused() -> None:
    with pytest.raises(UsageError, match="even"):
        make_plan([], profile="demo", arms=["a"], seed=1, pace=made.PACE, processes=3)
    with pytest.raises(UsageError, match="once"):
        make_plan([], profile="demo", arms=["a", "a"], seed=1, pace=made.PACE)


def test_the_soak_runs_in_one_process_of_its_own() -> None:
    scenarios = load_scenarios()
    plan = make_plan(
        list(scenarios.values()),
        profile="demo",
        arms=["control", "candidate"],
        seed=1,
        pace=load_pace("demo"),
    )
    soak = [s for s in plan.sessions if s.group == "soak"]
    assert [(s.arm, s.block) for s in soak] == [("candidate", 0)]
    assert estimate_s(plan, soak[0]) > 45


def test_the_shipped_scenarios_cover_every_verb() -> None:
    assert list(load_scenarios()) == ["decode", "logits", "prefill", "quality", "soak", "times", "transition"]


def test_times_are_taken_in_processes_of_their_own_and_in_all_only_where_that_is_cheap() -> None:
    times = load_scenarios()["times"]
    assert times.own_process and not times.settings["default"].in_all
    assert times.settings["demo"].in_all


def test_a_scenario_with_a_wrong_key_says_which(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "x.yaml").write_text("id: x\ntitle: x\nkind: speed\ncellz: {}\n")
    with pytest.raises(ScenarioInvalidError) as caught:
        load_scenarios(tmp_path)
    assert any("cellz" in line for line in caught.value.context)
    assert any("settings" in line and "required" in line.lower() for line in caught.value.context)
