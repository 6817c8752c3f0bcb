"""What torch.profiler's Chrome trace says of the same training: the waits of the stream, synchronisations, uploads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    stretches = [e for e in _of(events, frozenset({"user_annotation"})) if e["name"] == annotation]
    found = (_wait(works, stretch["ts"], stretch["ts"] + stretch["dur"]) for stretch in stretches)
    return [wait for wait in found if wait is not None]


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


def _of(events: Iterable[Event], categories: frozenset[str]) -> Iterator[Event]:
    return (event for event in events if event.get("ph") == "X" and event.get("cat") in categories)
