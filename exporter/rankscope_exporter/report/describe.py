"""Short texts about runs and ranks, the same on the status page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rankscope.record.group_name import compact
from rankscope.record.quantities import duration, percent
from rankscope_exporter.diagnosis.readings import UNKNOWN_NODE, run_title
from rankscope_exporter.diagnosis.standstill import INSIDE, SILENT
from rankscope_exporter.report.findings import FindingReport, PendingReport, pending_reason
from rankscope_exporter.report.gpus import GpuProblem, GpuReport
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.report.runs import ANALYZED, CAPTURED_KINDS, ELSEWHERE, RunReport

CAUSES_SHOWN = 3
MIN_SHOWN = 0.005
PENDING_SHOWN = 4
"""The most pending candidates per run: with many ranks, each may have one."""
FAILED = {"killed": ("was killed", "were killed"), "exception": ("ended with an exception",) * 2}
"""Ends that are failures, as words that follow one rank, and several ranks."""
STALLED_SHOWN = 30.0
"""Seconds without progress from which on this is stated of a run that is not diagnosed. Few steps take longer."""
FIRST_SECONDS = 5.0
"""What began so soon after the runs were first watched was there before that."""
BY_OTHERS = "An analyzer that asks the exporters of all its nodes diagnoses it (`rankscope-exporter --analyze`)."
CRASH, LATE, THROTTLED = "crash", "straggler", "throttled"
"""Kinds of findings, and a cause."""
GROWING = ("time", "steps")
"""Reasons why a candidate is not a finding yet, but will be if it lasts."""
Mark = Literal["bad", "warn", "good", ""]


def owner(run: RunReport) -> str:
    """Return the run's owner as `user alice` or `uid 1000`; empty if unknown."""
    return f"user {run.user}" if run.user else f"uid {run.owner}" if run.owner else ""


def name(run: RunReport) -> str:
    """Return the run's name, with its rank's number if it is one of several trainings of that name."""
    first = run.ranks[0].rank if run.world_size == 1 else 0
    return run_title((run.run, run.owner, str(first)) if first else (run.run, run.owner))


def title(run: RunReport) -> str:
    """Return the run's name and owner, such as `Run train, user alice`."""
    return ", ".join(filter(None, (f"Run {name(run)}", owner(run))))


def summary(run: RunReport) -> Iterator[str]:
    """Yield the run's ranks, its step time, and the useful and lost parts of its GPU time, with their window.

    A finding has a number of its own for its cause, so that the causes are left out next to one.
    """
    here = " here" * (run.not_judged == ELSEWHERE)
    if not run.living:
        yield f"ended{here}"
        return
    yield f"{run.living} of {run.world_size} ranks{here}"
    if run.is_judged and run.judged_by:
        yield f"diagnosed by the analyzer at {run.judged_by}"
    if run.step_seconds is not None:
        yield f"{short_duration(run.step_seconds)} per step"
    elif (seconds := stalled(run)) >= SILENT:
        yield f"no progress for {duration(seconds)}"
    if shares := ", ".join(_shares(run)):
        window = "" if run.window_seconds is None else f" in the last {duration(run.window_seconds)}"
        yield f"of its GPU time{window}: {shares}"


def _shares(run: RunReport) -> Iterator[str]:
    """Yield what part of the GPU time is useful, unknown, and lost to the largest causes."""
    if run.useful_ratio is not None:
        yield f"{percent(run.useful_ratio)} useful"
    if (unknown := run.lost.get("unknown", 0.0)) >= MIN_SHOWN:
        yield f"{percent(unknown)} unknown (the GPUs have not been measured yet)"
    known = {} if run.findings else run.lost
    lost = [(cause, ratio) for cause, ratio in known.items() if ratio >= MIN_SHOWN and cause != "unknown"]
    yield from (f"{percent(ratio)} lost to {cause}" for cause, ratio in lost[:CAUSES_SHOWN])


def short_duration(seconds: float) -> str:
    """Return the length of a step: `45 ms`, `1.8 s`."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.2g} s"


def stalled(run: RunReport) -> float:
    """Return the seconds since any live rank made progress."""
    return min((rank.stalled_seconds or 0.0 for rank in run.ranks if rank.is_alive), default=0.0)


def notes(run: RunReport, *, with_explained: bool = False) -> Iterator[str]:
    """Yield the candidates that are not findings yet; those that a finding explains only if `with_explained`."""
    for one in [one for one in run.pending if with_explained or one.lacks != "explained"][:PENDING_SHOWN]:
        text = f"{one.sentence} ({pending_reason(one)})"
        yield text if one.lacks == "paused" else f"Not yet an alert: {text}"
    is_said = not run.is_judged or any(one.kind in CAPTURED_KINDS for one in run.findings)
    if run.captures and not is_said:
        yield captured(run)


def captured(run: RunReport) -> str:
    """Return where the captures of a run lie that stands still or has failed; empty without one."""
    return " ".join(f"Captured on {one.node} in {one.path}" for one in run.captures)


def undiagnosed(runs: Sequence[RunReport]) -> Sequence[RunReport]:
    """Return the runs that are not diagnosed here, or not fully, and may have any problem.

    An ended run is one of them if it had ranks elsewhere. Others that ended need no diagnosis.
    """
    return [run for run in runs if _may_have_any_problem(run)]


def _may_have_any_problem(run: RunReport) -> bool:
    if run.is_judged:
        return bool(run.missing_nodes and run.living)
    return bool(run.living or run.not_judged == ELSEWHERE)


def undiagnosed_sentence(run: RunReport) -> str:
    """Return that a run is not diagnosed here, and why."""
    if run.is_judged:
        names = [one for one in run.missing_nodes if one != UNKNOWN_NODE]
        missing = [*names, "a node without an exporter"] if UNKNOWN_NODE in run.missing_nodes else names
        return f"Run {name(run)} is not fully diagnosed: no answer from {' and '.join(missing)}."
    return f"Run {name(run)} is not diagnosed here: {run.not_judged_reason}."


def known_here(run: RunReport) -> Iterator[str]:
    """Yield what is known of a run that is not diagnosed here, or not fully, and who diagnoses it."""
    if run.is_judged:
        yield "Late ranks and slow transfer are unknown meanwhile."
        return
    for ended, words in FAILED.items():
        if ranks := [rank.rank for rank in run.ranks if rank.ended == ended]:
            yield f"Rank{'s' * (len(ranks) > 1)} {compact(ranks)} {words[len(ranks) > 1]}."
    if (seconds := stalled(run)) >= STALLED_SHOWN:
        yield f"No rank here has made progress for {duration(seconds)}."
    if run.judged_by:
        yield f"Diagnosed by the analyzer at {run.judged_by}."
    elif run.not_judged in ANALYZED:
        yield BY_OTHERS
    if run.captures and (seconds >= STALLED_SHOWN or any(rank.ended in FAILED for rank in run.ranks)):
        yield captured(run)


def age(one: FindingReport, watched_since: float | None = None) -> str:
    """Return how long ago a problem began: `for 20 s`; of a crash, which does not last, `20 s ago`.

    `watched_since` is the unix time since which the runs are watched, if that is known: what was there at once may be
    older.
    """
    if one.kind == CRASH:
        return f"{duration(one.age_seconds)} ago"
    is_older = watched_since is not None and abs(one.since - watched_since) < FIRST_SECONDS
    return f"for {'at least ' * is_older}{duration(one.age_seconds)}"


def gpu_age(one: GpuProblem) -> str:
    """Return how long ago a GPU's problem began; empty of one that took days, whenever the exporter has started."""
    if one.kind == "gpu_recurring":
        return ""
    return f"{duration(one.age_seconds)} ago" if one.kind == "gpu_xid" else f"for {duration(one.age_seconds)}"


def other_defects(
    gpus: Sequence[GpuReport], problems: Sequence[GpuProblem], findings: Sequence[FindingReport]
) -> Sequence[GpuReport]:
    """Return the GPUs with a defect of which no alert and no finding says it."""
    throttled = {one.uuid for one in findings if one.cause == THROTTLED}
    return [
        gpu
        for gpu in gpus
        if gpu.problem and not _is_said(gpu, problems) and not (gpu.is_throttled and gpu.uuid in throttled)
    ]


def _is_said(gpu: GpuReport, problems: Sequence[GpuProblem]) -> bool:
    """Return whether an alert, or what may become one, says what the GPU's own problem says."""
    own = [one for one in problems if one.uuid == gpu.uuid]
    is_lost = any(one.kind == "gpu_lost" and not one.remaining_seconds for one in own)
    is_past = gpu.problem == gpu.past_problem and any(one.kind == "gpu_recurring" for one in own)
    is_held = gpu.state == "memory_held_by_dead" and any(one.kind == "gpu_memory_held" for one in own)
    return is_lost or is_past or is_held


def is_growing(one: PendingReport) -> bool:
    """Return whether a candidate will be a finding if it lasts."""
    return one.lacks in GROWING


def mark(run: RunReport, rank: RankReport) -> Mark:
    """Return `bad` for a rank that a finding names, `warn` for a rank that a pending candidate names."""
    if any(rank.rank in one.ranks and one.cause != INSIDE for one in run.findings):
        return "bad"
    return "warn" if any(rank.rank in one.ranks and one.cause != INSIDE for one in run.pending) else ""


def now(rank: RankReport) -> str:
    """Return a rank's phase and its duration, or how and when the rank ended."""
    if not rank.is_alive:
        ago = "" if rank.ended_seconds is None else f", {duration(rank.ended_seconds)} ago"
        return f"{rank.ended or 'ended'}{ago}"
    seconds = rank.phase_seconds or 0.0
    return f"{rank.phase} for {duration(seconds)}" if rank.phase and seconds >= 1.0 else rank.phase or ""


def now_mark(run: RunReport, rank: RankReport) -> Mark:
    """Return `bad` for a rank that is stuck or has failed, not for those that wait for it."""
    if not rank.is_alive:
        return "bad" if rank.ended in FAILED else ""
    hangs = [one for one in run.findings if one.kind == "hang"]
    return "bad" if any(rank.rank in one.ranks or not one.ranks or one.cause == INSIDE for one in hangs) else ""


def wait(rank: RankReport) -> str:
    """Return the rank's wait for others as a percentage."""
    return "" if rank.wait_ratio is None or not rank.is_alive else f"{rank.wait_ratio:.0%}"


def lag(run: RunReport, rank: RankReport) -> str:
    """Return the rank's lag as a percentage; 0% if it waits longer than the others.

    It is the number of the finding about this rank alone, so that all screens have the same one, or else its own.
    """
    if rank.lag_ratio is None or not rank.is_alive or stands_still(run):
        return ""
    found = next((one.ratio for one in run.findings if one.kind == LATE and one.ranks == (rank.rank,)), None)
    return f"{max(0.0, rank.lag_ratio):.0%}" if found is None else percent(found)


def is_late(run: RunReport, rank: RankReport) -> bool:
    """Return whether the others wait for the rank, by its lag or by a finding."""
    return bool(lag(run, rank)) and (
        rank.waits_least or any(one.kind == LATE and rank.rank in one.ranks for one in run.findings)
    )


def stands_still(run: RunReport) -> bool:
    """Return whether no step is measured now: what is known of waits and lags is from before."""
    return "hang" in {*(one.kind for one in run.findings), *(one.kind for one in run.pending)}


def steps(rank: RankReport) -> str:
    """Return the rank's number of steps, or of backward passes if nothing marks its steps."""
    if rank.step_marker == "backward_pass":
        return f"{rank.steps} (backward passes)"
    return str(rank.steps) if rank.steps or not rank.backward_passes else f"0 in {rank.backward_passes} backward passes"
