"""What torch.profiler's Chrome trace says of the same training: the waits of the stream, synchronisations, uploads.

The main stream is the one that the stretches annotated as the optimizer's worked in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Event = Mapping[str, Any]

ON_THE_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALLS = frozenset({"cuda_runtime", "cuda_driver"})
SYNCHRONISING = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "cuStreamSynchronize",
    }
)
MICROSECOND = 1e-6
SHORTEST_STALL = 100.0  # microseconds; shorter ones lie between any two kernels


@dataclass(frozen=True)
class Work:
    """Something that the device did: in which stream, and when it was issued, began and ended (microseconds)."""

    stream: int
    issued: float
    began: float
    ended: float


def synchronisations(events: Iterable[Event]) -> dict[str, int]:
    """How often the host waited for the device, by call."""
    return dict(Counter(event["name"] for event in _of(events, CALLS) if event["name"] in SYNCHRONISING))


def uploaded_bytes(events: Iterable[Event]) -> int:
    """Bytes that were copied from the host to the device."""
    return sum(e["args"].get("bytes", 0) for e in _of(events, frozenset({"gpu_memcpy"})) if "HtoD" in e["name"])


def waits_before(events: Sequence[Event], annotation: str) -> list[float]:
    """Seconds in which the stream stood still before the first work of each stretch that was annotated so.

    Before the optimizer's first kernel the stream has nothing to do but to wait for the gradients' communication, if
    the host is ahead and nothing is copied out of the buckets (`gradient_as_bucket_view`).
    """
    works = sorted(_works(events), key=lambda work: work.began)
    stretches = _annotated(events, annotation)
    found = (_wait(works, stretch["ts"], stretch["ts"] + stretch["dur"]) for stretch in stretches)
    return [wait for wait in found if wait is not None]


def stalls(events: Sequence[Event], annotation: str) -> list[float]:
    """Seconds of each time in which the main stream stood still while others worked: from their first work to the last.

    The main stream waits for them then, if nothing else is issued late.
    """
    works = sorted(_works(events), key=lambda work: work.began)
    main = {stretch[-1].stream for stretch in _stretches(events, works, annotation)}
    others = [work for work in works if work.stream not in main]
    found = (_meanwhile(others, gap) for gap in _gaps([work for work in works if work.stream in main]))
    return [stall * MICROSECOND for stall in found if stall >= SHORTEST_STALL]


def steps(events: Sequence[Event], annotation: str) -> list[float]:
    """Seconds from the end of one stretch's work to that of the next: what lies between two optimizer steps' ends."""
    works = sorted(_works(events), key=lambda work: work.began)
    ends = [stretch[-1].ended for stretch in _stretches(events, works, annotation)]
    return [(after - before) * MICROSECOND for before, after in pairwise(ends)]


def _stretches(events: Sequence[Event], works: Sequence[Work], annotation: str) -> Iterator[list[Work]]:
    """What was issued within each stretch that was annotated so; works in their order."""
    for event in sorted(_annotated(events, annotation), key=lambda event: float(event["ts"])):
        if issued := [work for work in works if event["ts"] <= work.issued <= event["ts"] + event["dur"]]:
            yield issued


def _gaps(works: Sequence[Work]) -> Iterator[tuple[float, float]]:
    """From when to when nothing ran of works in their order."""
    ended = works[0].ended if works else 0.0
    for work in works:
        if work.began > ended:
            yield ended, work.began
        ended = max(ended, work.ended)


def _meanwhile(works: Sequence[Work], gap: tuple[float, float]) -> float:
    """From the begin of the first work that ran in a gap to the end of the last, as far as that is in it."""
    began, ended = gap
    within = [work for work in works if work.began < ended and work.ended > began]
    if not within:
        return 0.0
    return min(ended, max(work.ended for work in within)) - max(began, within[0].began)


def _wait(works: Sequence[Work], began: float, ended: float) -> float | None:
    first = next((work for work in works if began <= work.issued <= ended), None)
    if first is None:
        return None
    before = [work.ended for work in works if work.stream == first.stream and work.began < first.began]
    return max(0.0, first.began - max(before)) * MICROSECOND if before else None


def _works(events: Sequence[Event]) -> Iterator[Work]:
    issued = {e["args"].get("correlation"): e["ts"] for e in _of(events, CALLS)}
    for event in _of(events, ON_THE_DEVICE):
        arguments = event["args"]
        if (at := issued.get(arguments.get("correlation"))) is not None:
            yield Work(arguments["stream"], at, event["ts"], event["ts"] + event["dur"])


def _annotated(events: Iterable[Event], annotation: str) -> list[Event]:
    return [event for event in _of(events, frozenset({"user_annotation"})) if event["name"] == annotation]


def _of(events: Iterable[Event], categories: frozenset[str]) -> Iterator[Event]:
    return (event for event in events if event.get("ph") == "X" and event.get("cat") in categories)
