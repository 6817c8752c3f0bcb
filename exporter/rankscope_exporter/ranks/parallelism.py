"""Where a rank is in the run's layout: its stage of the pipeline, by its groups of ranks.

The group of a pipeline is the one that is described so when it is made (`mesh_pp`, Megatron's
PIPELINE_MODEL_PARALLEL_GROUP); else a part of the run whose ranks send to each other. All ranks of a run send to each
other in other runs, too: there it is a pipeline only if they do that more often than anything else.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain, repeat

from rankscope.record import layout
from rankscope.record.group_name import members
from rankscope.record.snapshot import RankSnapshot

PIPELINE = re.compile(r"(?:mesh_)?(?:pp|pipe|pipeline|stages?)|pipeline_model_parallel_group", re.IGNORECASE)
SENDS = tuple(layout.OPS.index(op) for op in ("send", "recv"))


def stage(snapshot: RankSnapshot) -> int | None:
    """Return the rank's stage, from 0 on. None where there is no pipeline, or where its group cannot be known."""
    calls = snapshot.many("collectives")
    sent = sum(calls[op] for op in SENDS)
    info = snapshot.info
    groups = tuple(zip(snapshot.groups, chain(info.get("group_descriptions", ()), repeat("")), strict=False))
    pairwise = tuple(map(str, info.get("pairwise", ())))
    is_mostly_sending = sent > sum(calls) - sent
    return _stage(int(info["rank"]), str(info["group"]), groups, pairwise, is_mostly_sending)


@lru_cache(maxsize=1024)
def _stage(
    rank: int, world: str, groups: tuple[tuple[str, str], ...], pairwise: tuple[str, ...], is_mostly_sending: bool
) -> int | None:
    described = [name for name, description in groups if PIPELINE.fullmatch(description)]
    sending = [name for index, (name, _) in enumerate(groups) if str(index) in pairwise]
    parts = [name for name in sending if name != world]
    candidates = described or parts or (sending if is_mostly_sending else [])
    found = [ranks for name in candidates if rank in (ranks := members(name)) and len(ranks) > 1]
    return sorted(found[0]).index(rank) if found else None
