"""A run's history: its baselines, pauses and checkpoints, saved and restored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.readings import EARLY, Training, Trial, counting, hang, spend

from rankscope_exporter.diagnosis.history import HIGH, LOWER, History
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.saved import UNREADABLE

HOUR = 3600.0


def history() -> History:
    return History(EARLY)


def with_losses(losses: Iterable[float], useful: float = 0.8, steps_rate: float = 2.0) -> History:
    """Return a history with a row for each loss, 15 s apart; the last row ends at 0."""
    found, losses = history(), list(losses)
    for number, loss in enumerate(losses, start=1):
        found.add(15.0 * (number - len(losses)), {"network": loss}, useful, steps_rate)
    return found


def test_a_baseline_is_the_lower_quartile_of_the_runs_losses() -> None:
    assert with_losses([0.1] * 30 + [0.5] * 70).baseline("network", 0.0, 0.8, 2.0) == pytest.approx(0.1)
    assert with_losses([0.1] * 10 + [0.5] * 90).baseline("network", 0.0, 0.8, 2.0) == pytest.approx(0.5)


def test_a_baseline_before_a_time_excludes_later_losses() -> None:
    found = with_losses([0.1] * 4 + [0.5] * 40)
    assert found.baseline("network", -600.0, 0.8, 2.0) == pytest.approx(0.1)
    assert found.baseline("network", 0.0, 0.8, 2.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("losses", "baseline"), [([0.0], None), ([0.0, 0.2, 0.2], None), ([0.0, 0.2, 0.2, 0.2], 0.15)])
def test_the_first_steps_alone_are_no_baseline(losses: list[float], baseline: float | None) -> None:
    assert with_losses(losses).baseline("network", 0.0, 0.8, 2.0) == (baseline and pytest.approx(baseline))


def test_ten_rows_have_a_tenth_that_is_beyond_a_high_quantile() -> None:
    """The steps of an hour may be four: the most of them is nothing usual."""
    assert with_losses([0.1] * 9).baseline("network", 0.0, 0.8, 2.0, HIGH) is None
    assert with_losses([0.1] * 10).baseline("network", 0.0, 0.8, 2.0, HIGH) == pytest.approx(0.1)


def test_a_loss_that_was_never_measured_has_no_baseline() -> None:
    assert history().baseline("network", 0.0, 0.8, 2.0) is None
    assert with_losses([0.1] * 9).baseline("data", 0.0, 0.8, 2.0) is None


def test_a_baseline_follows_useful_time_and_the_step_rate() -> None:
    found = with_losses([0.2] * 60)
    assert found.baseline("network", 0.0, 0.4, 1.0) == pytest.approx(0.1)
    assert found.baseline("network", 0.0, 0.4, 4.0) == pytest.approx(0.4)


def test_a_row_is_the_mean_of_its_parts_since_a_part_has_one_step_or_two() -> None:
    trial = Trial(Training(4, transfer=0.2)).trained(400, spend("forward", 0.3))
    low, high = (trial.judge.history.baseline("network", 400.0, 0.6, 1.5, quantile) for quantile in (LOWER, HIGH))
    assert low
    assert high == pytest.approx(low, rel=0.1)


def test_a_fault_that_is_forgotten_is_in_no_row() -> None:
    found = with_losses([0.1] * 60 + [0.9] * 10)
    assert found.baseline("network", 0.0, 0.8, 2.0, HIGH) == pytest.approx(0.9)
    found.forget("network", -140.0)
    assert found.baseline("network", 0.0, 0.8, 2.0, HIGH) == pytest.approx(0.1)


def test_a_run_has_a_baseline_after_ten_minutes() -> None:
    assert not with_losses([0.1] * 40).has_baseline
    assert with_losses([0.1] * 41).has_baseline


def paced(trial: Trial, at: float | None = None) -> Mapping[str, float]:
    """Return the seconds after which the run hangs, by what it waits for."""
    return trial.judge.history.past(trial.training.now if at is None else at).pace


def test_a_pace_is_known_soon_after_the_first_steps_and_is_never_forgotten() -> None:
    trial = Trial().trained(40)
    assert trial.judge.history.past(40.0).shortest_limit is None
    trial.train(20)
    trial.train(1, spend("other", 12.0, 0))
    trial.train(60)
    assert trial.judge.history.past(trial.training.now).shortest_limit == EARLY.stuck_floor
    assert paced(trial) == {"other": pytest.approx(4 * 12.0, abs=4.0)}
    assert paced(trial, trial.training.now + HOUR) == {"other": pytest.approx(1.5 * 12.0, abs=1.5)}


def test_each_planned_phase_has_its_own_pace() -> None:
    trial = Trial().trained(60)
    trial.train(60, spend("checkpoint", 12.0, 0, every=100), spend("evaluation", 6.0, every=130))
    expected = {"checkpoint": pytest.approx(4 * 12.0, abs=4.0), "evaluation": pytest.approx(4 * 6.0, abs=4.0)}
    assert paced(trial) == expected


def observed(checkpoints: Mapping[float, float]) -> History:
    """Return a history of an hour with checkpoints: their seconds by the time of their end."""
    found, (_, ranks) = history(), next(Training(1).train(1))
    for at in range(0, int(HOUR) + 1, 30):
        spent = sum(seconds for ended, seconds in checkpoints.items() if ended <= at)
        written = float(sum(ended <= at for ended in checkpoints))
        one = counting(replace(ranks[0], checkpoints=written), phases={"checkpoint": spent})
        found.observe(float(at), [one])
    return found


def test_a_single_checkpoint_has_no_ratio() -> None:
    assert observed({1800.0: 900.0}).past(HOUR).checkpoint_ratio == 0.0


def test_the_ratio_of_several_checkpoints_is_at_most_their_share_of_the_time() -> None:
    twelve = {300.0 * number: 30.0 for number in range(1, 13)}
    assert observed(twelve).past(HOUR).checkpoint_ratio == pytest.approx(0.1 * 11 / 12)
    assert observed({1200.0: 600.0, 2400.0: 600.0}).past(HOUR).checkpoint_ratio == pytest.approx(1 / 3 / 2)


def scaled(scale: float, skipped: float) -> list[RankReading]:
    _, ranks = next(Training(1).train(1))
    return [counting(replace(ranks[0], amp_scale=scale), amp_skipped_steps=skipped)]


def test_the_highest_scale_and_the_skipped_steps_are_of_the_last_minutes() -> None:
    found = history()
    for minute in range(20):
        found.observe(60.0 * minute, scaled(65536.0 if minute < 5 else 1024.0, float(minute)))
    past = found.past(60.0 * 19)
    assert past.highest_amp_scale == 1024.0
    assert past.amp_skips == pytest.approx(6.0, abs=1.0)


def test_a_restart_of_the_exporter_keeps_the_history() -> None:
    """The restarted exporter's clock starts at another time."""
    trial = Trial().trained(90)
    trial.train(90, spend("other", 12.0, 0, every=200), spend("checkpoint", 2.0, 0, every=100))
    known = trial.judge.history
    saved = json.loads(json.dumps(known.state(180.0)))
    restored = history()
    restored.restore(saved, 5000.0)
    assert restored.state(5000.0) == saved | {"stepped": pytest.approx(saved["stepped"])}
    _, ranks = next(trial.training.train(1))
    known.observe(181.0, ranks.values())
    restored.observe(5001.0, [replace(one, at=5001.0, last_progress=5000.9) for one in ranks.values()])
    assert restored.past(5001.0) == known.past(181.0)
    assert restored.baseline("data", 4990.0, 0.8, 4.0) == pytest.approx(known.baseline("data", 170.0, 0.8, 4.0))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
STATES = st.fixed_dictionaries({"rows": JSON, "pace": JSON, "minutes": JSON, "stepped": JSON, "speed": JSON}) | JSON


@given(STATES)
def test_garbage_is_refused_with_an_expected_error_and_changes_nothing(garbage: Any) -> None:
    found = history()
    before = found.state(0.0)
    try:
        found.restore(garbage, 0.0)
    except UNREADABLE:
        assert found.state(0.0) == before


@pytest.mark.parametrize("value", [10**400, "many", {}, [1.0]])
@pytest.mark.parametrize("place", ["age", "loss"])
def test_a_value_that_is_not_a_number_is_refused(value: object, place: str) -> None:
    rows = [[value if place == "age" else 1.0, 0.0, {"data": [value if place == "loss" else 0.1, None]}]]
    saved = history().state(0.0) | {"rows": rows}
    with pytest.raises(UNREADABLE):
        history().restore(saved, 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_enters_an_evaluation_late_does_not_shorten_the_pause(ranks) -> None:
    trial = Trial(Training(ranks)).trained(60)
    trial.train(1, spend("checkpoint", 20.0, ranks - 1), spend("evaluation", 400.0))
    trial.train(500)
    assert not trial.kinds()
    assert paced(trial)["evaluation"] == pytest.approx(4 * 400.0, abs=4.0)


def test_a_stall_that_ends_with_a_restart_is_not_a_pause_of_the_new_processes() -> None:
    trial = Trial(Training(2)).trained(120)
    trial.train(100, hang("backward", 1))
    trial.training.restart()
    *_, (at, ranks) = trial.training.train(20)  # the records appear with their first steps
    trial.judge.update(at, ranks)
    assert not paced(trial, at)


def test_a_rank_that_evaluates_while_the_others_end_their_step_does_not_shorten_the_pause() -> None:
    """A pause of ten seconds would allow an evaluation only five minutes."""
    trial = Trial(Training(4))
    trial.train(120)
    trial.train(1, spend("forward", 10.0, 0, 2, 3), spend("evaluation", 700.0, 1))
    trial.train(690)
    assert "hang" not in trial.kinds()
    trial.train(60)
    assert paced(trial)["evaluation"] == pytest.approx(4 * 700.0, abs=8.0)
