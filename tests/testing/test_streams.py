"""Streams take one operation after the other, events lie in them, and the host waits only where it says so."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from testing.asynchronous_device import asynchronous_device, launch, read, streams


@pytest.fixture(autouse=True)
def device():
    with asynchronous_device():
        yield


@pytest.fixture
def gate():
    """Closed; what is put behind it in a stream has not happened yet. Opened at the latest when the test is over."""
    gate = threading.Event()
    yield gate
    gate.set()


def recorded(stream=None):
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def test_a_stream_takes_its_operations_in_order():
    done = []
    for number in range(100):
        torch.cuda.current_stream().put(lambda number=number: done.append(number))
    torch.cuda.synchronize()
    assert done == list(range(100))


def test_an_event_is_passed_after_what_was_launched_before_it(gate):
    before = recorded()
    torch.cuda.current_stream().put(gate.wait)
    launch(1)
    after = recorded()
    before.synchronize()
    assert before.query()
    assert not after.query()
    gate.set()
    after.synchronize()
    assert after.query()


def test_between_two_events_lies_the_device_time_of_what_was_launched():
    first = recorded()
    launch(20)
    second = recorded()
    launch(1)
    torch.cuda.synchronize()
    assert first.elapsed_time(second) >= 20


def test_the_last_recording_of_an_event_counts_and_none_is_over(gate):
    event = torch.cuda.Event()
    assert event.query()
    event.record()
    torch.cuda.synchronize()
    torch.cuda.current_stream().put(gate.wait)
    event.record()
    assert not event.query()


def test_events_without_timing_or_not_passed_have_no_elapsed_time(gate):
    torch.cuda.current_stream().put(gate.wait)
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(recorded())
    with pytest.raises(RuntimeError, match="passed"):
        recorded().elapsed_time(recorded())


@pytest.mark.parametrize("wait", ["wait_stream", "wait_event", "wait"])
def test_a_stream_that_waits_for_another_holds_up_neither_it_nor_the_host(gate, wait):
    other, current = torch.cuda.Stream(), torch.cuda.current_stream()
    other.put(gate.wait)
    if wait == "wait_stream":
        current.wait_stream(other)
    elif wait == "wait_event":
        current.wait_event(other.record_event())
    else:
        recorded(other).wait()
    after, unrelated = recorded(), recorded(torch.cuda.Stream())
    unrelated.synchronize()
    assert not after.query()
    gate.set()
    current.synchronize()
    assert after.query()


def test_torch_looks_every_method_up_in_the_class(monkeypatch, gate):
    seen = []
    for owner, name in ((torch.cuda.Event, "wait"), (torch.cuda.Event, "record"), (torch.cuda.Stream, "wait_event")):
        original = getattr(owner, name)

        def watched(self, *args, name=name, original=original):
            seen.append(name)
            return original(self, *args)

        monkeypatch.setattr(owner, name, watched)
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert seen == ["record", "wait_event", "wait"]


def test_what_is_read_is_read_after_all_that_was_launched():
    launch(20)
    event = recorded()
    assert read(torch.ones(1)) == 1.0
    assert event.query()


def test_the_current_stream_is_the_threads_own():
    mine, found = torch.cuda.Stream(), []
    with torch.cuda.stream(mine):
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == mine == torch.cpu.current_stream()
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == mine
    assert found == [torch.cuda.current_stream()]
    assert mine != torch.cuda.current_stream()
    assert mine.device == torch.cuda.current_stream().device


def test_a_stream_says_whether_it_has_anything_to_do(gate):
    stream = torch.cuda.Stream()
    assert stream.query()
    stream.put(gate.wait)
    assert not stream.query()


def test_the_host_does_not_run_ahead_without_end(gate):
    launched = threading.Event()

    def issue():
        torch.cuda.current_stream().put(gate.wait)
        for _ in range(3):
            launch(streams.AHEAD_SECONDS * 1000)
        launched.set()

    host = threading.Thread(target=issue)
    host.start()
    time.sleep(0.1)
    assert not launched.is_set()
    gate.set()
    host.join()


def test_what_fails_on_the_device_is_told_to_whoever_waits_next():
    torch.cuda.current_stream().put(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="division by zero"):
        read(torch.ones(1))
