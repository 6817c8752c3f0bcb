"""The findings of a run from a Prometheus, with the times, the ratios and the words that the exporter's journal has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus, quoted
from rankscope.record.group_name import members
from rankscope_exporter.diagnosis import words
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.job_report.job import Job, JobFinding

Connect = Callable[[float | None], Prometheus]
"""A function that returns a client which queries a Prometheus at that time."""
Key = tuple[tuple[str, str], ...]

KEY = ("kind", "cause", "rank", "group", "node", "gpu", "uuid", "port", "place")
"""The labels that stay the same while a finding is open."""
SAMPLES, LEAST_STEP, LARGEST_STEP = 10_000, 1, 60
"""The number of moments in a run's life that are looked at, and the seconds between two of them."""
SAME = 15.0
"""Begins of one finding differ by less, in seconds: the node's clock is adjusted."""
SCRAPED_AFTER = 300.0
"""The longest time after a finding's end until a Prometheus scrapes its end, in seconds."""
FINDINGS_LIMIT = 50
DIGITS = 12
"""The most digits of a unix time."""


@dataclass(frozen=True)
class _Occurrence:
    """One time that a finding was open, in unix time. `last` is when it was last seen."""

    key: Key
    severity: str
    begin: float
    last: float
    until: float
    """The begin of the next one with this key."""


def findings(connect: Connect, where: str, job: Job) -> Iterator[JobFinding]:
    """Yield the findings that the exporter had in a run, the oldest first. `where` are the run's matchers."""
    seconds = job.end - job.began + SCRAPED_AFTER
    step = resolution(seconds)
    later, window = connect(job.end + SCRAPED_AFTER), f"[{round(seconds)}s:{step}s]"
    began = _values_of("rankscope_finding_since_timestamp_seconds", where)
    seen = later.query(f"max_over_time(timestamp({began}){window})", "kind", "severity", "value")
    ended = later.query(
        f"last_over_time({_values_of('rankscope_finding_end_timestamp_seconds', where)}{window})", "value"
    )
    ends: dict[Key, list[float]] = defaultdict(list)
    for sample in ended:
        ends[_key(sample.labels)] += _seconds(sample)
    for one in [*_occurrences(seen)][:FINDINGS_LIMIT]:
        end = min(ends[one.key], key=lambda end: abs(end - one.last), default=None)
        if end is None or not (one.begin <= end < one.until and abs(end - one.last) < SCRAPED_AFTER):
            end = None if job.ended is None and one.last >= job.end - step else one.last
        if job.ended is not None:
            end = max(min(job.ended if end is None else end, job.ended), one.begin)
        if found := _finding(connect, (job.runs[0], job.owner), where, one, end):
            yield found


def resolution(seconds: float) -> int:
    """Return the seconds between two moments that are looked at in so long a time."""
    return min(max(ceil(seconds / SAMPLES), LEAST_STEP), LARGEST_STEP)


def _values_of(metric: str, where: str) -> str:
    """Return an expression with the values of a metric as the label `value`, in whole seconds."""
    return f'count_values by ({",".join((*KEY, "severity"))}) ("value", round({metric}{{{where}}}))'


def _occurrences(seen: Sequence[Sample]) -> Iterator[_Occurrence]:
    """Yield each time that a finding was open. One that has become critical has several samples."""
    by_key: dict[Key, list[tuple[float, float, str]]] = defaultdict(list)
    for sample in seen:
        for begin in _seconds(sample):
            by_key[_key(sample.labels)].append((begin, sample.value, sample.labels["severity"]))
    found = []
    for key, times in by_key.items():
        times.sort()
        first = [0, *(i for i, (one, next_one) in enumerate(pairwise(times), 1) if next_one[0] - one[0] > SAME)]
        for i, j in pairwise([*first, len(times)]):
            begin, (_, last, severity) = times[i][0], max(times[i:j], key=lambda one: one[1])
            found.append(_Occurrence(key, severity, begin, last, times[j][0] if j < len(times) else float("inf")))
    return iter(sorted(found, key=lambda one: one.begin))


def _finding(connect: Connect, run: Run, where: str, one: _Occurrence, end: float | None) -> JobFinding | None:
    """Return the finding with its numbers; None if the Prometheus has none, or it is from another version."""
    labels = dict(one.key)
    until = min((one.last if end is None else end) + SCRAPED_AFTER, one.until)
    here = ",".join([where, *(f"{name}={quoted(text)}" for name, text in (*one.key, ("severity", one.severity)))])
    numbers = connect(until).query(
        f'last_over_time({{__name__=~"rankscope_finding_(peak_ratio|mean_ratio|evidence)",{here}}}'
        f"[{max(ceil(until - one.begin), 1)}s])"
    )
    by_name = {sample.name: sample.value for sample in numbers}
    peak = by_name.get("rankscope_finding_peak_ratio")
    if peak is None or labels["kind"] not in words.WORDS:
        return None
    candidate = Candidate(
        labels["kind"],
        peak,
        labels["cause"],
        _place(labels),
        {sample.labels["name"]: sample.value for sample in numbers if "name" in sample.labels},
    )
    return JobFinding(
        begin=one.begin,
        end=end,
        kind=candidate.kind,
        severity=one.severity,
        ratio=peak,
        sentence=words.sentence(run, candidate),
        advice=words.advice(candidate),
        mean=by_name.get("rankscope_finding_mean_ratio"),
    )


def _place(labels: Mapping[str, str]) -> Place:
    rank, group, node, gpu, uuid, port, place = (labels[name] for name in KEY[2:])
    count, _, of_many = rank.partition(" ")
    ranks = range(int(count)) if of_many and count.isdecimal() else members(rank)  # of many, only the number is known
    return Place(int(rank) if rank.isdecimal() else None, group, node, gpu, uuid, port, tuple(ranks), place)


def _seconds(sample: Sample) -> list[float]:
    """Return the value in a sample's label; none if a server that is no Prometheus sends other text."""
    text = sample.labels["value"]
    return [float(text)] if text.isdecimal() and len(text) <= DIGITS else []


def _key(labels: Mapping[str, str]) -> Key:
    return tuple((name, labels.get(name, "")) for name in KEY)
