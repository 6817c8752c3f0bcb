"""Part 2: the exporter under the known load, and nvidia-smi asked once more while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from validation.gpu_check import comparison
from validation.gpu_check.effects import BEFORE, FULL, PART, around, judge_effects
from validation.gpu_check.exporter import STARTED, Recorder, Scrape, values
from validation.gpu_check.report import Check, judge, missing, number, surviving
from validation.gpu_check.wrap import Counts, Watch, judge_wrap

LOAD = Path(__file__).with_name("load.py")
UNDER_LOAD = "nvidia-smi, under load"
COMPARE_AFTER = 5.0  # seconds into the full load: clocks and power have settled

# What is judged here and not by a row of effects.py.
JUDGED_HERE = frozenset(
    f"rankscope_gpu_{name}"
    for name in (
        "energy_joules_total",
        "last_busy_timestamp_seconds",
        "pcie_throughput_bytes_per_second",
        "state_seconds_total",
    )
)


Phases = Mapping[str, Mapping[str, Any]]
"""What each phase that has ended did, by name."""


class LoadProcess:
    """The load, and what it has told so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.told: list[dict[str, Any]] = []
        self._process = process
        self._thread = threading.Thread(target=self._read, name="load", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether there will be no more."""
        return not self._thread.is_alive()

    def began(self, phase: str) -> float | None:
        """Unix time."""
        return next((line["began"] for line in self.told if line.get("phase") == phase), None)

    def phases(self) -> dict[str, dict[str, Any]]:
        """Those that have ended, by name."""
        return {line["phase"]: line for line in self.told if "ended" in line}

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # a library may have something to say too
                self.told.append(json.loads(line))


@contextmanager
def _running(options: Sequence[str], errors: Path) -> Iterator[LoadProcess]:
    # Without our folders on its path: of the machine it needs torch, of us nothing.
    command = [sys.executable, str(LOAD), *options]
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        STARTED.append(process)
        try:
            yield LoadProcess(process)
        finally:
            process.kill()


def under_load(
    recorder: Recorder, counters: Callable[[], Counts], options: Sequence[str] = (), scale: float = 1.0
) -> Iterator[Check]:
    """Every check of this part; the scrapes stay in the recorder."""
    with tempfile.TemporaryDirectory() as name:
        errors = Path(name, "errors")
        with _running([*options, f"--scale={scale}"], errors) as load, Watch(counters) as watch:
            yield from _while_it_runs(load, recorder, scale)
        phases = load.phases()
        if not phases:
            yield Check(PART, "the load", "failed", note=errors.read_text(errors="replace")[-500:])
            return
    yield from surviving(PART, "the load's effects", _judge(load.told, phases, recorder.scrapes, scale))
    yield from judge_wrap(phases, watch.samples)


def _judge(
    told: Sequence[Mapping[str, Any]], phases: Phases, scrapes: Sequence[Scrape], scale: float
) -> Iterator[Check]:
    uuid = _uuid(told[0], scrapes)
    yield Check(PART, "the load's GPU", "measured", uuid, str(told[0]))
    for line in told:
        if "failed" in line:
            yield Check(PART, line["failed"], "failed", note=line["error"])
    yield from judge_effects(phases, scrapes, uuid, scale)
    yield from surviving(PART, "memory", _held(phases, scrapes, uuid, told[0]["pid"], scale))
    yield from surviving(PART, "energy", _energy(phases, scrapes, uuid, scale))
    yield from surviving(PART, "time", _time(phases, scrapes, uuid, scale))
    yield from surviving(PART, "rates", _rates(phases, scrapes, uuid, scale))


def _while_it_runs(load: LoadProcess, recorder: Recorder, scale: float) -> Iterator[Check]:
    compared = False
    while not load.ended:
        time.sleep(0.1)
        began = load.began(FULL)
        if began and not compared and time.time() > began + COMPARE_AFTER * scale:
            compared = True
            yield from surviving(UNDER_LOAD, "nvidia-smi", comparison.compare(UNDER_LOAD, recorder))


def _uuid(described: Mapping[str, Any], scrapes: Sequence[Scrape]) -> str:
    """The load's GPU as the driver names it; that of a load on the CPU is taken to be the first."""
    series = scrapes[-1].select("rankscope_gpu_up") if scrapes else {}
    by_index = {dict(labels)["gpu"]: dict(labels)["uuid"] for _, labels in series}
    return str(described["uuid"]) if described["uuid"] in by_index.values() else by_index.get("0", "")


def _held(phases: Phases, scrapes: Sequence[Scrape], uuid: str, pid: int, scale: float) -> Iterator[Check]:
    """A tensor of a known size, beside what was used just before it."""
    if not (done := phases.get("hold memory")):
        return
    before = [s for s in scrapes if done["began"] - 2 * BEFORE * scale <= s.at <= done["began"]]
    during = [s for s in scrapes if done["began"] + 1.5 * scale <= s.at <= done["ended"]]
    for name in ("memory_used_bytes", "processes_memory_bytes"):
        old, new = (values(some, f"rankscope_gpu_{name}", uuid=uuid) for some in (before, during))
        grown = [max(new) - old[-1]] if old and new else []
        yield judge(PART, f"hold memory: {name}, grown", grown, float(done["bytes"]), 2.0**21)
    of_pid = values(during, "rankscope_gpu_process_memory_bytes", uuid=uuid, pid=str(pid))
    note = "at least as much; absent if the driver sees another pid namespace than ours"
    outcome = missing(False, True) if not of_pid else "ok" if min(of_pid) >= done["bytes"] else "differs"
    yield Check(
        PART, "hold memory: process_memory_bytes of its pid", outcome, f"{of_pid[-1:]}", number(done["bytes"]), note
    )


def _energy(phases: Phases, scrapes: Sequence[Scrape], uuid: str, scale: float) -> Iterator[Check]:
    """The energy counter beside the sum of power times time."""
    for name in (FULL, "idle"):
        if not (done := phases.get(name)):
            continue
        during = around(done, scrapes, scale)
        joules = values(during, "rankscope_gpu_energy_joules_total", uuid=uuid)
        watts = values(during, "rankscope_gpu_power_watts", uuid=uuid)
        times = [scrape.at for scrape in during]
        if len(joules) < 2 or len(watts) != len(times):
            yield Check(PART, f"{name}: energy_joules_total", missing(len(joules) > 1, False))
            continue
        area = sum(w * (b - a) for w, a, b in zip(watts[1:], times, times[1:], strict=False))
        grown = joules[-1] - joules[0]
        yield judge(PART, f"{name}: energy_joules_total", [grown], area, 0.1 * area, "beside the integral of our power")


def _time(phases: Phases, scrapes: Sequence[Scrape], uuid: str, scale: float) -> Iterator[Check]:
    """When the GPU was last busy, and that its states partition time."""
    if done := phases.get(FULL):
        last = values(around(done, scrapes, scale), "rankscope_gpu_last_busy_timestamp_seconds", uuid=uuid)
        yield judge(PART, f"{FULL}: last_busy_timestamp_seconds", last[-1:], done["ended"], 1.5, "the phase's end")
    spent = [(s.at, sum(s.select("rankscope_gpu_state_seconds_total", uuid=uuid).values())) for s in scrapes]
    grown = [spent[-1][1] - spent[0][1]] if spent else []
    passed = spent[-1][0] - spent[0][0] if spent else None
    yield judge(PART, "all the time: state_seconds_total", grown, passed, 2.0, "all states together; time passed")


def _rates(phases: Phases, scrapes: Sequence[Scrape], uuid: str, scale: float) -> Iterator[Check]:
    """What the load reached, and the blocking call for PCIe while it uploads."""
    for name, done in phases.items():
        for what in ("flops", "bytes"):
            if done[what] and done["busy_seconds"]:
                rate = done[what] / done["busy_seconds"]
                yield Check(PART, f"{name}: {what} a second", "measured", theirs=f"{rate:.4g}")
    if uploaded := phases.get("upload"):
        metric = "rankscope_gpu_pcie_throughput_bytes_per_second"
        seen = values(around(uploaded, scrapes, scale), metric, uuid=uuid, direction="receive")
        rate = uploaded["bytes"] / uploaded["busy_seconds"]
        about = "upload: pcie_throughput_bytes_per_second receive, at most"
        yield judge(PART, about, [max(seen)] if seen else [], rate, 0.25 * rate)
