"""Reports of this node's runs: their findings with advice, and the state of each rank."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from rankscope.record.group_name import members
from rankscope_exporter.diagnosis.detectors import crash, hang
from rankscope_exporter.diagnosis.facts import RunFacts, compare
from rankscope_exporter.diagnosis.judge import STALLED_STEPS, Verdict
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.standstill import SILENT
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.rank import Rank, Scan
from rankscope_exporter.ranks.readings import reading
from rankscope_exporter.ranks.watcher import STALE_AFTER, OutdatedError
from rankscope_exporter.report.analyzer import Analyzer
from rankscope_exporter.report.findings import FindingReport, PendingReport, report_finding, report_pending
from rankscope_exporter.report.gpus import GpuProblem
from rankscope_exporter.report.ranks import Moment, RankReport, report_rank, step_seconds
from rankscope_exporter.report.rates import RecentRates

ROUNDING = 1e-6
MOST_UNKNOWN = 0.5
"""Ratio of unknown GPU time above which useful time is not shown."""
NOT_POLLED = "not_polled"
ELSEWHERE = "ranks_elsewhere"
ANALYZED = (ELSEWHERE, "gpus_unknown")
"""Reasons for which an analyzer, which reads all nodes of a run, diagnoses it."""
REASONS: Mapping[str, str] = {
    ELSEWHERE: "not all of its ranks are on this node",
    "world_size_unknown": "its world size is unknown",
    "world_sizes_differ": "its ranks report different world sizes",
    "gpus_unknown": "one of its GPUs cannot be read here",
    "too_many_runs": "its owner, or this node, has too many runs",
    "too_much_cpu_time": "its owner's runs take too much CPU time to diagnose",
    "impossible_values": "its records have impossible values",
    NOT_POLLED: "the collector findings is off or late",
}
"""Reasons why a run is not judged."""
CAPTURED_KINDS = (crash.KIND, hang.KIND)
"""The kinds of findings for which a run is captured."""
NONE_MISSING: Mapping[Run, Sequence[str]] = {}


@dataclass(frozen=True)
class CaptureReport:
    """The latest capture of a run on one node."""

    node: str
    path: str
    """The folder there."""
    at: float
    """When it was written, in unix time."""


Captures = Mapping[tuple[str, str], Sequence[CaptureReport]]
"""By the name and the owner of a run."""


@dataclass(frozen=True)
class RunReport:
    """One run. Unknown values are None, or absent from their mapping."""

    run: str
    owner: str
    user: str
    is_judged: bool
    """True also if the analyzer judges it and its verdict is known here."""
    not_judged: str | None
    """The reason why this node does not: a key of REASONS."""
    not_judged_reason: str | None
    """The same in words, which follow `it is not diagnosed here:`."""
    judged_by: str | None
    """The address of the analyzer that diagnoses it, or its configured URL; None if this node knows none."""
    nodes: Sequence[str]
    """The names of the nodes of its ranks that are known here."""
    missing_nodes: Sequence[str]
    """The nodes that do not answer the analyzer: late ranks and transfer are unknown meanwhile."""
    world_size: int
    living: int
    ended: int
    window_seconds: float | None
    """The window of rates and ratios."""
    steps_per_second: float | None
    step_seconds: float | None
    """The median length of the last steps; None while the run hangs or may hang."""
    useful_ratio: float | None
    lost: Mapping[str, float]
    """Ratio of lost GPU time by cause, the largest first."""
    findings: Sequence[FindingReport]
    pending: Sequence[PendingReport]
    ranks: Sequence[RankReport]
    captures: Sequence[CaptureReport] = ()
    """What is written of it, while it stands still or after a rank has failed."""


@dataclass(frozen=True)
class NodeReport:
    """All runs: living ones first, and among those the worst."""

    at: float
    """The unix time of the readings."""
    runs: Sequence[RunReport]
    gpu_problems: Sequence[GpuProblem] = ()
    """What alerts about the node's GPUs, and then what will if it lasts."""


class Reporter:
    """The maker of reports. It may be called by any thread."""

    def __init__(
        self,
        scan: Callable[[], Scan | None],
        look: Callable[[], Look | None],
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """Set the data sources: the last scan, None if it is too long ago, and the last update of the diagnosis."""
        self._scan = scan
        self._look = look
        self._monotonic = monotonic
        self._unix = unix
        self.analyzer = Analyzer(monotonic)
        """Knows who diagnoses the runs that are not whole on this node."""
        self.complete: Callable[[NodeReport], NodeReport] = lambda report: report
        """Adds what the analyzer says of them, if it is configured."""
        self.check_gpus: Callable[[Callable[[], Sequence[RunReport]]], Sequence[GpuProblem]] = lambda _runs: ()
        """Returns the problems of the GPUs, which depend on the runs."""
        self.captures: Callable[[], Captures] = dict
        """Returns the captures of the runs that are shown now."""
        self.rates = RecentRates()
        """How busy the GPUs and how fast the runs were in the last minutes."""

    def look(self) -> Look | None:
        """Return the last update of the diagnosis; None if the collector `findings` is off or late."""
        look = self._look()
        return look if look and self._monotonic() - look.at <= STALE_AFTER else None

    def report(self) -> NodeReport:
        """Return the current report. Raise OutdatedError if the run directories were read too long ago."""
        scan, look = self._scan(), self.look()
        if scan is None:
            raise OutdatedError(f"the run directories have not been read for {STALE_AFTER:.0f} s")
        node = self.complete(report_of_look(look, self.analyzer.address)) if look else self._report_of_scan(scan)
        node = replace(node, runs=self._captured(node.runs))
        return replace(node, gpu_problems=self.check_gpus(lambda: node.runs))

    def _captured(self, runs: Sequence[RunReport]) -> Sequence[RunReport]:
        """Return the runs with their captures. A capture does not distinguish trainings of one name."""
        if not any(map(_may_be_captured, runs)):
            return runs
        captures, names = self.captures(), Counter((run.run, run.owner) for run in runs)
        return [
            replace(run, captures=captures.get((run.run, run.owner), ()))
            if _may_be_captured(run) and names[run.run, run.owner] == 1
            else run
            for run in runs
        ]

    def watch(self) -> None:
        """Check the GPUs and record the rates. Called every few seconds, whether or not the report is read."""
        look = self.look()
        if look:
            self.rates.record(look)
        self.check_gpus(lambda: report_of_look(look).runs if look else ())

    def _report_of_scan(self, scan: Scan) -> NodeReport:
        read = max((rank.snapshot.read_monotonic for rank in scan.ranks), default=self._monotonic())
        moment = Moment(read, self._unix() - (self._monotonic() - read))
        runs = []
        for run, ranks in _by_run(scan.ranks).items():
            readings = [reading(rank, None, None, None) for rank in ranks]
            runs.append(_run(run, readings, moment, NOT_POLLED, ranks=ranks))
        return NodeReport(moment.unix, ordered(runs))


def report_of_look(
    look: Look, analyzer: str | None = None, missing: Mapping[Run, Sequence[str]] = NONE_MISSING
) -> NodeReport:
    """Return the report of one poll.

    `analyzer` is the address of the analyzer that pulls this node's facts, if any. The analyzer's own report has the
    names of the nodes that do not answer, by run.
    """
    moment, here = Moment(look.at, look.unix), _by_run(look.scan.ranks)
    verdicts = {verdict.run: verdict for verdict in look.judged.verdicts}
    runs = []
    for run, readings in look.readings.items():
        verdict = verdicts.get(run)
        facts = (
            verdict.facts
            if verdict
            else compare(run, {one.rank: one for one in look.before.get(run, ())}, {one.rank: one for one in readings})
        )
        reason = None if verdict else look.judged.not_judged.get(run, NOT_POLLED)
        if facts and reason == ELSEWHERE:
            facts = _without_partial_lags(facts)
        report = _run(run, readings, moment, reason, verdict, facts, here.get(run, ()))
        report = replace(report, missing_nodes=tuple(missing.get(run, ())))
        runs.append(replace(report, judged_by=analyzer) if reason in ANALYZED else report)
    return NodeReport(look.unix, ordered(runs))


def _without_partial_lags(facts: RunFacts) -> RunFacts:
    """Return the facts with a lag only for ranks whose whole group is here: another may be later than all of these."""
    here = {one.rank for one in facts.ranks}
    ranks = (one if _is_whole(one.now.group, here) else replace(one, lag=None) for one in facts.ranks)
    return replace(facts, ranks=tuple(ranks))


def _is_whole(group: str, here: Set[int]) -> bool:
    ranks = members(group)
    return 0 < len(ranks) <= len(here) and here >= {*ranks}


def _by_run(ranks: Sequence[Rank]) -> Mapping[Run, Sequence[Rank]]:
    runs: dict[Run, list[Rank]] = defaultdict(list)
    for rank in ranks:
        runs[rank.run].append(rank)
    return runs


def _may_be_captured(run: RunReport) -> bool:
    """Return whether a run hangs, may hang or has crashed, or may have because it is not diagnosed here."""
    kinds = {one.kind for one in run.findings} | {one.kind for one in run.pending}
    return not run.is_judged or any(kind in kinds for kind in CAPTURED_KINDS)


def ordered(runs: Sequence[RunReport]) -> Sequence[RunReport]:
    """Return the runs in the order of display: living ones first, and among those the worst."""
    return sorted(runs, key=lambda one: (not one.living, *_severity(one), one.run, one.owner))


def places(run: RunReport) -> Set[tuple[int, str]]:
    """Return each rank with its GPU, or else its node: in a container, that may have a name of its own."""
    return {(rank.rank, rank.uuid or rank.node) for rank in run.ranks}


def _severity(run: RunReport) -> tuple[object, ...]:
    """Return a key that sorts critical findings first, then the largest warnings, then runs without a finding."""
    is_critical = any(one.severity == "critical" for one in run.findings)
    return not is_critical, not run.findings, -max((one.ratio for one in run.findings), default=0.0)


def _run(
    run: Run,
    readings: Sequence[RankReading],
    moment: Moment,
    not_judged: str | None,
    verdict: Verdict | None = None,
    facts: RunFacts | None = None,
    ranks: Sequence[Rank] = (),
) -> RunReport:
    """Return the report of a run. `ranks` are its records on this machine."""
    living = sum(one.ended is None for one in readings)
    lost = dict(verdict.lost) if verdict else {}
    is_known = bool(lost) and lost.get("unknown", 0.0) <= MOST_UNKNOWN
    useful = lost.pop("none", 0.0)
    rate = facts.steps_rate if facts and facts.ranks else None
    size, may_hang = max(one.world_size for one in readings), _may_hang(verdict, facts)
    step = step_seconds([rank for rank in ranks if rank.snapshot.alive]) if ranks else rate and 1.0 / rate
    return RunReport(
        run=run[0],
        owner=run[1],
        user=ranks[0].user if ranks else "",
        is_judged=not_judged is None,
        not_judged=not_judged,
        not_judged_reason=_reason(not_judged, len(readings), size) if not_judged else None,
        judged_by=None,
        nodes=tuple(sorted({one.node for one in readings if one.node})),
        missing_nodes=(),
        world_size=size,
        living=living,
        ended=len(readings) - living,
        window_seconds=facts.seconds if facts and facts.ranks else None,
        steps_per_second=rate,
        step_seconds=None if may_hang else step,
        useful_ratio=useful if is_known else None,
        lost=dict(sorted(((cause, ratio) for cause, ratio in lost.items() if ratio > ROUNDING), key=lambda it: -it[1])),
        findings=[report_finding(run, one, verdict.at, moment.unix) for one in verdict.findings] if verdict else [],
        pending=[report_pending(run, one) for one in verdict.pending] if verdict else [],
        ranks=_ranks(readings, moment, facts, ranks, may_hang=may_hang),
    )


def _may_hang(verdict: Verdict | None, facts: RunFacts | None) -> bool:
    """Return whether the run hangs or may hang; without a verdict, whether its ranks here stand still."""
    if verdict:
        return verdict.may_hang
    return bool(facts and facts.stalled > max(SILENT, STALLED_STEPS * facts.seconds / max(facts.steps, 1.0)))


def _reason(not_judged: str, here: int, size: int) -> str:
    if not_judged == ELSEWHERE and here < size:
        return f"only {here} of its {size} ranks {'is' if here == 1 else 'are'} on this node"
    return REASONS[not_judged]


def _ranks(
    readings: Sequence[RankReading], moment: Moment, facts: RunFacts | None, ranks: Sequence[Rank], *, may_hang: bool
) -> Sequence[RankReport]:
    known = {one.rank: one for one in facts.ranks} if facts else {}
    here = {int(rank.key[1]): rank for rank in ranks}
    numbered = sorted(readings, key=lambda one: one.rank)
    return [report_rank(one, moment, known.get(one.rank), here.get(one.rank), may_hang=may_hang) for one in numbered]
