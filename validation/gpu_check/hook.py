"""The hook on the GPU: small trainings with and without it, judged by the profiler, the clock and what the job did.

`python -m validation.gpu_check --only hook` is this part alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from testing.simulated_node import free_port
from validation.gpu_check import report
from validation.gpu_check.exporter import STARTED, environment
from validation.gpu_check.report import Check, Outcome, judge, number, surviving

from rankscope.record.sampling import is_sampled
from rankscope.timeline.device_clock import SECONDS_PER_MARK, STEADY

PART = "hook on the GPU"
HOST = 3e-4  # seconds that the host needs, under the profiler, from one call to the next
BLOCKED = 0.1  # of the device's wait: a host that waits along with it is there for all of it
DRY, BUSY = 0.5, 0.02  # of the device's time: at least, where the host is slow; at most, where the device is
LAST = 12  # measured steps by whose numbers it is told how they were chosen
LEVELS = range(1, 12)  # one of 2 to 2048 steps
MARKS_A_SECOND = 2**STEADY / SECONDS_PER_MARK  # with as many more as the clock lets there be before it measures less
JOB_LIMIT = 90.0  # seconds: one that hangs costs itself

FEW = ("--steps=12",)
# What is trained, in a process of its own each: how many ranks on the one GPU, and the job's options.
JOBS: dict[str, tuple[int, Sequence[str]]] = {
    "DDP": (1, ("--backend=nccl",)),
    **{way: (1, ("--backend=nccl", f"--way={way}", *FEW)) for way in ("fsdp2", "by_hand", "async_op")},
    # gloo copies gradients through the host.
    "DDP, two ranks, gloo": (2, ("--backend=gloo", "--width=1024", *FEW)),
    "cost": (1, ("--backend=nccl", "--only=overhead", "--pairs=15")),
    "hsdp": (1, ("--backend=nccl", "--way=hsdp", *FEW)),
}

Told = Mapping[str, Any]


def hook(options: Sequence[str] = ()) -> Iterator[Check]:
    """All jobs, with more options for each. One line says it where torch sees no GPU."""
    for name, (ranks, own) in JOBS.items():
        lines = run(ranks, [*own, *options])
        if missing := [line["no_gpu"] for line in lines if "no_gpu" in line]:
            yield Check(PART, "this part", "skipped", note=missing[0])
            return
        yield from surviving(PART, name, judged(name, lines))


def run(ranks: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """What the ranks told; a rank that failed tells its last words."""
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        # cuBLAS is deterministic only with a workspace of fixed size.
        fixed = {**rendezvous, "RANKSCOPE_RUN_DIR": directory, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        processes = [_start(options, {**fixed, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
        ends = time.monotonic() + JOB_LIMIT
        return [line for process in processes for line in _told(process, ends)]


def _start(options: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "validation.gpu_check.hook_job", *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env={**environment(), **variables}, stdout=pipe, stderr=pipe, text=True)
    STARTED.append(process)
    return process


def _told(process: subprocess.Popen[str], ends: float) -> list[dict[str, Any]]:
    why = ""
    try:
        output, errors = process.communicate(timeout=max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        why = f"did not end within {JOB_LIMIT:.0f} s. "
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return lines if process.returncode == 0 else [*lines, {"failed": (why + errors.strip()[-600:]).strip()}]


def judged(name: str, lines: Sequence[Told]) -> Iterator[Check]:
    """The checks of one job; of several ranks, each rank's."""
    judges: dict[str, Callable[[str, Told], Iterator[Check]]] = {
        "identical": _identical,
        "overhead": _overhead,
        "waiting": _waiting,
        "timeline": _timeline,
        "gaps": _gaps,
        "sampling": _sampling,
        "besides": _besides,
    }
    for line in lines:
        if "failed" in line:
            yield Check(PART, name, "failed", note=line["failed"])
        elif "skipped" in line:
            yield Check(PART, name, "skipped", note=line["skipped"])
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
    note = f"seconds in {len(waits)} stalls of the profiler's main stream"
    # Where the host waits too (gloo), or a stall finds the device dry, it needs a moment from here to there.
    yield judge(PART, f"{about}: exposed wait", [waited], sum(waits), 0.02 * sum(waits) + HOST * len(waits), note)
    whole = sum(device.values())
    yield judge(PART, f"{about}: all phases", [whole], told["wall"], 0.01 * told["wall"], "seconds; the wall clock")
    yield from _steps(about, told["steps"], told["profiler_steps"])
    for phase, seconds in device.items():
        if seconds:
            yield Check(PART, f"{about}: {phase}", "measured", number(seconds), note="seconds of the device's")
    if told["is_alone"]:
        yield from _host(about, told)


def _steps(about: str, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Check]:
    """The profiler does not see where the first step begins."""
    yield judge(PART, f"{about}: whole steps", [len(ours)], len(theirs) + 1, note="the profiler's, and the first")
    apart = [abs(our - their) - 0.01 * their for our, their in zip(ours[-len(theirs) :], theirs, strict=False)]
    if apart:
        outcome: Outcome = "ok" if max(apart) <= HOST else "differs"
        shown = report.span(ours[-len(theirs) :]), report.span(theirs)
        yield Check(PART, f"{about}: each step", outcome, *shown, "seconds; from optimizer to optimizer")


def _host(about: str, told: Told) -> Iterator[Check]:
    """What the host did meanwhile: it reads each loss, and never waits for the communication."""
    host, waited = told["host"], told["device"]["collective_wait"]
    outcome: Outcome = "ok" if host["collective_wait"] <= BLOCKED * waited else "differs"
    shown = number(host["collective_wait"]), number(waited)
    note = f"seconds of the host's; of the device's, of which it may be {BLOCKED:.0%}"
    yield Check(PART, f"{about}: collective_wait of the host", outcome, *shown, note)
    slack = 0.02 * told["waited"] + HOST * told["waits"]
    note = "seconds of the host's; the job's own"
    yield judge(PART, f"{about}: device_wait of the host", [host["device_wait"]], told["waited"], slack, note)
    yield judge(PART, f"{about}: device waits", [told["device_waits"]], told["waits"], note="the job's own")
    ours, theirs = told["collectives"], told["issued"]
    for op in sorted(ours.keys() | theirs.keys()):
        note = "collectives; those that the job issued"
        yield judge(PART, f"{about}: {op}", [ours.get(op, 0)], theirs.get(op, 0), note=note)


def _gaps(about: str, told: Told) -> Iterator[Check]:
    found = told["found"]
    for name, least, most in (("busy", 0.0, BUSY), ("launch-bound", DRY, 1.0)):
        dry = sum(found[name]["dry"].values()) / found[name]["device"]
        outcome: Outcome = "ok" if least <= dry <= most else "differs"
        yield Check(PART, f"{about}: dry, {name}", outcome, number(dry), f"{least} … {most}", "of the device's time")
    ours, note = found["pausing"]["dry"].get("other", 0.0), "seconds of other; those that the host slept"
    yield judge(PART, f"{about}: dry, pausing", [ours], told["paused"], 0.1 * told["paused"], note)


def _sampling(about: str, told: Told) -> Iterator[Check]:
    last = told["numbers"][-LAST:]
    level = next((level for level in LEVELS if last == _sampled(last, level)), None)
    outcome: Outcome = "differs" if level is None or len(last) < LAST else "ok"
    expected = "one of 2^k in each 2^k" if level is None else f"one in each {2**level}"
    yield Check(PART, f"{about}: measured steps", outcome, " ".join(map(str, last)), expected, "numbers of the last")
    note = f"seconds of measured steps; the host's of the same, which take {1e6 * told['step']:.0f} µs without the hook"
    yield judge(PART, f"{about}: their length", [told["device"]], told["host"], 0.05 * told["host"], note)


def _sampled(numbers: Sequence[int], level: int) -> list[int]:
    return [step for step in range(numbers[0], numbers[-1] + 1) if is_sampled(step, level)] if numbers else []


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
    if "marks in a step" not in told:
        return
    mark = (told["hook, every step measured"][0] - told["hook"][0]) / told["marks in a step"]
    note = f"10 µs are reckoned with; {told['marks in a step']:.1f} in a step"
    yield Check(PART, f"{about}: a mark", "measured", f"{mark:.1f} µs", note=note)
    # One step more or less is measured in a stretch of time.
    a_second, most = told["marks in a second"], MARKS_A_SECOND + told["marks in a step"] / told["seconds"]
    outcome: Outcome = "ok" if a_second <= most else "differs"
    yield Check(PART, f"{about}: marks a second", outcome, f"{a_second:.1f}", f"{most:.1f}", "at most")
