"""The open findings of this machine's runs: what they lose their time to, and which rank causes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from rankscope_exporter.diagnosis import words
from rankscope_exporter.diagnosis.findings import Candidate, Finding
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.judged import LIMITS
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.ranks.diagnosis_service import DiagnosisService
from rankscope_exporter.ranks.judged_runs import CAUSES, Diagnosis
from rankscope_exporter.ranks.rank import Scan

RUN_LABELS = ("run", "owner")
FINDING_LABELS = ("run", "owner", "kind", "cause", "severity", "rank", "group", "node", "gpu", "uuid", "port", "place")

JUDGED = Declaration(
    "gauge",
    "rankscope_run_judged_info",
    "Runs that this exporter diagnoses: all their ranks are on this machine, and their GPUs are read. `by` is the "
    "node, or `analyzer`, which diagnoses runs that span nodes. Absent in the first steps after the exporter's start.",
    (*RUN_LABELS, "by"),
)
FINDING = Declaration(
    "gauge",
    "rankscope_finding_ratio",
    "Current loss of a run as a ratio of its GPU time (for a straggler, of the step; 1 if the run makes no progress). "
    "`rank` lists up to eight ranks (`4-7`, `0,2,5`), of more it has the number; `place` is the place that has these "
    "ranks and no other. `cause` and place are fixed when it begins; `severity` rises at most once. A fault with "
    "another cause is another finding.",
    FINDING_LABELS,
)
SINCE = Declaration(
    "gauge", "rankscope_finding_since_timestamp_seconds", "Start of the finding, in unix time.", FINDING_LABELS
)
EVIDENCE = Declaration(
    "gauge",
    "rankscope_finding_evidence",
    "Evidence of a finding: at most four numbers in base units, by `name`.",
    (*FINDING_LABELS, "name"),
)
INFO = Declaration(
    "gauge",
    "rankscope_finding_info",
    "The finding in words: `summary` says what is wrong, where and how much, `evidence` has the numbers, and `advice` "
    "says what to do first. The numbers are those of its begin, or of the time when its severity has risen.",
    (*FINDING_LABELS, "summary", "evidence", "advice"),
)
PEAK = Declaration(
    "gauge",
    "rankscope_finding_peak_ratio",
    "Largest rankscope_finding_ratio since the finding began. For ten minutes after its end it is still shown.",
    FINDING_LABELS,
)
MEAN = Declaration(
    "gauge",
    "rankscope_finding_mean_ratio",
    "Mean rankscope_finding_ratio since the finding began. For ten minutes after its end it is still shown.",
    FINDING_LABELS,
)
END = Declaration(
    "gauge",
    "rankscope_finding_end_timestamp_seconds",
    "End of a finding that is no longer open, in unix time, for ten minutes after it.",
    FINDING_LABELS,
)
LOST = Declaration(
    "gauge",
    "rankscope_run_lost_ratio",
    "Ratio of the run's GPU time by cause; the ratios sum to 1. `none` is useful work, and `unknown` is not measured.",
    (*RUN_LABELS, "cause"),
)
LOST_SECONDS = Declaration(
    "counter",
    "rankscope_run_lost_gpu_seconds_total",
    "GPU time that the run has lost, by cause.",
    (*RUN_LABELS, "cause"),
)
SPENT = Declaration(
    "gauge",
    "rankscope_run_gpu_seconds",
    "GPU time of the run's ranks on this node since their start, by cause. The causes sum to the whole time; `none` is "
    "useful work, and `unknown` is not measured. The analyzer's series, of the ranks on all nodes, have an empty "
    "`node`: do not add both. For ten minutes after the run's end it is still shown. `rankscope report --url` reads "
    "the last value; use rankscope_run_lost_gpu_seconds_total for rates.",
    (*RUN_LABELS, "cause", "node"),
)
LAG = Declaration(
    "gauge",
    "rankscope_rank_lag_ratio",
    "Time that the other ranks of the group would save if the rank were like them, as a ratio of the step; negative "
    "for a rank that waits longer than they do. Absent while the run hangs or may hang.",
    ("run", "rank", "owner"),
)
NOT_JUDGED = Declaration(
    "gauge",
    "rankscope_exporter_runs_not_judged",
    "Living runs that are not diagnosed because of limits: `too_many_runs` (more than 64, or 16 with 64 ranks of one "
    "owner), `too_much_cpu_time` (their diagnosis takes more than their owner's share of 0.1 cores).",
    ("owner", "reason"),
)
TEXT_LIMIT = 1000
"""Bytes of a text: users choose the names in it, and a Prometheus may refuse a scrape with longer labels."""
RUN_NOT_JUDGED = Declaration(
    "gauge",
    "rankscope_exporter_run_not_judged_info",
    "Living runs that this exporter does not diagnose, except for limits: it does not read all their ranks "
    "(`ranks_elsewhere`) or GPUs (`gpus_unknown`), or their records have impossible values. An analyzer may.",
    (*RUN_LABELS, "reason"),
)
LIMIT_METRICS = (NOT_JUDGED, RUN_NOT_JUDGED)
CULPRIT_RUNS = Declaration(
    "gauge",
    "rankscope_gpu_culprit_runs",
    "Runs of the last seven days in which the GPU was the culprit, with evidence against it and not only against the "
    "script (docs/chronic-gpus.md). Only with `--state-dir`. An exporter counts the "
    "runs that are whole on its node, and the analyzer those that span nodes.",
    ("gpu", "uuid", "node"),
    source="the exporter's state",
)
METRICS = (JUDGED, FINDING, SINCE, EVIDENCE, INFO, PEAK, MEAN, END, LOST, LOST_SECONDS, SPENT, LAG)


class Findings:
    """The collector that updates the diagnosis with each scan and shows its result."""

    name = "findings"
    help = "what training runs lose their time to, which rank causes it, and why"
    metrics = METRICS

    def __init__(self, diagnosis: DiagnosisService) -> None:
        self._diagnosis = diagnosis
        self._texts = FindingTexts()

    def poll(self, scan: Scan) -> list[Metric]:
        """Judge every run."""
        return families(self._diagnosis.update(scan), self._texts)


class FindingTexts:
    """The words of the open findings. Each is described once, or its numbers would be a new series each second."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, ...], tuple[str, ...]] = {}

    def update(self, verdicts: Iterable[Verdict]) -> dict[tuple[str, ...], float]:
        """Return the labels of these verdicts' findings with their words."""
        texts = {}
        for verdict in verdicts:
            for finding in verdict.findings:
                labels = _labels(verdict.run, finding)
                texts[labels] = self._texts.get(labels) or _describe(verdict.run, finding.candidate)
        self._texts = texts
        return {(*labels, *said): 1.0 for labels, said in texts.items()}


def _describe(run: Run, candidate: Candidate) -> tuple[str, ...]:
    return tuple(
        text.encode()[:TEXT_LIMIT].decode(errors="ignore")
        for text in (words.sentence(run, candidate), words.evidence(candidate), words.advice(candidate))
    )


def families(diagnosis: Diagnosis, texts: FindingTexts, by: str = "") -> list[Metric]:
    """Return the metrics of a diagnosis, which `by` has made; by default the node of its ranks."""
    values = _values(diagnosis, by)
    values[INFO] = texts.update(diagnosis.look.judged.verdicts)
    found = diagnosis.look.not_judged()
    reasons = {(*run[:2], reason): 1.0 for run, reason in found.items() if reason not in LIMITS}
    not_judged = [] if by else [RUN_NOT_JUDGED.family(reasons)]
    return [
        *(declared.family(of) for declared, of in values.items()),
        NOT_JUDGED.family(diagnosis.limited),
        CULPRIT_RUNS.family(diagnosis.culprits),
        *not_judged,
    ]


def _values(diagnosis: Diagnosis, by: str) -> dict[Declaration, dict[tuple[str, ...], float]]:
    values: dict[Declaration, dict[tuple[str, ...], float]] = {declared: {} for declared in METRICS}
    verdicts = diagnosis.look.judged.verdicts
    # Trainings with one name have series together: the mean of their ratios, and the sum of their seconds.
    trainings = Counter(verdict.run[:2] for verdict in verdicts if verdict.lost)
    for verdict in verdicts:
        run = verdict.run[:2]
        if verdict.is_ready:
            values[JUDGED][(*run, by or _node(verdict))] = 1.0
        for cause, ratio in verdict.lost.items():
            before = values[LOST].get((*run, cause), 0.0)
            values[LOST][(*run, cause)] = before + ratio / trainings[run]
        values[LOST_SECONDS].update({(*run, cause): lost for cause, lost in diagnosis.lost[run].items()})
        values[LAG].update({(run[0], str(rank), run[1]): lag for rank, lag in _lags(verdict)})
        for finding in verdict.findings:
            labels = _labels(verdict.run, finding)
            values[FINDING][labels] = finding.candidate.ratio
            values[SINCE][labels] = diagnosis.look.unix - (verdict.at - finding.since)
            values[EVIDENCE].update({(*labels, name): n for name, n in finding.candidate.evidence.items()})
    _add_accounts(diagnosis, values, is_of_node=not by)
    return values


def _add_accounts(
    diagnosis: Diagnosis, values: Mapping[Declaration, dict[tuple[str, ...], float]], *, is_of_node: bool
) -> None:
    judged = {verdict.run for verdict in diagnosis.look.judged.verdicts}
    for account, seconds in diagnosis.spent:
        run = account.run, account.owner
        # After a restart without a saved state the time is divided again: a cause that it no longer has is 0.
        causes = {**dict.fromkeys(CAUSES if run in judged else (), 0.0), **seconds}
        node = account.node if is_of_node else ""
        values[SPENT].update({(*run, cause, node): spent for cause, spent in causes.items()})
    for entry in diagnosis.findings:
        labels = tuple("" if entry[name] is None else str(entry[name]) for name in FINDING_LABELS)
        values[PEAK][labels], values[MEAN][labels] = entry["ratio"], entry["mean"]
        values[END].pop(labels, None)
        if "end" in entry:
            values[END][labels] = entry["end"]


def _node(verdict: Verdict) -> str:
    facts = verdict.facts
    if facts and facts.ranks:
        return facts.ranks[0].now.node
    return facts.ended[0].node if facts and facts.ended else ""


def _lags(verdict: Verdict) -> Iterator[tuple[int, float]]:
    for one in verdict.facts.ranks if verdict.facts and not verdict.may_hang else ():
        if one.lag is not None:
            yield one.rank, one.lag


def _labels(run: Run, finding: Finding) -> tuple[str, ...]:
    candidate, place = finding.candidate, finding.candidate.place
    rank = place.rank_label or "".join(run[2:])
    what = candidate.kind, candidate.cause, finding.severity
    return *run[:2], *what, rank, place.group, place.node, place.gpu, place.uuid, place.port, place.place
