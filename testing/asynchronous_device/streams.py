"""Streams and events: each stream is a thread that takes its operations in order, an event is a place in a stream.

The shape is that of torch/cuda/streams.py, because the hook replaces methods of these classes: `Stream.wait_stream`
calls `wait_event`, which calls `Event.wait`; `record_event` calls `Event.record`. What CUDA's users do in C++, and
hence past these methods, goes by the `put…` methods of a stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

DEVICE = torch.device("cuda", 0)
# A launch queue holds about a thousand kernels, of some 0.1 ms each: so far the host runs ahead, then a launch blocks.
AHEAD_SECONDS = 0.1
STOPS_WITHIN = 5.0  # seconds

Operation = Callable[[], None]

_current = threading.local()
_streams: list[Stream] = []
_errors: list[BaseException] = []


class Mark:
    """A place in a stream. The device passes it once."""

    def __init__(self) -> None:
        self.passed_at = 0.0  # time.monotonic()
        self._passed = threading.Event()
        self.is_passed = self._passed.is_set

    def wait(self) -> None:
        """Block the calling thread, a stream's or the host's, until then."""
        self._passed.wait()

    def reach(self) -> None:
        """The device is there."""
        self.passed_at = time.monotonic()
        self._passed.set()


class Stream:
    """As torch.cuda.Stream. Its thread begins with its first operation."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = DEVICE
        self._operations: deque[Operation | None] = deque()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._queued_seconds = 0.0
        self._thread: threading.Thread | None = None
        _streams.append(self)
        self.stream_id = self.cuda_stream = len(_streams)

    # As torch's.

    def wait_event(self, event: Event) -> None:
        """What is put into this stream from now on comes after the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """What is put into this stream from now on comes after what is in that one now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event at the end."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything is done."""
        return not self._unfinished

    def synchronize(self) -> None:
        """The host waits until everything is done."""
        self.drain()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    # What CUDA's users do below Python.

    def put(self, operation: Operation) -> None:
        """Have the thread do it after everything before."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"stream {self.stream_id}", daemon=True)
                self._thread.start()
            self._unfinished += 1
            self._operations.append(operation)
            self._changed.notify_all()

    def put_mark(self) -> Mark:
        """At the end."""
        mark = Mark()
        self.put(mark.reach)
        return mark

    def put_wait(self, mark: Mark) -> None:
        """The stream waits here until the mark, of whichever stream, is passed."""
        self.put(mark.wait)

    def put_work(self, seconds: float) -> None:
        """So much of the device's time. The host blocks here while it is too far ahead."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued_seconds <= AHEAD_SECONDS)
            self._queued_seconds += seconds

        def work() -> None:
            if not _errors:
                time.sleep(seconds)
            with self._changed:
                self._queued_seconds -= seconds
                self._changed.notify_all()

        self.put(work)

    def put_unless_failed(self, operation: Operation) -> None:
        """As `put`; after an error nothing more is done on the device, as on CUDA's."""
        self.put(lambda: None if _errors else operation())

    def drain(self) -> None:
        """The host blocks until everything is done. Raises RuntimeError if anything failed on the device."""
        self.put_mark().wait()
        raise_error()

    def stop(self) -> None:
        """End the thread after what it has to do, unless that never ends."""
        if self._thread is None:
            return
        with self._changed:
            self._operations.append(None)
            self._changed.notify_all()
        self._thread.join(STOPS_WITHIN)
        self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._operations)
                operation = self._operations.popleft()
            if operation is None:
                return
            try:
                operation()
            except BaseException as error:  # the host is told when it waits
                _errors.append(error)
            with self._changed:
                self._unfinished -= 1


class Event:
    """As torch.cuda.Event: its last recording counts; one that was never recorded is over."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._enable_timing = enable_timing
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Put it at the end of the stream, by default the current one."""
        self._mark = (stream or current_stream()).put_mark()

    def wait(self, stream: Stream | None = None) -> None:
        """What is put into the stream from now on, by default the current one, comes after this."""
        if self._mark is not None:
            (stream or current_stream()).put_wait(self._mark)

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self._mark is None or self._mark.is_passed()

    def synchronize(self) -> None:
        """The host waits until the device has passed it."""
        if self._mark is not None:
            self._mark.wait()
        raise_error()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of the device from here to there. Raises RuntimeError as torch does."""
        marks = self._mark, end_event._mark
        if not (self._enable_timing and end_event._enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if marks[0] is None or marks[1] is None or not (self.query() and end_event.query()):
            raise RuntimeError("both events must be recorded and passed")
        return (marks[1].passed_at - marks[0].passed_at) * 1000


_default = Stream()


def current_stream(*_device: object, **__: object) -> Stream:
    """The calling thread's."""
    found: Stream = getattr(_current, "stream", _default)
    return found


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """What the calling thread issues within goes to this stream."""
    before = current_stream()
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def synchronize(*_device: object, **__: object) -> None:
    """The host waits until everything is done, in every stream."""
    for each in tuple(_streams):
        each.drain()


def launch(milliseconds: float, host_milliseconds: float = 0) -> None:
    """Work for the device in the current stream, which takes the host so long to issue."""
    if host_milliseconds:
        time.sleep(host_milliseconds / 1000)
    if milliseconds:
        current_stream().put_work(milliseconds / 1000)


def read(tensor: torch.Tensor) -> float:
    """`tensor.item()` as on a device: the host waits for all that the current stream holds."""
    torch.cuda.current_stream().synchronize()
    return tensor.item()


def raise_error() -> None:
    """Raises RuntimeError if anything failed on the device."""
    if _errors:
        raise RuntimeError(f"the device failed: {_errors[0]}") from _errors[0]


def stop_all() -> None:
    """End every thread, and forget what was made and what failed."""
    for each in _streams:
        each.stop()
    _streams[:] = [_default]
    _errors.clear()
