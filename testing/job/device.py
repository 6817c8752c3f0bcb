"""The two kinds of device that the job trains on. Either takes time without computing anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

import torch

from testing.asynchronous_device import BACKEND, asynchronous_device, launch, read

GLOO = "gloo"
"""The host is the device, and waits for other ranks in every collective."""
ASYNCHRONOUS = "asynchronous"
"""The device of testing/asynchronous_device: the host runs ahead, and waits where it reads a value."""
DEVICES = (GLOO, ASYNCHRONOUS)


def sleep(milliseconds: float) -> None:
    """Sleep, but not for 0: a sleep of 0 still yields the CPU."""
    if milliseconds:
        time.sleep(milliseconds / 1000)


def compute(milliseconds: float) -> None:
    """Use CPU time in this thread."""
    end = time.thread_time() + milliseconds / 1000
    while time.thread_time() < end:
        sum(range(1000))


class GlooDevice:
    """The host's thread as the device."""

    backend = "gloo"

    def take(self, milliseconds: float, issue: float = 0) -> None:
        """Work for some time. `issue` must be 0: the host does not issue work."""
        assert not issue
        sleep(milliseconds)

    def read(self, tensor: torch.Tensor) -> float:
        return tensor.item()


class AsynchronousDevice:
    """A device that the host runs ahead of."""

    backend = BACKEND

    def take(self, milliseconds: float, issue: float = 0) -> None:
        """Work for some time in one launch, or in one per millisecond if issuing takes host time."""
        launches = ceil(milliseconds) if issue else 1
        for _ in range(launches):
            launch(milliseconds / launches, host_milliseconds=issue * milliseconds / launches)

    def read(self, tensor: torch.Tensor) -> float:
        """Return the value of a tensor, after the host has waited for it."""
        return read(tensor)


Device = GlooDevice | AsynchronousDevice


@contextmanager
def installed(kind: str, on_transfer: Callable[[], None] | None = None) -> Iterator[Device]:
    """Give torch the device of this kind until the block ends.

    The asynchronous device calls `on_transfer` in every collective. Over gloo the job delays transfers itself.
    """
    if kind == GLOO:
        yield GlooDevice()
        return
    assert kind == ASYNCHRONOUS
    with asynchronous_device(on_transfer):
        yield AsynchronousDevice()
