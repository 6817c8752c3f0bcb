"""The default process group: its creation, replacement and destruction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.timeline.timeline import Timeline

DESTROY_FUNCTION = "destroy_process_group"


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the function with which torch sets the default group. An abort is not the end of the work."""
    if not dist.is_available():
        return []
    from torch.distributed import distributed_c10d

    notice = guard(timeline.groups.notice_default)

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched(pg: Any) -> None:
            original(pg)
            if pg is not None or sys._getframe(1).f_code.co_name == DESTROY_FUNCTION:  # noqa: SLF001 - the documented name
                notice(pg is not None)

        return watched

    return [replace(distributed_c10d, "_update_default_pg", wrap)]
