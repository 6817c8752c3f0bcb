"""Functions for training scripts. Each call costs next to nothing in a process that is not instrumented."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rankscope.attach import Attachment

Item = TypeVar("Item")


def instrument() -> None:
    """Watch the training in this process. Call it before the model is built. Idempotent; never raises."""
    with contextlib.suppress(Exception):  # `attach` warns of it
        import torch  # noqa: F401 - with RANKSCOPE set, it calls `autoload`, which cannot use a half imported `attach`

    from rankscope import attach

    attach.instrument()


def uninstrument() -> None:
    """Undo `instrument()` exactly: restore every patched object."""
    from rankscope import attach

    attach.uninstrument()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Charge the time inside to the phase `name`.

    `evaluation` and `checkpoint` absorb what they contain: a data wait in an evaluation is evaluation. A `checkpoint`
    that does not raise counts as one checkpoint. With a name of your own, as with `forward`, the innermost phase gets
    the time. A run may have 21 such names, of at most 200 printable characters; the time of any other is `other`.

    A phase belongs to its task (of asyncio, for example). While the task awaits, another one trains outside the phase.
    So does the caller of a generator that yields within a phase.
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
        except BaseException:  # Ctrl-C before the guard is entered
            attachment.timeline.unwind()
            raise


def step(samples: float | None = None, tokens: float | None = None) -> None:
    """Mark the end of a training step. From the first call on, only these calls do.

    Needed in loops without an optimizer, or if torch.compile compiles the optimizer's `step`: watching that would
    recompile it. Without these calls, each backward pass there counts as a step after the first hundred.

    `samples` and `tokens` are the numbers that this rank trained on in the step. By default they are counted from the
    batches that it fetched, where possible. A value that is negative or not finite is not counted.
    """
    attachment = _attachment()
    if attachment is not None:
        attachment.step(samples, tokens)


def log(loss: float | None = None, gradient_norm: float | None = None) -> None:
    """Report the loss or the gradient norm of the step, so that Rankscope shows since when it is NaN or infinite.

    Not needed if Hugging Face's Trainer, Lightning, W&B, MLflow or TensorBoard gets them as `loss` and `grad_norm`.
    Call it where the script has numbers, for example each time it prints them: a tensor is ignored, because reading it
    would wait for the GPU.
    """
    attachment = _attachment()
    if attachment is not None:
        attachment.log((("loss", loss), ("gradient_norm", gradient_norm)))


def timed(iterable: Iterable[Item]) -> Iterator[Item]:
    """Return an iterator over the same items that charges the wait for each to data wait and counts its samples.

    The result has the methods and attributes of the iterator. For loops without torch's DataLoader, which is watched
    anyway.
    """
    with phase("data_wait"):  # it may start workers
        iterator = iter(iterable)
    attachment = _attachment()
    watched = None if attachment is None else attachment.timed(iterator)
    return iterator if watched is None else watched  # `or` would call its `__bool__` or `__len__`, which may raise


def _attachment() -> Attachment | None:
    attach = sys.modules.get("rankscope.attach")
    return attach.current() if attach is not None else None
