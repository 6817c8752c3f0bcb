"""All values of each GPU as JSON, from the library that pynvml finds."""

from __future__ import annotations

import json
from typing import Any

from rankscope_exporter.gpu.nvml.device import ClockDomain, Device
from rankscope_exporter.gpu.nvml.driver import Driver

CLOCKS: tuple[ClockDomain, ...] = ("graphics", "sm", "memory")  # the C library has no video clock


def describe(device: Device) -> dict[str, Any]:
    """Return one GPU's values by name; `samples` by time in microseconds."""
    memory, reasons, pids = device.memory(), device.clock_event_reasons(), device.pids()
    return {
        "uuid": device.uuid,
        "name": device.name(),
        "pci_bus_id": device.pci_bus_id(),
        "versions": [device.driver_version(), device.cuda_version()],
        "utilization": device.utilization(),
        "memory": memory and [memory.total, memory.used, memory.reserved],
        "power": [device.power(), device.power_limit()],
        "temperature": device.temperature(),
        "clocks": [[device.clock(domain), device.clock_max(domain)] for domain in CLOCKS],
        "reasons": None if reasons is None else sorted(reasons),
        "pids": None if pids is None else sorted(pids),
        "energy": device.energy(),
        "samples": {str(s.timestamp_us): s.percent for s in device.utilization_samples() or ()},
    }


def describe_all() -> list[dict[str, Any]]:
    """Return the values of every GPU."""
    driver = Driver()
    assert driver.connect()
    described = [describe(driver.device(index)) for index in range(driver.device_count())]
    driver.close()
    return described


if __name__ == "__main__":
    print(json.dumps(describe_all()))
