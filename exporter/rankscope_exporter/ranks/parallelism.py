"""A rank's place in each kind of parallelism, from its process groups.

The description of a group names its kind: a dimension of a device mesh (`mesh_tp`), or Megatron's name
(`TENSOR_MODEL_PARALLEL_GROUP`). Without a description, a group whose ranks send to each other is a pipeline if it is a
part of the run. If all ranks of the run send to each other, as with a parameter server, they are a pipeline only if
their steps have no other collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain, repeat

from rankscope.record import layout
from rankscope.record.group_name import members
from rankscope.record.snapshot import RankSnapshot

PIPELINE, TENSOR, DATA, CONTEXT, EXPERT = "pp", "tp", "dp", "cp", "ep"
KINDS = {
    PIPELINE: r"(?:mesh_)?(?:pp|pipe|pipeline|stages?)|pipeline_model_parallel_group",
    TENSOR: r"(?:mesh_)?(?:tp|tensor)|tensor_model_parallel_group",
    DATA: r"(?:mesh_)?(?:dp|ddp|fsdp|data|replicas?)|data_parallel_group(?:_with_cp)?",
    CONTEXT: r"(?:mesh_)?(?:cp|context)|context_parallel_group",
    EXPERT: r"(?:mesh_)?(?:ep|experts?)|expert_model_parallel_group",
}
"""Descriptions of groups by kind of parallelism."""
_KINDS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in KINDS.items()}
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


@lru_cache(maxsize=1024)
def _coordinates(
    rank: int, world: str, groups: Groups, pairwise: tuple[str, ...], only_sends: bool
) -> Mapping[str, int]:
    named = {kind: [name for name, text in groups if form.fullmatch(text)] for kind, form in _KINDS.items()}
    if not named[PIPELINE]:
        known = {name for names in named.values() for name in names}  # context parallel ranks send as well
        sending = [name for index, (name, _) in enumerate(groups) if str(index) in pairwise and name not in known]
        parts = [name for name in sending if name != world]
        named[PIPELINE] = parts or (sending if only_sends else [])
    places = {kind: _place(rank, names) for kind, names in named.items()}
    return {kind: place for kind, place in places.items() if place is not None}


def _place(rank: int, names: list[str]) -> int | None:
    """Return the rank's place in the first of these groups that has the rank and others."""
    found = [ranks for name in names if rank in (ranks := members(name)) and len(ranks) > 1]
    return found[0].index(rank) if found else None
