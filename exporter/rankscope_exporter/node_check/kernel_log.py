"""XIDs of this boot in the kernel's log.

A program caused most of them, and they are over with it. One of the hardware matters until the GPU is reset, which the
log does not show. Where the driver recommends an action (GET_GPU_RECOVERY_ACTION, driver 570), that decides.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.record.quantities import duration
from rankscope_exporter.gpu.nvml.events import HARDWARE_XIDS
from rankscope_exporter.kernel_messages import KMSG, read_messages
from rankscope_exporter.node_check.readings import Facts
from rankscope_exporter.node_check.result import Outcome, Result

XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
CONTAINED = frozenset({63, 92, 94})
"""XIDs after which a GPU works on: a row is remapped, many errors were corrected, an error was contained."""


@dataclass(frozen=True)
class LoggedXid:
    """The last event of one code on one GPU."""

    bus_id: str
    code: int
    age: float
    """Seconds."""


def read_xids(path: Path = KMSG) -> list[LoggedXid] | None:
    """Return the XIDs in the kernel's log; None if it cannot be read, as in most containers."""
    try:
        messages = read_messages(path)
    except OSError:
        return None
    now = time.monotonic()
    found: dict[tuple[str, int], LoggedXid] = {}
    for at, text in messages:
        if match := XID.search(text):
            bus_id, code = normalize(match[1]), int(match[2])
            found[bus_id, code] = LoggedXid(bus_id, code, max(0.0, now - at))
    return list(found.values())


def normalize(bus_id: str) -> str:
    """Return a PCI address as domain:bus:device without leading zeros: the driver writes it in several ways."""
    parts = bus_id.partition(".")[0].lower().split(":")
    return ":".join(part.lstrip("0") or "0" for part in parts)


def check_log(xids: Sequence[LoggedXid] | None, checked: Sequence[Facts], known: Sequence[Facts]) -> Iterator[Result]:
    """Yield the results for the checked GPUs, and for addresses at which the driver knows no GPU any more."""
    if xids is None:
        yield Result("kernel_log", "not_run", "the kernel log cannot be read")
        return
    by_address: Mapping[str, Facts] = {normalize(facts.bus_id): facts for facts in known if facts.bus_id}
    hardware = [xid for xid in xids if xid.code in HARDWARE_XIDS]
    ours = {facts.index for facts in checked}
    results = [_result(xid, by_address[xid.bus_id]) for xid in hardware if xid.bus_id in by_address]
    yield from [result for result in results if result.gpu in ours]
    # In a container or a cgroup the driver shows a part of the GPUs, so a missing one does not fail.
    for xid in hardware:
        if xid.bus_id not in by_address:
            shown = f"XID {xid.code} at {xid.bus_id} {duration(xid.age)} ago, where the driver shows no GPU"
            yield Result("kernel_log", "warning", shown, "none", "Look for a GPU that is lost: lspci, nvidia-smi -L")
    if not hardware:
        yield Result("kernel_log", "ok", f"no XID of the hardware, {len(xids)} of programs")


def _result(xid: LoggedXid, facts: Facts) -> Result:
    is_over = facts.recovery_action == "none" or xid.code in CONTAINED
    advice = "Look up the code in docs/runbooks/RankscopeGpuXid.md; reset the GPU, and reboot to clear the log"
    measured = f"XID {xid.code} {duration(xid.age)} ago" + (", and the driver asks for no action" if is_over else "")
    outcome: Outcome = "warning" if is_over else "failed"
    return Result("kernel_log", outcome, measured, "no XID of the hardware", advice, facts.index, facts.uuid)
