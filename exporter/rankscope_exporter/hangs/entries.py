"""The operations in a dump of torch's flight recorder.

torch records the operations of a batch (`batch_isend_irecv`, an `all_gather` of uneven sizes) without a state, and then
an entry whose name ends in `coalesced`, which has the state of all of them. They share their sequence numbers. Before
torch 2.4 an entry has one sequence number, and no name of its group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any

from rankscope_exporter.hangs.content import Content

PEERS = re.compile(r"\d+(?:->|<-)(\d+)$")
"""The peer in the name of a send or receive, by its number within the group."""
END_OF_BATCH = "coalesced"
BATCH = "batch of sends and receives"
OUT_OF_PLACE = "_oop"
"""The suffix of operations that only batches contain."""
DIMENSIONS_LIMIT = 64
"""The most dimensions of a tensor in torch."""


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


def read_entries(recorded: object, content: Content) -> list[Entry]:
    """Return the operations in the order of their issue, with each batch as one of them. Raise ValueError."""
    found = [
        _read_entry(content.mapping(one, "an entry"), place, content)
        for place, one in enumerate(content.sequence(recorded, "entries"))
    ]
    by_number: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    last = None
    for _, key, last in sorted(found, key=itemgetter(0)):
        by_number[key].append(last)
    return [entry for entries in by_number.values() for entry in _combine(entries, is_newest=entries[-1] is last)]


def _combine(entries: Sequence[Entry], *, is_newest: bool) -> Iterator[Entry]:
    """Yield the operations with the same sequence numbers."""
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


def _read_entry(one: Mapping[str, Any], place: int, content: Content) -> tuple[int, tuple[Any, ...], Entry]:
    """Return an operation's position in the order of issue, its sequence numbers with the group, and the operation."""
    title = content.text(one.get("profiling_name"), "profiling_name")
    state = content.text(one.get("state"), "state")
    match = PEERS.search(title)
    is_pairwise = bool(one.get("is_p2p")) or match is not None
    collective = float(content.number(one.get("collective_seq_id", one.get("seq_id")), "collective_seq_id"))
    pairwise = float(content.number(one["p2p_seq_id"], "p2p_seq_id")) if "p2p_seq_id" in one else collective
    sizes = one.get("input_sizes")
    group_id = content.number(one.get("pg_id"), "pg_id")
    group = content.sequence(one.get("process_group", (str(group_id), "")), "process_group")
    if len(group) != 2:
        raise ValueError("process_group is no pair")
    name, description = (content.text(text, "process_group") for text in group)
    entry = Entry(
        group_id,
        name,
        description,
        title.rpartition(":")[2].partition(" ")[0],
        pairwise if is_pairwise else collective,
        # With gloo, an operation is only marked as retired. With NCCL, a retired one that is not complete timed out.
        state == "completed" or (bool(one.get("retired")) and title.startswith("gloo:")),
        state == "started",
        is_pairwise,
        (int(match[1]),) if match else (),
        None if sizes is None else _count_elements(sizes, content),
    )
    return content.number(one.get("record_id", place), "record_id"), (name, collective, pairwise), entry


def _count_elements(sizes: object, content: Content) -> int:
    tensors = [content.sequence(size, "a size") for size in content.sequence(sizes, "input_sizes")]
    return sum(prod(content.number(length, "a size") for length in size[:DIMENSIONS_LIMIT]) for size in tensors)
