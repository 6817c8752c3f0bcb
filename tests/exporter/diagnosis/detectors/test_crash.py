"""Crashes: the named rank, and ends that are not crashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from testing.readings import RUN, Training, Trial, spend

from rankscope_exporter.diagnosis.detectors.crash import detect
from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past
from rankscope_exporter.diagnosis.facts import compare
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.judge import Readings
from rankscope_exporter.diagnosis.readings import DeviceMemory, Ending
from rankscope_exporter.diagnosis.thresholds import Thresholds

LIMITS = Thresholds()


def crash(endings: dict[int, Ending], steps: float | None = None, progress: float | None = None) -> Candidate | None:
    """Return the detector's result for four ranks after a minute, some of which have ended."""
    training = Training(4)
    *_, (_, before), (_, now) = training.train(60)
    ended = {rank: replace(now[rank], ended=ending) for rank, ending in endings.items()}
    if steps is not None:
        ended[0] = replace(ended[0], counters=replace(ended[0].counters, steps=steps))
    if progress is not None:
        ended = {rank: replace(reading, last_progress=progress) for rank, reading in ended.items()}
    return next(detect(Window(compare(RUN, before, {**now, **ended}), {}, LIMITS), Past()), None)


def all_ended(reason: str, apart: float = 0.5) -> dict[int, Ending]:
    return {rank: Ending(reason, 58.0 + apart * rank) for rank in range(4)}


@pytest.mark.parametrize("reason", ["killed", "exception"])
def test_a_dead_rank_is_named_with_the_reason(reason) -> None:
    found = crash({2: Ending(reason, 57.0)})
    assert found
    assert (found.place.rank, found.place.node, found.place.gpu, found.cause) == (2, "node-a", "2", reason)
    assert found.evidence["living_ranks"] == 3.0
    assert found.lasted == 3.0


def test_the_first_dead_rank_is_named_and_killed_ranks_before_exceptions() -> None:
    first = crash({1: Ending("exception", 58.0), 2: Ending("exception", 57.0), 3: Ending("exception", 59.0)})
    assert first
    assert first.place.rank == 2
    killed = crash({1: Ending("exception", 55.0), 2: Ending("killed", 57.0), 3: Ending("killed", 56.0)})
    assert killed
    assert (killed.place.rank, killed.cause) == (3, "killed")


@pytest.mark.parametrize("reason", ["finished", "sigterm", "interrupted", ""])
def test_requested_ends_are_not_crashes(reason) -> None:
    assert crash(all_ended(reason)) is None
    assert crash({1: Ending(reason, 57.0)}) is None


def test_ranks_that_disappear_together_have_not_crashed() -> None:
    assert crash(all_ended("killed")) is None


@pytest.mark.parametrize(
    "found",
    [
        crash(all_ended("killed", apart=3.0)),
        crash(all_ended("killed"), steps=1.0),
        crash(all_ended("killed"), progress=-30.0),
        crash({rank: ending for rank, ending in all_ended("killed").items() if rank}),
    ],
    ids=["one after the other", "after different steps", "after a hang", "while a rank is alive"],
)
def test_ranks_that_were_killed_in_other_ways_have_crashed(found) -> None:
    assert found
    assert found.cause == "killed"


def memory(reason: str, at: float, exhausted: str = "device") -> Ending:
    return Ending(reason, at, exhausted, "forward")


def test_a_rank_without_memory_is_named_before_those_that_its_launcher_killed_after_it() -> None:
    found = crash({1: memory("exception", 56.0), 0: Ending("killed", 57.0), 2: Ending("exception", 56.5)})
    assert found
    assert (found.place.rank, found.cause, found.phase) == (1, "out_of_memory", "forward")
    before = crash({1: memory("exception", 58.0), 0: Ending("killed", 57.0)})
    assert before
    assert (before.place.rank, before.cause, before.phase) == (0, "killed", "")
    later = crash({1: memory("exception", 58.0), 0: Ending("exception", 57.0)})
    assert later
    assert (later.place.rank, later.cause) == (0, "exception")


@pytest.mark.parametrize(
    ("exhausted", "cause"), [("host", "host_memory"), ("shared", "shared_memory"), ("worker", "exception")]
)
def test_the_hosts_memory_is_another_cause(exhausted: str, cause: str) -> None:
    found = crash({1: memory("exception", 56.0, exhausted)})
    assert found
    assert (found.cause, found.phase) == (cause, "")


@pytest.mark.parametrize(
    ("ending", "killed_at", "cause"),
    [
        (Ending("killed", 61.0), 61.5, "oom_killer"),
        (Ending("exception", 61.0, "worker"), 57.0, "oom_killer"),
        (Ending("killed", 61.0), 40.0, "killed"),
        (Ending("killed", 61.0), None, "killed"),
        (Ending("exception", 61.0, "worker"), None, "exception"),
        (Ending("exception", 61.0), 61.0, "exception"),
    ],
    ids=["killed", "a worker killed", "long before", "no kill", "a worker killed by others", "another exception"],
)
def test_the_kernels_killer_is_the_cause_if_it_ended_a_process_at_that_time(
    ending: Ending, killed_at: float | None, cause: str
) -> None:
    trial = Trial(Training(4)).trained(60)
    for at, ranks in trial.training.train(8):
        gone = replace(ranks[2], ended=ending, oom_killed_at=killed_at)
        verdict = trial.judge.update(at, {**ranks, 2: gone})
    assert [finding.candidate.cause for finding in verdict.findings] == [cause]


def test_ranks_that_the_kernels_killer_ended_together_have_crashed() -> None:
    """It ends all processes of a container whose cgroup has memory.oom.group, as Kubernetes sets it."""
    trial = Trial(Training(4)).trained(60)
    (at, ranks), *_ = trial.training.train(1)
    for second in range(8):
        gone = {
            rank: replace(one, at=at + second, ended=Ending("killed", at), oom_killed_at=at)
            for rank, one in ranks.items()
        }
        verdict = trial.judge.update(at + second, gone)
    assert [finding.candidate.cause for finding in verdict.findings] == ["oom_killer"]


@pytest.mark.parametrize(("before", "after", "cause"), [(2.0, 3.0, "out_of_memory"), (3.0, 3.0, "exception")])
def test_an_allocation_that_failed_since_the_last_reading_is_the_cause_of_another_exception(
    before: float, after: float, cause: str
) -> None:
    memory = DeviceMemory(1.0, 2.0, 2.0, 4.0)
    trial = Trial(Training(2, adjust=lambda one: replace(one, memory=replace(memory, failures=before)))).trained(60)
    for at, ranks in trial.training.train(8):
        gone = replace(ranks[1], ended=Ending("exception", 61.0), memory=replace(memory, failures=after))
        verdict = trial.judge.update(at, {**ranks, 1: gone})
    assert [finding.candidate.cause for finding in verdict.findings] == [cause]


LOST = {"has_lost_peer": True}
"""An exception that says that the connection to another rank broke."""


def verdict(changes: dict[int, dict[str, Any]], alive: dict[int, float] | None = None) -> tuple[str, str]:
    """Return the cause and the ranks of a crash a minute after the start. `alive` is when ranks were last seen alive.

    All ranks have issued the same collectives, unless `changes` say `fewer`.
    """
    *_, (_, before), (_, now) = Training(4).train(60)
    last = {rank: replace(before[rank], at=at) for rank, at in (alive or {}).items()}
    for rank, change in changes.items():
        fewer, own = change.pop("fewer", 0.0), now[rank].issued
        issued = {group: count - fewer for group, count in own.items()}
        now[rank] = replace(now[rank], issued=issued, **change)
    found = next(detect(Window(compare(RUN, before, now), {}, LIMITS), Past(alive=last)))
    return found.cause, found.place.rank_label


def end(reason: str, at: float, **more: Any) -> dict[str, Any]:
    fewer = {name: more.pop(name) for name in ("fewer", "node", "clock_error", "has_left") if name in more}
    return {"ended": Ending(reason, at, **more), **fewer}


def test_a_rank_that_finished_with_fewer_collectives_is_named_and_not_its_victims() -> None:
    victims = {0: end("exception", 57.0, **LOST), 1: end("sigterm", 57.2), 2: end("exception", 57.1, **LOST)}
    for at in (56.9, 57.3):  # its process may take a while to end
        assert verdict({**victims, 3: end("finished", at, fewer=1.0)}) == ("finished", "3")
    assert verdict({**victims, 3: {"has_left": True, "fewer": 1.0}}) == ("finished", "3")
    assert verdict({**victims, 3: end("sigterm", 57.2, fewer=1.0, has_left=True)}) == ("finished", "3")
    assert verdict({**victims, 3: end("finished", 56.9)}) == ("finished", "3")  # it left within a collective
    after_wait = {rank: end("killed", 58.0) for rank in (0, 1, 2)}
    assert verdict({**after_wait, 3: end("finished", 50.0, fewer=1.0)}, {0: 57.0, 1: 57.0, 2: 57.0}) == (
        "finished",
        "3",
    )


def test_ranks_that_finished_are_not_the_reason_of_another_ranks_own_failure() -> None:
    others = {rank: end("finished", 56.0) for rank in (1, 2, 3)}
    assert verdict({**others, 0: end("exception", 57.0)}) == ("exception", "0")
    assert verdict({**others, 0: end("exception", 57.0, **LOST)}) == ("lost_peer", "0")
    late = {**others, 3: end("finished", 58.0, fewer=1.0)}  # it caught its own exception
    assert verdict({**late, 0: end("exception", 57.0)}) == ("exception", "0")
    long_ago = {**others, 3: end("finished", -10.0, fewer=1.0)}  # the others went on without it
    assert verdict({**long_ago, 0: end("exception", 57.0, **LOST)}) == ("lost_peer", "0")


@pytest.mark.parametrize("reason", ["sigterm", "interrupted"])
def test_a_rank_that_was_stopped_is_named_only_before_the_first_failure(reason: str) -> None:
    assert verdict({1: end(reason, 56.9), 0: end("exception", 57.0)}) == (reason, "1")
    assert verdict({1: end(reason, 57.1), 0: end("exception", 57.0)}) == ("exception", "0")
    assert verdict({1: end(reason, 57.1), 0: end("exception", 57.0, **LOST)}) == ("lost_peer", "0")


def test_a_killed_rank_whose_end_is_noticed_late_is_named_before_those_that_the_launcher_stopped() -> None:
    ends = {1: end("sigterm", 57.1), 0: end("exception", 57.05, **LOST), 2: end("killed", 57.9)}
    assert verdict(ends, {2: 56.9}) == ("killed", "2")
    assert verdict(ends) == ("killed", "2")
    hung = {1: end("sigterm", 50.0), 2: end("killed", 57.9)}
    assert verdict(hung, {2: 56.9}) == ("sigterm", "1")


def test_an_exception_is_named_before_ranks_that_were_still_alive_after_it() -> None:
    ends = {1: end("exception", 40.0), 2: end("killed", 57.9), 3: end("killed", 57.9)}
    assert verdict({**ends}, {2: 56.9, 3: 56.9}) == ("exception", "1")
    assert verdict({**ends}, {2: 49.5, 3: 56.9}) == ("killed", "2")  # a dying process may hold its lock for a while


def test_an_exception_of_its_own_is_named_before_lost_connections() -> None:
    ends = {0: end("exception", 57.0, **LOST), 1: end("exception", 57.2), 2: end("exception", 57.1, **LOST)}
    assert verdict(ends) == ("exception", "1")


def test_a_rank_of_another_node_was_stopped_first_only_if_the_clocks_show_it() -> None:
    lost = end("exception", 57.0, node="node-b", clock_error=0.2, **LOST)
    assert verdict({1: end("sigterm", 56.5, clock_error=0.2), 0: dict(lost)}) == ("sigterm", "1")
    assert verdict({1: end("sigterm", 56.9, clock_error=0.2), 0: dict(lost)}) == ("lost_peer", "0")


def test_an_unknown_rank_is_waited_for_while_ranks_may_be_about_to_end() -> None:
    trial = Trial().trained(60)
    (at, ranks), *_ = trial.training.train(1)

    def found(second: float, *lost: int) -> list[str]:
        ending = Ending("exception", at, has_lost_peer=True)
        now = {rank: replace(one, at=at + second) for rank, one in ranks.items()}
        now |= {rank: replace(now[rank], ended=ending) for rank in lost}
        return [one.candidate.cause for one in trial.judge.update(at + second, now).findings]

    assert found(5.0, 0, 1) == []
    assert found(16.0, 0, 1) == ["lost_peer"]
    trial = Trial().trained(60)
    assert found(5.0, 0, 1, 2, 3) == ["lost_peer"]


def ended(readings: Readings, *ranks: int, reason: str = "killed", at: float = 61.0) -> Readings:
    return {rank: replace(one, ended=Ending(reason, at)) if rank in ranks else one for rank, one in readings.items()}


def test_a_crash_is_critical_and_found_after_the_other_ends_would_be_seen() -> None:
    trial = Trial().trained(60)
    seen = [trial.judge.update(at, ended(ranks, 2)) for at, ranks in trial.training.train(8)]
    assert [verdict.at for verdict in seen if verdict.findings] == [64.0, 65.0, 66.0, 67.0, 68.0]
    assert seen[-1].findings[0].severity == "critical"
    assert [pending.candidate.kind for pending in seen[1].pending] == ["crash"]


def test_a_restarted_rank_has_not_crashed() -> None:
    trial = Trial().trained(60)
    for at, ranks in trial.training.train(10):
        verdict = trial.judge.update(at, ended(ranks, 2))
    assert verdict.findings
    trial.training.restart()
    assert not trial.train(10).findings


def test_a_run_that_waits_for_a_dead_rank_has_one_finding() -> None:
    """The others hang if torchrun is gone as well."""
    trial = Trial().trained(60)
    *_, (_, still) = trial.training.train(1)
    for second in range(120):
        stuck = {rank: replace(one, at=61.0 + second) for rank, one in still.items()}
        grown = {
            rank: replace(
                one, counters=replace(one.counters, phases={**one.counters.phases, "collective_wait": second})
            )
            for rank, one in stuck.items()
        }
        verdict = trial.judge.update(61.0 + second, ended(grown, 2))
    assert [finding.kind for finding in verdict.findings] == ["crash"]
    assert [(pending.candidate.kind, pending.lacks) for pending in verdict.pending] == [("hang", "explained")]


def test_a_straggler_that_dies_is_only_a_crash() -> None:
    """The others wait in the collective, so no later step ends the straggler finding."""
    trial = Trial()
    assert trial.train(60, spend("backward", 0.2, 1)).findings
    *_, (_, last) = trial.training.train(1, spend("backward", 0.2, 1))
    for second in range(10):
        still = {rank: replace(one, at=62.0 + second) for rank, one in last.items()}
        verdict = trial.judge.update(62.0 + second, ended(still, 1))
    assert [finding.kind for finding in verdict.findings] == ["crash"]


def test_an_ended_run_has_no_findings() -> None:
    trial = Trial().trained(60, spend("backward", 0.2, 1))
    *_, (_, last) = trial.training.train(1, spend("backward", 0.2, 1))
    for second in range(60):
        verdict = trial.judge.update(62.0 + second, ended(last, 0, 1, 2, 3, reason="finished"))
    assert not verdict.findings
