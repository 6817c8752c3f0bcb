"""torch.profiler's timeline of kernels as the reference: for the device clock by phase, and for busy seconds.

A kernel belongs to the phase in which the host has launched it. A phase of a step lasts on the device from the begin of
its first kernel to the end of its last one.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from validation.gpu_check import dry_run
from validation.gpu_check.exporter import Scrape, recorded, running, values
from validation.gpu_check.load import AFTER, BEFORE, GAP, SIZES, Phase, make_works, run
from validation.gpu_check.report import Check, judge, ok_if, show

STEPS = 12
PHASES = ("forward", "backward", "optimizer")
KERNELS = ("cpu_op",) if dry_run.IS_DRY else ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
TOLERANCE, EDGE = 0.05, 1e-4  # ratio, and seconds of a step
BURSTS = Phase("bursts", "product", 12.0, on=0.25, off=0.25)
BUSY_RATIO, BUSY_SLACK = 0.05, 0.3
Events = Sequence[Mapping[str, Any]]
Span = tuple[float, float]


def check(what: str) -> Iterator[Check]:
    """Yield the comparison of the device clock (`timing`) or of the exporter's busy seconds (`busy`)."""
    yield from (check_timing if what == "timing" else check_busy)()


def check_timing() -> Iterator[Check]:
    """Train some steps with both, and compare the seconds by phase."""
    with dry_run.device():
        ours, events = train_profiled()
    theirs = phase_seconds(events)
    for phase in PHASES:
        reference = theirs.get(phase, 0.0)
        slack = TOLERANCE * reference + EDGE * STEPS
        yield judge(f"device clock: {phase}", [ours[phase]], reference, slack, "torch.profiler, seconds of all steps")
    busy = union(kernel_spans(events))
    yield Check("kernels ran", "measured", show(busy), note="seconds, by torch.profiler")


def train_profiled() -> tuple[dict[str, float], Events]:
    """Return the hook's device seconds by phase, and the profiler's events, of the same steps."""
    import torch
    from validation.gpu_check.hook import by_phase
    from validation.gpu_check.trainings import VOCABULARY, Job

    import rankscope
    from rankscope import attach
    from rankscope.record.reader import read_rank
    from rankscope.timeline import device_clock

    job = Job(dry_run.DEVICE, 0.0)
    model = job.model(width=512, layers=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    tokens = torch.randint(0, VOCABULARY, (16, 256 if job.is_gpu else 8), device=dry_run.DEVICE)

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.profiler.record_function("forward"):
                loss = model(tokens)
            with torch.profiler.record_function("backward"):
                loss.backward()
            with torch.profiler.record_function("optimizer"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    with patch.object(device_clock, "SECONDS_PER_MARK", 0.0):  # every step is measured
        train(3)
        rankscope.instrument()
        train(1)  # start-up ends: the device clock starts
        events = profile(torch, lambda: train(STEPS))
        attachment = attach.current()
        path = attachment.writer.path if attachment else None
        rankscope.uninstrument()
    assert path
    return by_phase(read_rank(path).slots, "device_seconds"), events


def profile(torch: Any, work: Callable[[], object]) -> Events:
    """Run the work and return the events of its trace."""
    profiler = torch.profiler
    kinds = [profiler.ProfilerActivity.CPU]
    if not dry_run.IS_DRY:
        kinds.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=kinds) as recording:
        work()
        if not dry_run.IS_DRY:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        recording.export_chrome_trace(str(path))
        events: Events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def phase_seconds(events: Events) -> dict[str, float]:
    """Return the seconds of the device by phase, summed over the steps."""
    launched = {_correlation(event): event["ts"] for event in events if event.get("cat") in LAUNCHES}
    kernels = [
        (launched.get(_correlation(event), event["ts"]), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in KERNELS
    ]
    seconds: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in PHASES:
            begin, end = event["ts"], event["ts"] + event["dur"]
            of_phase = [(start, stop) for launch, start, stop in kernels if begin <= launch <= end]
            lasted = max(stop for _, stop in of_phase) - min(start for start, _ in of_phase) if of_phase else 0.0
            seconds[event["name"]] = seconds.get(event["name"], 0.0) + lasted / 1e6
    return seconds


def _correlation(event: Mapping[str, Any]) -> object:
    """Return the number that a launch and its kernel share; the event itself if it has none."""
    return event.get("args", {}).get("correlation", id(event))


def kernel_spans(events: Events) -> Iterator[Span]:
    """Yield the begin and end of each kernel and copy, in seconds."""
    for event in events:
        if event.get("cat") in KERNELS:
            yield event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def union(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one span is open."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def check_busy() -> Iterator[Check]:
    """Compare the growth of the exporter's counters in bursts of work with the timeline of kernels."""
    with running() as (exporter, _), recorded(exporter) as scrapes:
        import torch

        works = make_works(torch, dry_run.DEVICE, **SIZES)
        synchronize = (lambda: None) if dry_run.IS_DRY else torch.cuda.synchronize
        time.sleep(GAP)
        began = time.time()
        events = profile(torch, lambda: run(BURSTS, works[BURSTS.work], synchronize))
        ended = time.time()
        time.sleep(AFTER)
        yield from judge_busy(
            union(kernel_spans(events)), [s for s in scrapes if began - BEFORE <= s.at <= ended + AFTER]
        )


def judge_busy(reference: float, scrapes: Sequence[Scrape]) -> Iterator[Check]:
    """Judge the counters of busy time by the seconds in which kernels ran."""
    for metric in ("busy_seconds_total", "graphics_active_seconds_total"):
        seen = values(scrapes, f"gpu_{metric}")
        if len(seen) < 2:
            yield Check(metric, "one side", reference=show(reference), note="no counter")
            continue
        ours, slack = seen[-1] - seen[0], BUSY_RATIO * reference + BUSY_SLACK
        shown = show(ours), f"{show(reference - slack)} to {show(reference + slack)}"
        yield Check(
            metric, ok_if(abs(ours - reference) <= slack), *shown, "seconds in which kernels ran, by torch.profiler"
        )
