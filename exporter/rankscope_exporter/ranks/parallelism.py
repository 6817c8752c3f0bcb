"""A rank's place in each kind of parallelism, from its process groups.

The description of a group names its kind: a dimension of a device mesh (`mesh_tp`), or Megatron's name
(`TENSOR_MODEL_PARALLEL_GROUP`). A group may have several: Megatron may divide the experts like the data. Without a
description, a group whose ranks send to each other is a pipeline if it is a part of the run. If all ranks of the run
send to each other, as with a parameter server, they are a pipeline only if their steps have no other collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, repeat

from rankscope.record import layout
from rankscope.record.group_name import members
from rankscope.record.snapshot import RankSnapshot

PIPELINE, TENSOR, DATA, CONTEXT, EXPERT = KINDS = ("pp", "tp", "dp", "cp", "ep")
FSDP = "fsdp"
DATA_AND_CONTEXT, REPLICA, SHARD = "dp_cp", "dp_replicate", "dp_shard"
"""Groups that have a part of the data-parallel ranks, or context-parallel ones as well."""
NAMES = {
    PIPELINE: r"pp|stages?|pipe(?:line)?(?:(?:_model)?_parallel)?(?:_group)?",
    TENSOR: r"tp|mp|model|tensor(?:(?:_model)?_parallel)?(?:_group)?",
    CONTEXT: r"cp|sp|seq|(?:context|sequence)(?:_parallel)?(?:_group)?",
    EXPERT: r"ep|experts|expert(?:(?:_model)?_parallel)?(?:_group)?",
    DATA: r"dp|batch|data(?:_parallel)?(?:_group)?",
    DATA_AND_CONTEXT: r"dp_cp|data_parallel_group_with_cp",
    REPLICA: r"ddp|(?:dp_)?(?:replicas?|replicate)",
    SHARD: r"fsdp|(?:dp_)?shard(?:_cp)?",
}
"""Descriptions by kind, as in Megatron, DeepSpeed, torchtitan, transformers, accelerate and lightning."""
_NAMES = {kind: re.compile(rf"(?:mesh_)?(?:{names})(?:_gloo)?", re.IGNORECASE) for kind, names in NAMES.items()}
MOST_COMPARED = 4096
"""The most ranks of a group that are looked for in another one: any process can write the name of a larger one."""
SENDS = tuple(layout.OPS.index(op) for op in ("send", "recv"))

Groups = tuple[tuple[str, str], ...]
"""Names and descriptions of groups."""


def coordinates(snapshot: RankSnapshot) -> Mapping[str, int]:
    """Return the rank's place in its group, from 0 on, by kind of parallelism. Unknown kinds are absent."""
    calls = snapshot.many("collectives")
    sent = sum(calls[op] for op in SENDS)
    info = snapshot.info
    groups = tuple(zip(snapshot.groups, chain(info.get("group_descriptions", ()), repeat("")), strict=False))
    pairwise = tuple(map(str, info.get("pairwise", ())))
    only_sends = sent > snapshot["steps"] > 2.0 * (sum(calls) - sent)
    return _coordinates(int(info["rank"]), str(info["group"]), groups, pairwise, only_sends)


def stage(snapshot: RankSnapshot) -> int | None:
    """Return the rank's pipeline stage; None without a pipeline, or if its group is unknown."""
    return coordinates(snapshot).get(PIPELINE)


def in_steps(snapshot: RankSnapshot) -> tuple[str, ...]:
    """Return the rank's kinds of parallelism that need collectives within a step, and not only at its end."""
    settings = str(snapshot.info.get("settings", {}).get("parallelism", "")).replace("fsdp2", FSDP).split("+")
    named = {*coordinates(snapshot), *settings}
    return tuple(kind for kind in (TENSOR, CONTEXT, EXPERT, FSDP) if kind in named)


@lru_cache(maxsize=1024)
def _coordinates(
    rank: int, world: str, groups: Groups, pairwise: tuple[str, ...], only_sends: bool
) -> Mapping[str, int]:
    named = {
        kind: [name for name, texts in groups if any(form.fullmatch(text) for text in texts.split(","))]
        for kind, form in _NAMES.items()
    }
    if not named[PIPELINE]:
        known = {name for names in named.values() for name in names}  # context parallel ranks send as well
        sending = [name for index, (name, _) in enumerate(groups) if str(index) in pairwise and name not in known]
        parts = [name for name in sending if name != world]
        named[PIPELINE] = parts or (sending if only_sends else [])
    found = {kind: ranks for kind, names in named.items() if (ranks := _ranks(rank, names))}
    places = {kind: ranks.index(rank) for kind, ranks in found.items() if kind in KINDS}
    data = _data_place(rank, found)
    return places if data is None else {**places, DATA: data}


def _ranks(rank: int, names: list[str]) -> Sequence[int]:
    """Return the ranks of the first of these groups that has the rank and others."""
    return next((ranks for name in names if rank in (ranks := members(name)) and len(ranks) > 1), ())


def _data_place(rank: int, found: Mapping[str, Sequence[int]]) -> int | None:
    """Return the rank's place among the data-parallel ranks, by their group or by the rank's replica and shard."""
    parts = [found[kind] for kind in (DATA, DATA_AND_CONTEXT, REPLICA, SHARD) if kind in found]
    if not parts:
        return None
    whole, shard = parts[0], parts[-1]
    shared = sum(one in whole for one in islice(shard, MOST_COMPARED))
    place = 0
    for ranks in (whole, shard) if shared == 1 else (whole,):
        # Context-parallel ranks have the same place: frameworks number them first.
        context = found.get(CONTEXT, (rank,))
        alike = len(context) if all(one in ranks for one in islice(context, MOST_COMPARED)) else 1
        place = place * (len(ranks) // alike) + ranks.index(rank) // alike
    return place
