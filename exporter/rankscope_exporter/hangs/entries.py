"""The operations in a dump of torch's flight recorder.

torch records the operations of a batch (`batch_isend_irecv`, an `all_gather` of uneven sizes) without a state, and then
an entry whose name ends in `coalesced`, which has the state of all of them. They share their sequence numbers. Before
torch 2.4 an entry has one sequence number, and no name of its group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

PEERS = re.compile(r"\d+(?:->|<-)(\d+)$")
"""The peer in the name of a send or receive, by its number within the group."""
END_OF_BATCH = "coalesced"
BATCH = "batch of sends and receives"
OUT_OF_PLACE = "_oop"
"""The suffix of operations that only batches contain."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation that a rank has issued, or a batch of them."""

    group_id: int
    """The number of the group in this process."""
    group: str
    description: str
    """The description of the group."""
    name: str
    """The name in torch, such as `all_reduce`."""
    number: float
    """The number of the collective, or of the send or receive, within its group."""
    is_complete: bool
    has_started: bool = False
    """Whether torch has seen it start, for which it needs TORCH_NCCL_ENABLE_TIMING."""
    is_pairwise: bool = False
    """Whether it is a send, a receive, or a batch of them."""
    peers: Sequence[int] = ()
    """The other ranks of sends and receives, by their numbers within the group."""
    elements: int | None = None
    """The number of elements of the input, if the dump has it."""
    is_batch: bool = False
    has_end: bool = False
    """Whether it is a batch and the dump has the end of it."""


def read_entries(recorded: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Return the operations in the order of their issue, with each batch as one of them.

    Raise KeyError, TypeError, ValueError or AttributeError if they are not those of a dump.
    """
    in_order = sorted(enumerate(recorded), key=lambda pair: int(pair[1].get("record_id", pair[0])))
    by_number: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for _, one in in_order:
        by_number[_group(one)[0], _number(one), one.get("p2p_seq_id")].append(one)
    last = in_order[-1][1] if in_order else None
    return [entry for ones in by_number.values() for entry in _read(ones, is_newest=ones[-1] is last)]


def _read(ones: Sequence[Mapping[str, Any]], *, is_newest: bool) -> Iterator[Entry]:
    """Yield the operations with the same sequence numbers."""
    entries = [_entry(one) for one in ones]
    end = entries[-1] if len(entries) > 1 and entries[-1].name.endswith(END_OF_BATCH) else None
    members = [one for one in entries if one is not end]
    if members[0].is_pairwise and len(entries) > 1:
        peers = tuple(sorted({peer for one in members for peer in one.peers}))
        name = members[0].name if len(members) == 1 else BATCH
        yield replace(
            members[0],
            name=name,
            is_complete=bool(end and end.is_complete),
            peers=peers,
            is_batch=True,
            has_end=bool(end),
        )
    elif end:
        yield end
    else:
        # Without an end, an operation is part of a complete batch, or of one that is being issued.
        yield from (one for one in entries if is_newest or not one.name.endswith(OUT_OF_PLACE))


def _entry(one: Mapping[str, Any]) -> Entry:
    title = str(one["profiling_name"])
    match = PEERS.search(title)
    is_pairwise = bool(one.get("is_p2p")) or match is not None
    number = _number(one)
    if is_pairwise:
        number = float(one.get("p2p_seq_id", number))
    sizes = one.get("input_sizes")
    return Entry(
        int(one["pg_id"]),
        *_group(one),
        title.rpartition(":")[2].partition(" ")[0],
        number,
        _is_complete(one),
        one["state"] == "started",
        is_pairwise,
        (int(match[1]),) if match else (),
        None if sizes is None else sum(prod(size) for size in sizes),
    )


def _group(one: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the description of the group."""
    name, description = one.get("process_group", (one["pg_id"], ""))
    return str(name), str(description)


def _number(one: Mapping[str, Any]) -> float:
    return float(one["collective_seq_id"] if "collective_seq_id" in one else one["seq_id"])


def _is_complete(one: Mapping[str, Any]) -> bool:
    """Return whether torch has seen the operation end.

    With gloo it is only marked as retired. With NCCL, a retired operation that has not completed has timed out.
    """
    return one["state"] == "completed" or (bool(one.get("retired")) and str(one["profiling_name"]).startswith("gloo:"))
