"""After each batch the host reads a value, for which it waits, and works only then: the device has nothing to do."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import HOST_AND_DEVICE, Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    # The decoy `seldom_reads` has such work as well: there the device does the last step's meanwhile.
    arena.tell(everybody={"read_every": 1, "post": target.extra_ms})


CASE = Case(
    "a value read on every batch",
    inject,
    alert("RankscopeDeviceReads", "device_read"),
    devices=HOST_AND_DEVICE,
)
