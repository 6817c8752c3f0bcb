"""The hook on the GPU: small DDP trainings with and without it, judged by the profiler, the wall clock and each other.

`python -m benchmarks.gpu_check.hook` is this part alone, with a report of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import report
from benchmarks.gpu_check.exporter import STARTED, environment
from benchmarks.gpu_check.report import Check, Outcome, judge, number, surviving
from benchmarks.simulated_node import free_port

PART = "hook on the GPU"
MARKS = (
    10  # of a step of this training: where data wait, forward, backward, collective wait and optimizer begin and end
)
HOST = 3e-4  # seconds

# What is trained: how many ranks on the one GPU, and the job's options. gloo copies gradients through the host.
JOBS: dict[str, tuple[int, Sequence[str]]] = {
    "one rank, NCCL": (1, ("--backend=nccl",)),
    "two ranks, gloo": (2, ("--backend=gloo", "--width=1024", "--pairs=0")),
}

Told = Mapping[str, Any]


def hook(options: Sequence[str] = ()) -> Iterator[Check]:
    """All jobs, with more options for each. One line says it where torch sees no GPU."""
    for name, (ranks, own) in JOBS.items():
        lines = run(ranks, [*own, *options])
        skipped = [line["skipped"] for line in lines if "skipped" in line]
        if skipped:
            yield Check(PART, "this part", "skipped", note=skipped[0])
            return
        yield from surviving(PART, name, judged(name, lines))


def run(ranks: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """What the ranks told; a rank that failed tells its last words."""
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        # cuBLAS is deterministic only with a workspace of fixed size.
        fixed = {**rendezvous, "RANKSCOPE_RUN_DIR": directory, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        processes = [_start(options, {**fixed, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
        return [line for process in processes for line in _told(process)]


def _start(options: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check.hook_job", *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env={**environment(), **variables}, stdout=pipe, stderr=pipe, text=True)
    STARTED.append(process)
    return process


def _told(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    output, errors = process.communicate()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return lines if process.returncode == 0 else [*lines, {"failed": errors.strip()[-600:]}]


def judged(name: str, lines: Sequence[Told]) -> Iterator[Check]:
    """The checks of one job; of several ranks, each rank's."""
    judges: dict[str, Callable[[str, Told], Iterator[Check]]] = {
        "identical": _identical,
        "overhead": _overhead,
        "waiting": _waiting,
        "timeline": _timeline,
        "besides": _besides,
    }
    for line in lines:
        if "failed" in line:
            yield Check(PART, name, "failed", note=line["failed"])
        elif "check" in line:
            about = f"{name}, rank {line['rank']}"
            yield from surviving(PART, about, judges[line["check"]](about, line))


def _identical(about: str, told: Told) -> Iterator[Check]:
    outcome: Outcome = "ok" if told["hook"] else "differs"
    if not told["control"]:
        outcome = "measured"  # the training does not even repeat itself
    ours, theirs = ("identical" if told[which] else "different" for which in ("hook", "control"))
    note = "with the hook and without; twice without"
    yield Check(PART, f"{about}: parameters", outcome, ours, theirs, note)


def _waiting(about: str, told: Told) -> Iterator[Check]:
    calls = told["calls"]
    for call in sorted({name for counts in calls.values() for name in counts}):
        plain = [counts.get(call, 0) for counts in (calls["plain"], calls["control"])]
        hook = calls["hook"].get(call, 0)
        outcome: Outcome = "ok" if hook <= max(plain) else "differs"
        yield Check(PART, f"{about}: {call}", outcome, str(hook), report.span(plain), "calls; twice without the hook")
    objections = told["objections"]
    outcome = "ok" if not objections["hook"] else "measured" if objections["plain"] else "differs"
    ours, theirs = (objections[which] or "nothing" for which in ("hook", "plain"))
    yield Check(PART, f"{about}: what set_sync_debug_mode objects to", outcome, ours, theirs, "with the hook; without")


def _timeline(about: str, told: Told) -> Iterator[Check]:
    device, waits = told["device"], told["profiler_waits"]
    waited = device["collective_wait"]
    note = f"seconds of {len(waits)} steps; the profiler's stream before the optimizer"
    # Where the host waits too (gloo) it needs a moment, under the profiler, from there to the optimizer's first kernel.
    yield judge(PART, f"{about}: exposed wait", [waited], sum(waits), 0.02 * sum(waits) + HOST * len(waits), note)
    whole = sum(device.values())
    yield judge(PART, f"{about}: all phases", [whole], told["wall"], 0.01 * told["wall"], "seconds; the wall clock")
    for phase, seconds in device.items():
        if seconds:
            yield Check(PART, f"{about}: {phase}", "measured", number(seconds), note="seconds of the device's")


def _besides(about: str, told: Told) -> Iterator[Check]:
    """The allocator is asked at a step's end, before the gradients are given back."""
    for name, ours in told["ours"].items():
        theirs = told["theirs"][name]
        slack = 0.0 if name == "copy_bytes" else 0.2 * theirs
        yield judge(PART, f"{about}: {name}", [ours] if ours else [], theirs, slack, "bytes; the profiler's or torch's")


def _overhead(about: str, told: Told) -> Iterator[Check]:
    step = f"of a step of {told['step']:.0f} µs"
    for name in ("hook", "hook, every step measured", "control"):
        median, low, high = told[name]
        yield Check(PART, f"{about}: {name}", "measured", f"{median:+.1f} µs", f"[{low:+.1f}, {high:+.1f}]", step)
    mark = (told["hook, every step measured"][0] - told["hook"][0]) / MARKS
    yield Check(PART, f"{about}: a mark", "measured", f"{mark:.1f} µs", note="10 µs are reckoned with")


def main() -> None:
    """This part, and its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the report; Markdown goes beside it")
    parser.add_argument("--job", default="", help="more options of hook_job.py")
    options = parser.parse_args()
    machine = f"{platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    began = time.time()
    checks = list(surviving(PART, "this part", hook(options.job.split())))
    report.keep(options.json, {"machine": machine, "seconds": round(time.time() - began)}, checks)
    print(options.json.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
