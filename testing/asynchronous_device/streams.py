"""Streams and events: a stream is a thread that runs its operations in order, an event is a place in a stream.

The classes have the structure of torch/cuda/streams.py, because the hook replaces their methods: `Stream.wait_stream`
calls `wait_event`, which calls `Event.wait`; `record_event` calls `Event.record`. What CUDA's users do in C++, past
these methods, uses the `put…` methods of a stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

DEVICE = torch.device("cuda", 0)
# A launch queue holds about a thousand kernels of some 0.1 ms each. Beyond that a launch blocks the host.
AHEAD_SECONDS = 0.1
STOPS_WITHIN = 5.0  # seconds

Operation = Callable[[], None]

_current = threading.local()
_streams: list[Stream] = []
_errors: list[BaseException] = []


class Mark:
    """A place in a stream, which the device passes once."""

    def __init__(self) -> None:
        self.passed_at = 0.0  # time.monotonic()
        self._passed = threading.Event()
        self.is_passed = self._passed.is_set

    def wait(self) -> None:
        """Block the calling thread until the device has passed the mark."""
        self._passed.wait()

    def reach(self) -> None:
        """Mark the place as passed."""
        self.passed_at = time.monotonic()
        self._passed.set()


class Stream:
    """A stream with the interface of torch.cuda.Stream. Its thread starts with its first operation."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = DEVICE
        self._operations: deque[Operation | None] = deque()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._queued_seconds = 0.0
        self._thread: threading.Thread | None = None
        _streams.append(self)
        self.stream_id = self.cuda_stream = len(_streams)

    # The interface of torch.

    def wait_event(self, event: Event) -> None:
        """Order everything put into this stream from now on after the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Order everything put into this stream from now on after the present content of that one."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event at the end of the stream, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether everything is done."""
        return not self._unfinished

    def synchronize(self) -> None:
        """Block the host until everything is done."""
        self.drain()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    # For code that uses CUDA below Python.

    def put(self, operation: Operation) -> None:
        """Add an operation at the end."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"stream {self.stream_id}", daemon=True)
                self._thread.start()
            self._unfinished += 1
            self._operations.append(operation)
            self._changed.notify_all()

    def put_mark(self) -> Mark:
        """Add a mark at the end, and return it."""
        mark = Mark()
        self.put(mark.reach)
        return mark

    def put_wait(self, mark: Mark) -> None:
        """Make the stream wait until the mark, of any stream, is passed."""
        self.put(mark.wait)

    def put_work(self, seconds: float) -> None:
        """Add device time. Block the host while it is too far ahead."""
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
        """Add an operation, as `put`. After an error the device does nothing more, as with CUDA."""
        self.put(lambda: None if _errors else operation())

    def drain(self) -> None:
        """Block the host until everything is done. Raises RuntimeError if anything failed on the device."""
        self.put_mark().wait()
        raise_error()

    def stop(self) -> None:
        """End the thread after its remaining operations, unless one never ends."""
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
            except BaseException as error:  # raised when the host waits
                _errors.append(error)
            with self._changed:
                self._unfinished -= 1


class Event:
    """An event with the interface of torch.cuda.Event: its last recording counts; without one it has passed."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._enable_timing = enable_timing
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event at the end of the stream, by default the current one."""
        self._mark = (stream or current_stream()).put_mark()

    def wait(self, stream: Stream | None = None) -> None:
        """Order everything put into the stream, by default the current one, from now on after this event."""
        if self._mark is not None:
            (stream or current_stream()).put_wait(self._mark)

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        return self._mark is None or self._mark.is_passed()

    def synchronize(self) -> None:
        """Block the host until the device has passed the event."""
        if self._mark is not None:
            self._mark.wait()
        raise_error()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the device's milliseconds from this event to the other. Raises RuntimeError as torch does."""
        marks = self._mark, end_event._mark
        if not (self._enable_timing and end_event._enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if marks[0] is None or marks[1] is None or not (self.query() and end_event.query()):
            raise RuntimeError("both events must be recorded and passed")
        return (marks[1].passed_at - marks[0].passed_at) * 1000


_default = Stream()


def current_stream(*_device: object, **__: object) -> Stream:
    """Return the calling thread's stream."""
    found: Stream = getattr(_current, "stream", _default)
    return found


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make this the calling thread's stream until the block ends."""
    before = current_stream()
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def synchronize(*_device: object, **__: object) -> None:
    """Block the host until everything is done, in every stream."""
    for each in tuple(_streams):
        each.drain()


def launch(milliseconds: float, host_milliseconds: float = 0) -> None:
    """Launch device work in the current stream; issuing it takes the host `host_milliseconds`."""
    if host_milliseconds:
        time.sleep(host_milliseconds / 1000)
    if milliseconds:
        current_stream().put_work(milliseconds / 1000)


def read(tensor: torch.Tensor) -> float:
    """Return `tensor.item()` as on a device: the host waits for all work in the current stream."""
    torch.cuda.current_stream().synchronize()
    return tensor.item()


def raise_error() -> None:
    """Raise RuntimeError if anything failed on the device."""
    if _errors:
        raise RuntimeError(f"the device failed: {_errors[0]}") from _errors[0]


def stop_all() -> None:
    """End every thread, and forget all streams and errors."""
    for each in _streams:
        each.stop()
    _streams[:] = [_default]
    _errors.clear()
