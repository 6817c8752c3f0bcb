"""A loss or a gradient norm that is NaN or infinite, and the values that are so in healthy jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from testing.readings import RUN, Training, Trial

from rankscope_exporter.diagnosis.detectors.not_finite import KIND
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.readings import LoggedValues, RankReading
from rankscope_exporter.diagnosis.words import evidence, sentence

ONSET = 60.0
Logged = Callable[[float], LoggedValues | None]


def since(onset: float = ONSET, step: float = 300.0, until: float = 1e9, every: float = 1.0) -> Logged:
    """Return values, one each so many seconds, that are not finite in that time."""

    def logged(at: float) -> LoggedValues:
        last = (at - onset) // every if onset < at < until else 0.0
        return LoggedValues(at // every, last, step if last else 0.0)

    return logged


def found(quantity: str, by_rank: dict[int, Logged], seconds: float = 150.0) -> list[Finding]:
    def adjust(one: RankReading) -> RankReading:
        return replace(one, **{quantity: by_rank[one.rank](one.at)}) if one.rank in by_rank else one

    trial = Trial(Training(4, adjust=adjust), every=1)
    trial.train(seconds)
    assert trial.kinds() <= {KIND}
    return trial.opened(KIND)


@pytest.mark.parametrize(("quantity", "named"), [("loss", "loss"), ("gradient_norm", "gradient norm")])
def test_a_quantity_that_is_no_longer_finite_is_found_with_its_step(quantity: str, named: str) -> None:
    (finding,) = found(quantity, {0: since()})
    candidate = finding.candidate
    assert (candidate.cause, candidate.place.rank, finding.severity) == (quantity, 0, "critical")
    assert (
        sentence(RUN, candidate) == f"The {named} of run llm has been NaN or infinite since step 300, as rank 0 logs it"
    )
    assert finding.opened - ONSET == pytest.approx(23.0, abs=1.0), "three values, and twenty seconds"
    assert evidence(candidate) == "Values in a row: 23."


def test_a_loss_that_was_never_finite_is_found() -> None:
    assert found("loss", {0: since(0.0, step=1.0)})


def test_rare_values_are_found_as_soon_as_there_are_three() -> None:
    (finding,) = found("loss", {0: since(every=40.0)}, seconds=300.0)
    assert finding.opened - ONSET == pytest.approx(140.0, abs=2.0)


DECOYS: dict[str, tuple[str, Logged]] = {
    "no logger": ("loss", lambda _: None),
    "finite values": ("loss", since(1e9)),
    "one infinite norm, as of a step that the scaler skips": ("gradient_norm", since(until=ONSET + 1.5)),
    "two, then finite": ("loss", since(until=ONSET + 2.5)),
    "batches that the script leaves out": ("loss", since(until=ONSET + 15.0)),
    "infinite norms while the scaler looks for its scale": ("gradient_norm", since(0.0, until=30.0)),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_values_of_healthy_jobs_are_no_finding(decoy: str) -> None:
    quantity, logged = DECOYS[decoy]
    assert found(quantity, {0: logged}) == []


def test_a_gradient_norm_that_is_never_finite_is_found_after_the_scaler_would_have_its_scale() -> None:
    (finding,) = found("gradient_norm", {0: since(0.0, step=1.0)})
    assert 32.0 + 20.0 <= finding.opened <= 54.0


def test_of_several_ranks_the_first_one_is_named_and_the_loss_before_the_gradient_norm() -> None:
    finite = since(1e9)
    (finding,) = found("loss", {0: since(step=310.0), 1: since(step=300.0), 2: finite})
    assert finding.candidate.place.rank == 1
    assert finding.candidate.evidence["ranks_not_finite"] == 2.0
    assert finding.candidate.evidence["ranks_logging"] == 3.0

    def both(one: RankReading) -> RankReading:
        return replace(one, loss=since()(one.at), gradient_norm=since(40.0)(one.at))

    trial = Trial(Training(2, adjust=both))
    trial.train(100)
    assert len(trial.opened(KIND)) == 1


def test_the_finding_ends_with_a_finite_value() -> None:
    trial = Trial(Training(2, adjust=lambda one: replace(one, loss=since(until=120.0)(one.at))))
    assert [one.kind for one in trial.train(110).findings] == [KIND]
    assert not trial.train(30).findings
