"""Network ports in a directory that looks like sysfs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write(path: Path, text: object) -> None:
    """Write a file of sysfs, with a final newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", errors="surrogateescape")


def port(
    root: Path,
    device: str,
    *,
    number: int = 1,
    state: str = "4: ACTIVE",
    rate: str = "400 Gb/sec (4X NDR)",
    data: int = 0,
    downs: int = 0,
    errors: Mapping[str, int] | None = None,
    hardware: Mapping[str, int] | None = None,
) -> Path:
    """Write an InfiniBand port and return its directory. `data` is in words of four bytes, as in the kernel."""
    write(root / "class/infiniband" / device / "board_id", "MT_0000000838")
    directory = root / "class/infiniband" / device / "ports" / str(number)
    for name, text in {"state": state, "rate": rate, "link_layer": "InfiniBand"}.items():
        write(directory / name, text)
    counters = {"port_rcv_data": data, "port_xmit_data": data, "link_downed": downs} | dict(errors or {})
    for name, value in counters.items():
        write(directory / "counters" / name, value)
    for name, value in (hardware or {}).items():
        write(directory / "hw_counters" / name, value)
    return directory


def interface(root: Path, name: str, *, is_hardware: bool = True, operstate: str = "up", **statistics: int) -> None:
    directory = root / "class/net" / name
    write(directory / "operstate", operstate)
    if is_hardware:
        (directory / "device").mkdir(exist_ok=True)
    for counter, value in statistics.items():
        write(directory / "statistics" / counter, value)
