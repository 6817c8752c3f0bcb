"""A run that is slower than it was, at the same work in each step.

A step takes at least `slower` longer than before, for `slower_seconds`. Only the time counts that is no loss of another
kind: waits for other ranks, data and copies do not. Steps do the same work if the numbers of samples, tokens, copied
bytes, backward passes, collectives and their bytes have not changed, as far as they are counted. Causes are what has
changed in the median rank, and explains more than `cause` of the longer steps:

- `throttled`, `clocks`: its GPU has a lower clock, and is throttled for longer or not
- `foreign_process`: its GPU is shared with more processes that are not ranks
- `cpu_contention`: its training thread waits for CPU time
- `io`, `other`: time outside of the model, in which its process uses no more CPU time, or does. Only if samples or
  tokens are counted: otherwise steps may do more
- `unknown`: none of these. Only if tokens are counted

`diagnosis/speed.py` compares. The account of lost time has the time as useful work, except that outside of the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.speed import SPAN_ROWS

KIND = "slowdown"
_EVIDENCE = {"throttled": "clock", "clocks": "clock", "foreign_process": "processes", "cpu_contention": "run_queue"}
"""What shows a cause, in addition to the seconds of a step."""


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield a run that is slower than it was."""
    slower = past.slower
    if slower is None or not window.run.ranks:
        return
    evidence = {"step_seconds": slower.now.seconds, "step_seconds_before": slower.before.seconds}
    if name := _EVIDENCE.get(slower.cause):
        evidence[name] = slower.now.state[name]
    lasted = window.run.ranks[0].now.at - slower.since
    needed = window.thresholds.slower_seconds
    yield Candidate(KIND, slower.ratio, slower.cause, evidence=evidence, lasted=lasted, needed=needed)


DETECTORS = (
    StateDetector(
        KIND,
        detect,
        ends_late=3 / SPAN_ROWS,
        explained_by=(
            "straggler",
            "rotating_straggler",
            "launch",
            "device_reads",
            "throttling",
            "cpu_fallback",
            "hang",
        ),
        explained_by_cause=(("cpu_contention", ("data", "cpu")),),  # too few CPUs slow down the loaders, too
    ),
)
