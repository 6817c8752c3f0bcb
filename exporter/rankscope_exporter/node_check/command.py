"""The command `rankscope check-node`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rankscope.cli.printable import printable
from rankscope.record.quantities import count as counted
from rankscope.record.quantities import duration
from rankscope_exporter.child import Child
from rankscope_exporter.documents import DocumentError
from rankscope_exporter.node_check.gpu_checks import check_gpus, in_use
from rankscope_exporter.node_check.host_checks import check_host, read_host
from rankscope_exporter.node_check.kernel_log import check_log, read_xids
from rankscope_exporter.node_check.readings import Facts, Gpu, Load, Sample
from rankscope_exporter.node_check.result import LABELS, Result
from rankscope_exporter.node_check.selection import SelectionError, select, wanted

OK, FAILED, UNUSABLE, IN_USE = 0, 1, 2, 3
"""Exit statuses. 2 is also that of a wrong command line."""
FACTS_WITHIN = 15.0  # seconds: without persistence mode, the first call initializes each GPU
LOAD_FOR = 10.0
LOAD_WITHIN = 35.0  # seconds, of which importing torch from a network file system may take most
SILENT = f"the driver has not answered for {FACTS_WITHIN:.0f} s"
LINE_LIMIT = 600
# The hook must not start in the load, and CUDA must number the GPUs as NVML does.
VARIABLES = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
UNSET = ("RANKSCOPE", "CUDA_LAUNCH_BLOCKING")
READER = (sys.executable, "-m", "rankscope_exporter.node_check.reader")
LOAD = Path(__file__).with_name("load.py")
HANGS_AFTER = 15.0
"""Seconds of one stage, most of which take a few: before, a load may be late because importing torch was slow."""
BEFORE_CUDA = ("starting Python", "importing torch")
NOT_OF_GPU = (
    *("driver", "not compiled", "no kernel image", "no cuda gpus", "compatib", "out of memory", "alloc_failed"),
    *("cublas_status_not_initialized", "busy or unavailable", "memoryerror"),
)
"""Parts of error messages, in lower case."""


@dataclass(frozen=True)
class CheckRequest:
    """Options of the command."""

    gpus: str | None = None
    """Indices or UUIDs, or `all`; None for the GPUs of the job, or all."""
    python: str = ""
    """An interpreter with torch; this one if empty."""
    workers: int | None = None
    simulate: str | None = None
    is_strict: bool = False
    is_json: bool = False


def show(request: CheckRequest, environ: Mapping[str, str] = os.environ) -> int:
    """Check the node and print the results. Return the exit status."""
    began = time.monotonic()
    try:
        results, count = check(request, environ)
    except (SelectionError, DocumentError, OSError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"rankscope check-node: {printable(str(why), LINE_LIMIT)}", file=sys.stderr)  # noqa: T201 - a command
        return UNUSABLE
    status = exit_status(results, count, is_strict=request.is_strict)
    lines = _json if request.is_json else _lines
    for line in lines(results, count, status, time.monotonic() - began):
        print(line)  # noqa: T201 - a command
    return status


def check(request: CheckRequest, environ: Mapping[str, str]) -> tuple[list[Result], int]:
    """Return the results of all checks, and the number of GPUs that were checked. Raises SelectionError, OSError."""
    source, names = wanted(request.gpus, environ)
    request = _with_absolute_paths(request)
    if request.simulate:
        _validate(request.simulate)
    with Child([*READER, *filter(None, [request.simulate])], {}, UNSET) as reader:
        known, driver = _read_facts(reader)
        selected, missing = select(names, known or [])
        missing = missing if known is not None else []  # nothing was read, so nothing is missing
        advice = f"Check nvidia-smi -L; {source} names it"
        results = [driver]
        results += [Result("gpu", "failed", f"the driver shows no GPU {name}", "a GPU", advice) for name in missing]
        results += (
            [Result("gpu", "not_run", f"{source} names no GPU")] if known and names is not None and not names else []
        )
        loads = _run_loads(request, reader, [facts for facts in selected if not facts.error and not facts.unreadable])
        gpus = [_assemble(facts, loads.get(facts.index), reader) for facts in selected]
    results += check_gpus(gpus)
    if not request.simulate:
        results += check_log(read_xids(), selected, known or [])
    results += check_host(read_host(environ), max(1, len(selected)), request.workers)
    return results, len(selected) + len(missing)


def exit_status(results: Sequence[Result], count: int, *, is_strict: bool = False) -> int:
    """Return the exit status for these results of a number of GPUs."""
    outcomes = {result.outcome for result in results}
    if "failed" in outcomes or (is_strict and "warning" in outcomes):
        return FAILED
    if "in_use" in outcomes:
        return IN_USE
    return OK if count else UNUSABLE


def _with_absolute_paths(request: CheckRequest) -> CheckRequest:
    """Return the request for children, which run in another directory."""
    if request.simulate and not request.simulate.isdecimal():
        request = replace(request, simulate=os.path.abspath(request.simulate))  # noqa: PTH100 - as for the next one
    if "/" in request.python:
        request = replace(request, python=os.path.abspath(request.python))  # noqa: PTH100 - a venv's python is a link
    return request


def _validate(scenario: str) -> None:
    from rankscope_exporter.simulation.scenario import load_scenario

    load_scenario(scenario)


def _read_facts(reader: Child) -> tuple[list[Facts] | None, Result]:
    """Return the facts of all GPUs, None if the reader is broken, and the result for the driver."""
    until = time.monotonic() + FACTS_WITHIN
    reader.wait(until, lambda: bool(_of_kind(reader, "driver") or _of_kind(reader, "broken")))
    driver = next(iter(_of_kind(reader, "driver")), None)
    broken = [*_of_kind(reader, "broken"), *([reader.error] if reader.status is not None else [])]
    if driver is None and broken:
        return None, Result("driver", "not_run", f"reading failed: {broken[0]}")
    if driver is None:
        return [], Result("driver", "failed", SILENT, "an answer", "Look for XIDs in the kernel log; reboot the node")
    if "error" in driver:
        return [], _no_driver(driver)
    count = int(driver["count"])
    reader.wait(until, lambda: len(_of_kind(reader, "facts")) + len(_of_kind(reader, "lost")) >= count)
    answered = {facts["index"]: Facts(**facts) for facts in _of_kind(reader, "facts")}
    silent = {index: Facts(index, error=SILENT) for index in range(count)}
    gpus = silent | {lost["gpu"]: _lost(Facts(lost["gpu"]), lost) for lost in _of_kind(reader, "lost")} | answered
    version, library = driver["version"], driver["library"]
    is_same = not version or not library or library.endswith(version)
    advice = "Reboot, or load the module of the installed library"
    measured = f"driver {version}, library {library}"
    return list(gpus.values()), Result("driver", "ok" if is_same else "warning", measured, "the same version", advice)


def _lost(facts: Facts, lost: Mapping[str, Any]) -> Facts:
    return replace(facts, error=lost.get("error", ""), unreadable=lost.get("unreadable", ""))


def _no_driver(driver: Mapping[str, Any]) -> Result:
    """Return that there is no driver: a fault only if its kernel module is loaded."""
    if driver["is_mismatch"]:
        advice = "Reboot, or unload the old kernel module: the installed library is newer or older"
        return Result("driver", "failed", str(driver["error"]), "driver and library of one version", advice)
    if Path("/proc/driver/nvidia/version").exists():
        return Result("driver", "failed", str(driver["error"]), "an answer", "Install the driver's library, or reboot")
    return Result("driver", "not_run", f"no NVIDIA driver: {driver['error']}")


def _run_loads(request: CheckRequest, reader: Child, gpus: Sequence[Facts]) -> dict[int, Load]:
    """Run a load on each GPU that is free, all at once. Return the loads by index."""
    shared = {gpu.index: Load(not_run="MIG is enabled") for gpu in gpus if gpu.is_mig}
    used = {gpu.index: Load(not_run="the GPU is in use") for gpu in gpus if in_use(Gpu(gpu))}
    free = [gpu for gpu in gpus if gpu.index not in {**shared, **used}]
    reader.send([gpu.index for gpu in free])
    until = time.monotonic() + LOAD_WITHIN
    if request.simulate and not request.python:
        reader.wait(until, lambda: len(_of_kind(reader, "load")) >= len(free))
        found = {load["gpu"]: load for load in _of_kind(reader, "load")}
        return shared | used | {i: Load(load["rates"], [(b, e) for b, e in load["spans"]]) for i, load in found.items()}
    with ExitStack() as stack:
        names = {gpu.index: gpu.uuid for gpu in gpus if [one.uuid for one in gpus].count(gpu.uuid) == 1}
        children = {
            # A driver on some virtual machines gives several GPUs one UUID.
            gpu.index: stack.enter_context(_start_load(request, names.get(gpu.index) or str(gpu.index)))
            for gpu in free
        }
        for child in children.values():
            child.wait(until)
        return shared | used | {index: read_load(child) for index, child in children.items()}


def _start_load(request: CheckRequest, gpu: str) -> Child:
    command = [request.python or sys.executable, str(LOAD), str(LOAD_FOR)]
    return Child(command, {**VARIABLES, "CUDA_VISIBLE_DEVICES": gpu}, UNSET)


def read_load(child: Child) -> Load:
    """Return what a load has measured. Only an error after CUDA has begun is the GPU's."""
    lines, status = list(child.lines), child.status
    rates = [line for line in lines if "rate" in line]
    load = Load({rate["rate"]: rate["value"] for rate in rates}, [(rate["began"], rate["ended"]) for rate in rates])
    not_run = next((line["not_run"] for line in lines if "not_run" in line), "")
    if status == 0 or not_run:
        return replace(load, not_run=str(not_run))
    began: dict[str, Any] = {"stage": "starting Python", "began": 0.0}
    stage = next((line for line in reversed(lines) if "stage" in line), began)
    if status is None:
        lasted = time.monotonic() - stage["began"]
        why, is_of_gpu = f"no end after {lasted:.0f} s", lasted >= HANGS_AFTER
    else:
        why = child.error or f"exit status {status}"
        is_of_gpu = status > 0 and not is_of_torch(why)  # a signal may be that of the kernel, without memory
    if stage["stage"] in BEFORE_CUDA or not is_of_gpu:
        return replace(load, not_run=f"{stage['stage']}: {why}")
    return replace(load, failure=f"{stage['stage']}: {why}")


def is_of_torch(error: str) -> bool:
    """Return whether torch or the system is the reason, and not the GPU: such an error says nothing about it."""
    return any(text in error.lower() for text in NOT_OF_GPU)


def _assemble(facts: Facts, load: Load | None, reader: Child) -> Gpu:
    """Return all readings of a GPU. One that is lost during the check does not answer."""
    lost = [lost for lost in _of_kind(reader, "lost") if lost["gpu"] == facts.index]
    samples = [
        Sample(**{name: value for name, value in sample.items() if name != "gpu"})
        for sample in _of_kind(reader, "sample")
        if sample["gpu"] == facts.index
    ]
    xids = [xid["code"] for xid in _of_kind(reader, "xid") if xid["uuid"] == facts.uuid]
    others = {pid for sample in samples for pid in sample.pids or ()}
    load = load or Load(not_run="the GPU does not answer")
    if len(others) > 1:  # another process has begun to compute: the rates are not those of an idle GPU
        load = Load(not_run="another process has used the GPU during the check")
    return Gpu(_lost(facts, lost[0]) if lost else facts, load, samples, xids)


def _of_kind(reader: Child, kind: str) -> list[Any]:
    return [line[kind] for line in list(reader.lines) if kind in line]


def _lines(results: Sequence[Result], count: int, status: int, seconds: float) -> Iterator[str]:
    """Yield a line for each result that is wrong, one for each reason why checks were not run, and a summary."""
    for outcome in ("failed", "in_use", "warning"):
        for result in results:
            if result.outcome == outcome:
                yield printable(result.line, LINE_LIMIT)
    done = [result for result in results if result.outcome != "not_run"]
    for reason, names in _not_run(results).items():
        yield printable(f"not run {', '.join(names)}: {reason}", LINE_LIMIT)
    of = Counter(result.outcome for result in results)
    verdict = {OK: "ok", FAILED: "FAILED", UNUSABLE: "nothing checked: no GPU", IN_USE: "a GPU is in use"}[status]
    numbers = f"{counted(count, 'GPU')}, {counted(len(done), 'check')}, {of['failed']} failed"
    numbers = f"{numbers}, {counted(of['warning'], 'warning')}, {duration(seconds)}"
    yield f"rankscope check-node: {verdict} ({numbers})"


def _not_run(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the checks that need a load and had none, by reason: those that a reader expects to be run."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if result.outcome == "not_run" and (result.check in EXPECTED or result.gpu is None):
            names = reasons[result.measured]
            names += [] if result.check in names else [result.check]
    return reasons


EXPECTED = ("sm_clock", "matmul", "memory_bandwidth", "throttling", "pcie")
"""Checks of a GPU whose absence is shown. A GPU may well have no NVLink and no fabric."""


def _json(results: Sequence[Result], count: int, status: int, seconds: float) -> Iterator[str]:
    value = {
        "node": socket.gethostname(),
        "exit_status": status,
        "gpus": count,
        "seconds": round(seconds, 1),
        "results": [asdict(r if r.outcome in LABELS else replace(r, advice="")) for r in results],
    }
    yield json.dumps(value)
