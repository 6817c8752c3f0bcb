"""What a training script may call. Each call costs next to nothing while the process is not instrumented."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rankscope.attach import Attachment

Item = TypeVar("Item")


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

    `evaluation` and `checkpoint` absorb what they contain (an evaluation's data wait is evaluation), and a
    `checkpoint` that does not raise counts as one; a name of your own counts like `forward`: the innermost phase
    gets the time. At most 21 names of your own a run; the time of one that is blank, longer than 200 characters, cannot
    be printed or is one too many counts as `other`.
    """
    attachment = _attachment()
    if attachment is None:
        yield
        return
    opened, succeeded = attachment.enter_phase(name), False
    try:
        yield
        succeeded = True
    finally:
        try:
            attachment.leave_phase(opened, succeeded)
        except BaseException:  # Ctrl-C on the way in, past the guard
            attachment.timeline.unwind()
            raise


def step(samples: float | None = None, tokens: float | None = None) -> None:
    """Mark the end of a training step; from the first call on, only these calls do.

    Of use where no optimizer does it: in loops without one, or with its `step` compiled by torch.compile, which
    cannot be watched without being compiled anew. There each backward pass counts as a step, once there were
    more than a hundred, until this is called. `samples` and `tokens` are what this rank trained on in the step,
    as plain numbers; without them they are taken from the batches that it fetched, as far as these tell. What is not a
    finite number of 0 or more is not counted.
    """
    attachment = _attachment()
    if attachment is not None:
        attachment.step(samples, tokens)


def timed(iterable: Iterable[Item]) -> Iterator[Item]:
    """The same items, as an iterator: the time in which each is waited for is data wait, and their samples count.

    What it returns has the methods and attributes of the iterator. For loops that get their batches from anything but
    torch's DataLoader, which needs nothing of the kind.
    """
    iterator, attachment = iter(iterable), _attachment()
    return iterator if attachment is None else attachment.timed(iterator) or iterator


def _attachment() -> Attachment | None:
    attach = sys.modules.get("rankscope.attach")
    return attach.current() if attach is not None else None
