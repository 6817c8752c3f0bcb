"""What each of our calls to the driver costs, beside what a whole reading costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from validation.gpu_check.report import Check, surviving

from rankscope_exporter.gpu.collector import GpuCollector, Tick
from rankscope_exporter.gpu.nvml import health, links, mig, modes, temperature, throttle
from rankscope_exporter.gpu.nvml.device import CLOCK_DOMAINS, Device
from rankscope_exporter.gpu.nvml.gpm import supports_gpm
from rankscope_exporter.registry import GPU_COLLECTORS

PART = "cost of the driver's calls"
TIMES = 20
PAUSE = 0.12  # seconds; GPM wants more than 0.1 between two samples

CALLS: Mapping[str, Callable[[Device], Any]] = {
    "check": Device.check,
    "name": Device.name,
    "pci_bus_id": Device.pci_bus_id,
    "driver_version": Device.driver_version,
    "utilization": Device.utilization,
    "utilization_samples, all": lambda device: list(device.utilization_samples() or ()),
    "memory": Device.memory,
    "bar1_memory": Device.bar1_memory,
    "power": Device.power,
    "power_limit": Device.power_limit,
    "power_limits": Device.power_limits,
    "energy": Device.energy,
    "temperature": Device.temperature,
    "memory temperature": temperature.memory_temperature,
    "temperature margin": temperature.margin,
    "temperature thresholds": temperature.thresholds,
    "temperature margin thresholds": temperature.margin_thresholds,
    "performance_state": Device.performance_state,
    "clocks": lambda device: [device.clock(domain) for domain in CLOCK_DOMAINS],
    "clock_event_reasons": Device.clock_event_reasons,
    "clock_event_seconds": throttle.clock_event_seconds,
    "processes": Device.processes,
    "ecc_errors": lambda device: health.ecc_errors(device, lifetime=False),
    "repairs": health.repairs,
    "pcie_link": links.pcie_link,
    "pcie_replays": links.pcie_replays,
    "pcie_bytes": links.pcie_bytes,
    "pcie_throughput": links.pcie_throughput,
    "nvlink_states": links.nvlink_states,
    "nvlink_bytes": lambda device: links.nvlink_bytes(device, 18),
    "nvlink_errors": lambda device: links.nvlink_errors(device, 18),
    "modes": modes.modes,
    "recovery_action": modes.recovery_action,
    "fabric": modes.fabric,
    "mig_instances": mig.mig_instances,
    "supports_gpm": supports_gpm,
}


def calls(device: Device) -> Iterator[Check]:
    """Every call, then every source's whole reading as the sampler takes it."""
    for name, call in CALLS.items():
        yield from surviving(PART, name, _cost(name, call, device))
    for collector in GPU_COLLECTORS:
        yield from surviving(PART, collector.name, _reading(collector, device))


def _cost(name: str, call: Callable[[Device], Any], device: Device) -> Iterator[Check]:
    first = _microseconds(lambda: call(device))
    later = [_microseconds(lambda: call(device)) for _ in range(TIMES)]
    median, most = statistics.median(later), max(later)
    yield Check(PART, name, "measured", f"{median:.0f} µs", note=f"first {first:.0f}, at most {most:.0f}")


def _reading(collector: GpuCollector[Any], device: Device) -> Iterator[Check]:
    """Readings as far apart as GPM wants."""
    read = collector.reader()
    costs: list[float] = []
    for _ in range(3):
        tick = Tick(time.time(), PAUSE if costs else 0.0)
        costs.append(_microseconds(partial(read, device, tick)))
        time.sleep(PAUSE)
    note = f"first {costs[0]:.0f}, at most {max(costs[1:]):.0f} later"
    yield Check(
        PART, f"a reading of `{collector.name}`", "measured", f"{statistics.median(costs[1:]):.0f} µs", note=note
    )


def _microseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6
