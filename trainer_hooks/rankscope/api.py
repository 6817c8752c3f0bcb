"""What a training script may call. Each call costs next to nothing while the process is not instrumented."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.attach import Attachment


def instrument() -> None:
    """Watch the training in this process: at best before the model is built. Twice is once; never raises."""
    from rankscope import attach

    attach.instrument()


def uninstrument() -> None:
    """Undo `instrument()` exactly: every patched object is what it was."""
    from rankscope import attach

    attach.uninstrument()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Charge the time inside to the phase `name`.

    `evaluation` and `checkpoint` absorb what they contain (an evaluation's data wait is evaluation); a name of
    your own counts like `forward`: the innermost phase gets the time. At most 23 names of your own a run.
    """
    attachment = _attachment()
    if attachment is None:
        yield
        return
    depth = attachment.enter_phase(name)
    try:
        yield
    finally:
        attachment.leave_phase(depth)


def step() -> None:
    """Mark the end of a training step; from the first call on, only these calls do.

    Needed where no optimizer does it: in loops without one, or with its `step` compiled by torch.compile, which
    cannot be watched without being compiled anew.
    """
    attachment = _attachment()
    if attachment is not None:
        attachment.step()


def _attachment() -> Attachment | None:
    attach = sys.modules.get("rankscope.attach")
    return attach.current() if attach is not None else None
