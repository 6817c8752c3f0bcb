"""Read all GPUs in a process of its own, because a call of a broken driver may never return.

    python -m rankscope_exporter.node_check.reader [SCENARIO]

Prints lines of JSON: `driver`, then `facts` and `sample` of each GPU from a thread of its own, and `xid`. Ends with its
standard input. With a scenario, it reads simulated GPUs, lets those work whose indices are on its input, and prints
`load` for each, as load.py measures it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from rankscope_exporter.gpu.nvml import health, links, modes, temperature
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import CODES, DeviceLostError, DriverError
from rankscope_exporter.gpu.nvml.events import XidEvent, XidEvents
from rankscope_exporter.node_check.readings import Facts, Sample

EVERY = 0.25  # seconds between samples
XID_WAIT = 0.5  # seconds
MPS_SERVER = "nvidia-cuda-mps"  # nvidia-cuda-mps-server, as the kernel cuts it off
Emit = Callable[[str, object], None]
T = TypeVar("T")


def main(arguments: list[str]) -> int:
    """Read until the standard input ends. Returns the exit status."""
    lock = threading.Lock()

    def emit(kind: str, value: object) -> None:
        with lock:
            print(json.dumps({kind: value}), flush=True)  # noqa: T201 - for the process that has started this one

    with _simulated(arguments, emit) as work:
        threading.excepthook = lambda broken: emit("broken", f"{broken.exc_type.__name__}: {broken.exc_value}")
        threading.Thread(target=read_all, args=(emit,), daemon=True).start()
        for line in sys.stdin:
            work(json.loads(line))
    return 0


def read_all(emit: Emit) -> None:
    """Emit the driver, and read each GPU and the XIDs in threads."""
    driver = Driver()
    if not driver.connect():
        error = driver.error
        is_mismatch = error is not None and error.code == CODES["LIB_RM_VERSION_MISMATCH"]
        emit("driver", {"error": str(error or "the driver has no NVML"), "is_mismatch": is_mismatch})
        return
    count = driver.device_count()
    version, library = _known(driver.versions) or ("", "")
    emit("driver", {"count": count, "version": version, "library": library})
    opened: list[Device] = []
    for index in range(count):
        threading.Thread(target=_read, args=(driver, index, emit, opened), daemon=True).start()
    _watch_xids(driver, opened, emit)


def read_facts(device: Device) -> Facts:
    """Return a GPU's facts; a value whose call fails is unknown. Raises DeviceLostError."""
    configured, repairs = _known(partial(modes.modes, device)), _known(partial(health.repairs, device))
    registration = _known(partial(modes.fabric, device))
    link, memory = _known(partial(links.pcie_link_max, device)), _known(device.memory)
    # With a process in the list, such as a display's, no memory belongs to one that is not visible.
    used = memory.used if memory and memory.reserved is not None and not _known(device.processes) else None
    limits, thresholds = _known(device.power_limits), _known(partial(temperature.thresholds, device))
    return Facts(
        index=device.index,
        uuid=device.uuid,
        name=_known(device.name) or "",
        bus_id=_known(device.pci_bus_id) or "",
        is_mig=bool(configured and configured.mig == "enabled"),
        has_gpm=bool(_known(device.supports_gpm)),
        clock_max=_known(partial(device.clock_max, "sm")),
        bandwidth_max=_known(device.memory_bandwidth_max),
        link_max=(link.generation, link.width) if link else (None, None),
        power_limit=_known(device.power_limit),
        power_limit_default=limits.default if limits else None,
        temperature_max=thresholds["slowdown"] if thresholds else None,
        nvlinks=_known(partial(links.nvlink_states, device)) or (),
        fabric=(registration.state, registration.status) if registration else (),
        persistence=configured.persistence if configured else "",
        compute_mode=configured.compute if configured else "",
        recovery_action=_known(partial(modes.recovery_action, device)),
        uncorrected=_known(partial(_uncorrected, device)),
        is_remapping_pending=repairs.remapping_pending if repairs else None,
        is_remapping_failed=repairs.remapping_failed if repairs else None,
        is_retirement_pending=repairs.retirement_pending if repairs else None,
        retired_pages=_sum(repairs.retired_pages.values()) if repairs else None,
        memory_used=used,
        pids=_known(partial(_working, device)),
    )


def read_sample(device: Device) -> Sample:
    """Return a GPU's state now; a value whose call fails is unknown. Raises DeviceLostError."""
    at, link = time.monotonic(), _known(partial(links.pcie_link, device))
    reasons = _known(device.clock_event_reasons)
    return Sample(
        at=at,
        clock=_known(partial(device.clock, "sm")),
        reasons=None if reasons is None else sorted(reasons),
        link=(link.generation, link.width) if link else (None, None),
        temperature=_known(device.temperature),
        margin=_known(partial(temperature.margin, device)),
        pids=_known(partial(_working, device)),
    )


def _uncorrected(device: Device) -> float | None:
    errors = health.ecc_errors(device, lifetime=False)
    return _sum(number for (kind, _), number in errors.items() if kind == "uncorrected")


def _sum(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _working(device: Device) -> list[int] | None:
    """Return the processes that compute, without an MPS server, which waits on each GPU for clients."""
    pids = device.compute_pids()
    return None if pids is None else [pid for pid in pids if _command(pid) != MPS_SERVER]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # it has ended, or is in another pid namespace
        return ""


def _known(call: Callable[[], T | None]) -> T | None:
    """Return the driver's answer, or None if it fails. Raises DeviceLostError."""
    try:
        return call()
    except DeviceLostError:
        raise
    except DriverError:
        return None


def _read(driver: Driver, index: int, emit: Emit, opened: list[Device]) -> None:
    """Emit the facts of a GPU and its samples, until it does not answer."""
    try:
        device = driver.device(index)
        facts = read_facts(device)
        opened.append(device)
        emit("facts", asdict(facts))
        while True:
            emit("sample", {"gpu": index, **asdict(read_sample(device))})
            time.sleep(EVERY)
    except DriverError as error:
        is_denied = error.code == CODES["NOT_SUPPORTED"]  # what `ask` makes of a denied permission as well
        emit("lost", {"gpu": index, "unreadable" if is_denied else "error": str(error)})
    except Exception as error:
        emit("lost", {"gpu": index, "unreadable": f"{type(error).__name__}: {error}"})


def _watch_xids(driver: Driver, opened: list[Device], emit: Emit) -> None:
    try:
        events, registered = driver.xid_events(), set[str]()
        while True:
            for device in [device for device in opened if device.uuid not in registered]:
                registered.add(device.uuid)
                with contextlib.suppress(DriverError):
                    events.register(device)
            event = _next(events) if registered else None
            if event is not None:
                emit("xid", {"uuid": event.uuid, "code": event.code})
            elif not registered:
                time.sleep(EVERY)
    except DriverError:  # no events on this system: the kernel log has the XIDs
        return


def _next(events: XidEvents) -> XidEvent | None:
    try:
        return events.wait(XID_WAIT)
    except DriverError:  # returned at once while a GPU of the set is lost: do not spin
        time.sleep(XID_WAIT)
        return None


@contextmanager
def _simulated(arguments: list[str], emit: Emit) -> Iterator[Callable[[list[int]], None]]:
    """Install the simulated GPUs of a scenario, if one is given, and yield a function that lets some work."""
    if not arguments:
        yield lambda _: None
        return
    from rankscope_exporter.simulation.driver import SimulatedDriver
    from rankscope_exporter.simulation.library import installed
    from rankscope_exporter.simulation.load import work
    from rankscope_exporter.simulation.scenario import load_scenario

    simulated = SimulatedDriver(load_scenario(arguments[0]))
    with installed(simulated):
        yield lambda indices: work(simulated, indices, lambda load: emit("load", load))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a thread may be in a call that never returns
