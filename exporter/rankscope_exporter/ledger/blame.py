"""The definition of a culprit: the evidence that a finding blames the hardware that it names, and not the script.

A finding names the GPU of a rank, also if the script is to blame. It counts against the hardware only with evidence:

- `xid N`, `ecc`, `lost`: the driver reported a hardware fault of the GPU, or the GPU did not answer, in the minutes
  before the finding or while it was open. Any finding that names the GPU.
- `throttled`: a straggler with the cause `throttled`, whose GPU was throttled for heat, by its power supply, or at a
  lowered power limit, in the last seconds and for longer than the GPU of a peer. A GPU at its default power limit does
  not count: more work does that. Likewise `throttling`, or a slowdown by it, of a run that has a single GPU. The
  findings of several GPUs count against each of them, or against the node if they are all of a node.
- `link`: slow transfer or a straggler, whose GPU has fewer PCIe lanes or NVLinks than it supports, unlike another GPU
  of the run. Or slow transfer with a fault of a network port.
- `slow`: a straggler that only computes longer, without a reason. Its script may have more work for this rank, so it
  does not count by itself. It counts if the same GPU was slow as different ranks: `culprit_runs`.

All other findings never count: data loading, other processes, CPU time, aggregation, more tokens, a crash or a hang
without a hardware fault. Nor does a slow rank 0 or a slow last rank of a run, for which scripts often have extra work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rankscope_exporter.diagnosis.counters import increase
from rankscope_exporter.diagnosis.detectors import late, network
from rankscope_exporter.diagnosis.readings import GpuReading, RankReading

THROTTLED, LINK, SLOW = "throttled", "link", "slow"
REASONS = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "board_limit"}
)
"""The reasons for throttling that are the hardware's: heat, the power supply, and the board."""
POWER_CAP = "sw_power_cap"
LEAST = 0.1
"""Ratio of the time in which a GPU has to be throttled. The detector has compared it over a longer time."""
Reasons = Mapping[str, float] | None
"""Seconds in which a GPU was throttled, by reason; None if unknown."""
COMPUTING_OR_COPYING = (*late.SLOW_DEVICE, "h2d_copy")


def throttled_seconds(now: Reasons, then: Reasons, reading: GpuReading) -> float:
    """Return the longest time between two readings of a GPU's counters in which its hardware was a reason."""
    reasons = REASONS | {POWER_CAP} if reading.is_power_limit_lowered else REASONS
    known = reasons & (now or {}).keys() & (then or {}).keys()
    return max((increase(now[reason], then[reason]) or 0.0 for reason in known), default=0.0) if now and then else 0.0


def named_gpus(found: Mapping[str, Any], ranks: Sequence[RankReading]) -> Collection[str]:
    """Return the UUIDs of the GPUs that a finding is about: its own, those of throttled ranks, the run's only one."""
    if found["uuid"]:
        return (found["uuid"],)
    if found["kind"] == late.KIND and found["cause"] == "throttled" and not named_node(found, ranks):
        return {one.uuid for one in ranks if one.uuid and one.rank in found["ranks"]}
    uuids = {one.uuid for one in ranks}
    return uuids - {""} if _is_throttling(found) and len(uuids) == 1 else ()


def named_node(found: Mapping[str, Any], ranks: Sequence[RankReading]) -> str:
    """Return the node that a finding is about: that of all of its ranks and of no other, or the run's only one."""
    nodes = {one.node for one in ranks}
    if not found["uuid"] and _is_throttling(found) and len(nodes) == 1 and len({one.uuid for one in ranks}) > 1:
        return nodes.pop()
    return next((node for node in nodes if found["place"] == f"node {node}"), "")


def evidence(
    uuids: Collection[str],
    found: Mapping[str, Any],
    ranks: Sequence[RankReading],
    throttled: Mapping[str, float],
    faults: Mapping[str, str],
) -> str:
    """Return the evidence that an open finding has against GPUs; empty if there is none.

    `ranks` are all ranks of the run, `throttled` is the ratio of the last seconds by GPU, `faults` are recent faults.
    """
    if len(uuids) == 1 and (fault := faults.get(*uuids)):
        return fault
    least = min((throttled.get(uuid, 0.0) for uuid in uuids), default=0.0)
    if found["kind"] == late.KIND and found["cause"] == "throttled":
        late_ranks = named_gpus(found, ranks) or {one.uuid for one in ranks if one.node == named_node(found, ranks)}
        of_peers = [throttled.get(one.uuid, 0.0) for one in ranks if one.uuid not in late_ranks]
        return THROTTLED if of_peers and least - min(of_peers) > LEAST else ""
    if _is_throttling(found):
        return THROTTLED if least > LEAST else ""
    if _has_slow_link(found, ranks, uuids):
        return LINK
    return SLOW if _is_slow(found, ranks) else ""


def _is_throttling(found: Mapping[str, Any]) -> bool:
    """Return whether a finding about the whole run is that its GPUs are throttled."""
    return found["kind"] == "throttling" or (found["kind"], found["cause"]) == ("slowdown", "throttled")


def _has_slow_link(found: Mapping[str, Any], ranks: Sequence[RankReading], named: Collection[str]) -> bool:
    is_transfer = found["kind"] == network.KIND and found["cause"] == "link"
    is_late = found["kind"] == late.KIND and found["cause"] in COMPUTING_OR_COPYING
    reduced = {one.uuid for one in ranks if one.gpu and one.gpu.is_link_reduced}
    return (is_transfer or is_late) and {*named} <= reduced < {one.uuid for one in ranks if one.gpu}


def _is_slow(found: Mapping[str, Any], ranks: Sequence[RankReading]) -> bool:
    """Return whether one rank between the first and the last one computes longer on a GPU that it uses."""
    own = next((one for one in ranks if str(one.rank) == found["rank"]), None)
    if own is None or own.gpu is None or not own.gpu.processes or not 0 < own.rank < own.world_size - 1:
        return False
    return found["kind"] == late.KIND and found["cause"] in late.SLOW_DEVICE
