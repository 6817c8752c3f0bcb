"""The parts in their order, each in a thread of its own: a driver that does not answer costs one part, not all."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pynvml
from validation.gpu_check import comparison, report, smi
from validation.gpu_check.calls import calls
from validation.gpu_check.cost import COST, cost, logged, unprivileged
from validation.gpu_check.effects import PART as LOAD
from validation.gpu_check.exporter import Exporter, Recorder, end_started, running
from validation.gpu_check.facts import facts
from validation.gpu_check.hook import PART as HOOK
from validation.gpu_check.hook import hook
from validation.gpu_check.instead import judge_rules
from validation.gpu_check.loaded import under_load
from validation.gpu_check.report import Check, surviving

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.links import pcie_bytes
from rankscope_exporter.registry import GPU_COLLECTORS

EVERYTHING = tuple(f"--collector.{collector.name}" for collector in GPU_COLLECTORS)

GOODBYE = 5.0  # seconds for a part to judge what it has, once what it waits for was ended

AT_REST = "nvidia-smi, at rest"

Part = Callable[[], Iterator[Check]]


class NoGpuError(Exception):
    """There is nothing to check."""


def run(path: Path, limit: float, scale: float, load: Sequence[str], only: str = "") -> None:
    """Everything, or the parts with `only` in their names; the report is at `path` when this returns.

    Raises NoGpuError.
    """
    device, ends = first_gpu(), time.monotonic() + limit
    checks: list[Check] = []
    began, where = time.time(), conditions(device)
    parts: tuple[tuple[str, float, Part], ...] = (
        ("facts about the driver", 60, lambda: facts(device)),
        ("cost of the driver's calls", 60, lambda: calls(device)),
        (LOAD, 300, lambda: with_everything(device, load, scale, path)),
        (COST, 90, lambda: by_default(scale)),
        ("as nobody", 90, lambda: unprivileged(5 * scale)),
        (HOOK, 200, hook),
    )
    for name, seconds, part in parts:
        if only not in name:
            continue
        print(f"gpu-check: {name}", flush=True)
        checks += attempt(name, part, min(seconds, ends - time.monotonic()))
        report.keep(path, {**where, "seconds": round(time.time() - began)}, checks)
    print(f"gpu-check: {len(checks)} checks in {time.time() - began:.0f} s: {path.with_suffix('.md')}")


def first_gpu() -> Device:
    """The GPU whose driver is asked for facts. Raises NoGpuError."""
    try:
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount():
            return Device(0)
    except (pynvml.NVMLError, DriverError) as error:
        raise NoGpuError(str(error)) from error
    raise NoGpuError("the driver reports none")


def attempt(name: str, part: Part, seconds: float) -> list[Check]:
    """The part's checks, as far as it comes within its time."""
    found: list[Check] = []
    if seconds <= 0:
        return [Check(name, "this part", "failed", note="there was no time left for it")]
    thread = threading.Thread(target=_collect, args=(name, part, found), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive():
        return found
    end_started()
    thread.join(GOODBYE)
    return [*found, Check(name, "this part", "failed", note=f"did not end within {seconds:.0f} s")]


def _collect(name: str, part: Part, found: list[Check]) -> None:
    for check in surviving(name, "this part", part()):
        found.append(check)  # noqa: PERF402  # one by one: another thread looks before the last has come


def with_everything(device: Device, load: Sequence[str], scale: float, path: Path) -> Iterator[Check]:
    """One exporter with all collectors: at rest beside nvidia-smi, under the load, and at every scrape."""
    with running(*EVERYTHING) as exporter:
        with Recorder(exporter) as recorder:
            yield from surviving(AT_REST, "nvidia-smi", comparison.compare(AT_REST, recorder))
            yield from surviving(AT_REST, "evidence", evidence(path, exporter))
            yield from under_load(recorder, lambda: pcie_bytes(device), load, scale)
        yield from judge_rules(recorder.scrapes)
        yield logged(LOAD, [*recorder.errors, *exporter.complaints()])


def evidence(path: Path, exporter: Exporter) -> Iterator[Check]:
    """What is judged, as it is, beside the report: to make fixtures of and to judge anew."""
    document, body = path.with_suffix(".xml"), path.with_suffix(".prom")
    document.write_text(smi.without_identity(smi.query()), encoding="utf-8")
    body.write_text(exporter.body(), encoding="utf-8")
    yield Check(AT_REST, "kept as it was", "measured", body.name, document.name)


def by_default(scale: float) -> Iterator[Check]:
    """One as it is without a flag."""
    with running() as exporter:
        time.sleep(3 * scale)  # start-up is over
        yield from cost(exporter, 30 * scale)
        yield logged(COST, exporter.complaints())


def conditions(device: Device) -> dict[str, object]:
    """Where and when this was."""
    gpu = f"{device.name()}, driver {device.driver_version()}, CUDA {device.cuda_version()}"
    machine = f"{platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}, uid {os.geteuid()}"
    return {"GPU": gpu, "machine": machine, "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
