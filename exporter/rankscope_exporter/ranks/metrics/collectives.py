"""A rank's collectives: their number, duration, size and groups, and the current one."""

from __future__ import annotations

from collections.abc import Callable

from rankscope.record import layout
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.ranks.metric import RANK
from rankscope_exporter.ranks.rank import Rank


def _by_op(field: str) -> Callable[[Rank], Values]:
    return lambda rank: rank.snapshot.by_operation(field)


def _exposed(rank: Rank) -> Values:
    calls, seconds = rank.snapshot.many("collectives"), rank.snapshot.many("collective_seconds")
    return {op: spent for op, called, spent in zip(layout.OPS, calls, seconds, strict=True) if called}


def _by_group(field: str) -> Callable[[Rank], Values]:
    return lambda rank: dict(zip(rank.snapshot.groups, rank.snapshot.many(field), strict=False))


def _open(rank: Rank) -> Values:
    snapshot = rank.snapshot
    if not (snapshot.alive and snapshot.open_group):
        return None
    return {(snapshot.open_operation, snapshot.open_group): 1}


METRICS = (
    RANK.counter(
        "collectives_total",
        "Collectives that the rank took part in; `ddp_all_reduce` is DDP's gradient averaging, once per backward pass.",
        _by_op("collectives"),
        "op",
    ),
    RANK.counter(
        "collective_seconds_total",
        "Time that the training thread spent in collectives: exposed, not overlapped.",
        _exposed,
        "op",
    ),
    RANK.counter(
        "collective_duration_seconds_total",
        "Time from the issue of collectives to their completion, overlapped or not, if it is known: for collectives "
        "whose end the training thread waited for, and for passes that DDP's logger samples (one in a hundred).",
        _by_op("collective_duration_seconds"),
        "op",
    ),
    RANK.counter(
        "collective_bytes_total", "Payload that the rank sent in collectives.", _by_op("collective_bytes"), "op"
    ),
    RANK.counter(
        "collective_bus_bytes_total",
        "Bytes on each rank's link for collectives with a known duration, by the factors of nccl-tests (2(n-1)/n for "
        "an all-reduce over n ranks). Divided by the duration, it is the bus bandwidth.",
        _by_op("collective_bus_bytes"),
        "op",
    ),
    RANK.gauge(
        "collective_open_info",
        "The collective that the training thread is in; absent outside of collectives.",
        _open,
        "op",
        "group",
    ),
    RANK.counter(
        "group_collectives_total",
        "Sequence number of the last collective that the rank issued in the group: in a hang, a rank that is behind "
        "has not reached the others' collective.",
        _by_group("group_collectives"),
        "group",
    ),
    RANK.counter(
        "group_wait_seconds_total",
        "Time that the training thread waited for the ranks of the group, exposed.",
        lambda rank: rank.snapshot.group_waits,
        "group",
    ),
    RANK.counter(
        "device_group_wait_seconds_total",
        "GPU time that the rank waited for the ranks of the group: the part of `collective_wait` in "
        "`rankscope_rank_device_seconds_total` whose group is known. Absent without a GPU.",
        lambda rank: rank.snapshot.device_group_waits,
        "group",
    ),
)
