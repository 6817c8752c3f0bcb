"""A job on several nodes whose clock a test sets: each node has its own exporter, and the analyzer judges all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.node_facts.recorder import NodeFacts
from rankscope_exporter.node_facts.wire import MICROSECONDS, Answer, Moment, SentRank
from rankscope_exporter.ranks.diagnosis_service import FindingFlags
from testing.judged_job import JudgedJob
from testing.simulated_job import Job, Plan, even, lagging

PULL_EVERY = 3
SLOW = lagging("forward", laggard=3)
"""A plan in which the last rank is slow."""
TIMES = ("at", "began", "last_progress", "phase_since")
Clock = Callable[[float], float]
"""What a node's clock shows at a time of the job's clock."""


def ahead(seconds: float) -> Clock:
    """Return a clock that is ahead of the job's."""
    return lambda at: at + seconds


class AnalyzedJob:
    """A job with equally many ranks on each node, and all that judges it."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 2,
        ranks: int = 4,
        ahead: Sequence[float] = (),
        state_dir: Path | None = None,
        start: float = 1000.0,
        gpus: Callable[[float], Mapping[str, RankGpu]] = lambda _at: {},
        first_node: int = 0,
        **labels: Any,
    ) -> None:
        """Set by how many seconds each node's clocks are ahead of the job's, and the number of the first node."""
        directories = [directory / f"node-{first_node + node}" for node in range(nodes)]
        for path in directories:
            path.mkdir(parents=True)
        labels = {"world_size": str(ranks), "group": f"0-{ranks - 1}", **labels}
        self.job = Job.on_nodes(directories, ranks, start, **labels)
        self.nodes = [JudgedJob(path, job=self.job, gpus=gpus) for path in directories]
        self.facts = [NodeFacts(path.name, boot=f"boot of {path.name}") for path in directories]
        for node, facts in zip(self.nodes, self.facts, strict=True):
            node.diagnosis.listeners = [facts.record]
        self.ahead = [*ahead] or [0.0] * nodes
        self.clocks: dict[int, Clock] = {}
        """Other clocks of nodes, which are not only ahead."""
        self.delays: dict[int, float] = {}
        """The seconds that answers of nodes take."""
        self._under_way: dict[int, tuple[float, Answer, float]] = {}
        """By node: when its answer comes, the answer, and when it was asked for."""
        self._shown: dict[int, dict[float, float]] = {}
        """By node: the true times of moments by those of its clock."""
        self.is_stopped = False
        """True if the analyzer does not run."""
        self.silent: set[int] = set()
        """The nodes whose exporters do not answer."""
        self.verdicts: list[Verdict] = []
        self._settings = FindingFlags(state_dir=state_dir)
        self._polls = 0
        self.start_analyzer()

    def start_analyzer(self) -> None:
        """Start with a new analyzer, as after a restart."""
        self.analyzer = Analyzer(self._settings, clock=lambda: self.now)

    def train(self, seconds: int, plan: Plan = even) -> AnalyzedJob:
        """Train all ranks, poll each second and pull every third. Return this job."""
        for until in [self.now + second for second in range(1, seconds + 1)]:
            while self.now < until:
                self.job.run(1, plan)
            self.poll(self.now)
        return self

    @property
    def now(self) -> float:
        """The time of the rank that is furthest."""
        return self.nodes[0].now

    def wait(self, seconds: int, ended: Iterable[int] = ()) -> AnalyzedJob:
        """Let seconds pass without progress. Return this job. Ranks in `ended` are killed at once."""
        since, ended = self.now, [*ended]
        for passed in range(1, seconds + 1):
            self.poll(since + passed, ended)
        return self

    def poll(self, at: float, ended: Iterable[int] = ()) -> None:
        """Read everything at that time on each node. Pull and judge every third time."""
        for node in self.nodes:
            node.poll(at, ended)
        self._polls += 1
        if self._polls % PULL_EVERY == 0 and not self.is_stopped:
            self.pull(at)

    def pull(self, at: float) -> None:
        """Ask all exporters that answer, and judge."""
        self.ask(at)
        self.judge(at)

    def ask(self, at: float) -> None:
        """Ask all exporters that answer."""
        for number in {*range(len(self.facts))} - self.silent:
            self._under_way.setdefault(number, (at + self.delays.get(number, 0.0), self._answer(number, at), at))
        for number, (received, answer, sent) in [*self._under_way.items()]:
            if received <= at:
                del self._under_way[number]
                self.analyzer.take(f"node-{number}", answer, sent, received)

    def judge(self, at: float) -> None:
        """Judge what is known at that time."""
        if found := self.analyzer.update(at):
            self.diagnosis = found
            self.verdicts += found.look.judged.verdicts

    def _answer(self, number: int, at: float) -> Answer:
        """Return what a node answers at that time, with its clock."""
        cursor = self.analyzer.cursor(f"node-{number}")
        known = self._shown.setdefault(number, {})
        after = None if cursor is None else known.get(cursor, at)
        answer = Answer.model_validate_json(b"".join(self.facts[number].answer(after, at, is_packed=False)))
        shown = on_clock(answer, self.clocks.get(number) or ahead(self.ahead[number]))
        known.update(zip((one.at for one in shown.moments), (one.at for one in answer.moments), strict=True))
        return shown

    def findings(self) -> Sequence[Finding]:
        """Return the open findings."""
        return [finding for verdict in self.diagnosis.look.judged.verdicts for finding in verdict.findings]

    def kinds(self) -> Collection[str]:
        """Return the kinds of all findings so far."""
        return {finding.kind for verdict in self.verdicts for finding in verdict.findings}


def on_clock(answer: Answer, clock: Clock) -> Answer:
    """Return the answer of a node whose clock shows `clock(time)` at each time."""
    moments = [
        Moment.model_construct(
            at=clock(moment.at), gpus=moment.gpus, ranks=[_rank_on_clock(sent, clock) for sent in moment.ranks]
        )
        for moment in answer.moments
    ]
    return answer.model_copy(update={"now": clock(answer.now), "moments": moments})


def _rank_on_clock(sent: SentRank, clock: Clock) -> SentRank:
    steps = [[*row[:2], round(MICROSECONDS * clock(row[2] / MICROSECONDS)), *row[3:]] for row in sent.steps]
    return sent.model_copy(update={"reading": _on_clock(sent.reading, clock), "steps": steps})


def _on_clock(one: RankReading, clock: Clock) -> RankReading:
    ended = replace(one.ended, at=clock(one.ended.at)) if one.ended else None
    saved = None if one.last_checkpoint is None else clock(one.last_checkpoint)
    times: dict[str, Any] = {name: clock(getattr(one, name)) for name in TIMES}
    return replace(one, ended=ended, last_checkpoint=saved, **times)


def as_words(finding: Finding) -> tuple[Any, ...]:
    """Return a finding's kind, cause, severity and place, without the node."""
    candidate = finding.candidate
    return candidate.kind, candidate.cause, finding.severity, candidate.place._replace(node="")
