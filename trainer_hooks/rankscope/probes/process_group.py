"""The default process group: when one is made, also instead of another, and when it is destroyed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.timeline.timeline import Timeline


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the one function with which torch sets the default group."""
    if not dist.is_available():
        return []
    from torch.distributed import distributed_c10d

    notice = guard(timeline.groups.notice_default)

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched(pg: Any) -> None:
            original(pg)
            notice(pg is not None)

        return watched

    return [replace(distributed_c10d, "_update_default_pg", wrap)]
