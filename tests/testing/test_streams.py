"""Streams run their operations in order, events mark places in them, and the host waits only where it asks to."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from testing.asynchronous_device import asynchronous_device, launch, read, streams
from testing.waiting import in_a_thread


@pytest.fixture(autouse=True)
def device():
    with asynchronous_device():
        yield


@pytest.fixture
def gate():
    """Yield a closed gate: it blocks a stream until it is opened, at the latest at the end of the test."""
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


def test_an_event_is_passed_after_work_launched_before_it(gate):
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


def test_the_time_between_two_events_is_the_launched_device_time():
    first = recorded()
    launch(20)
    second = recorded()
    launch(1)
    torch.cuda.synchronize()
    assert first.elapsed_time(second) >= 20


def test_the_last_recording_of_an_event_counts_and_an_unrecorded_event_has_passed(gate):
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
def test_a_stream_that_waits_for_another_blocks_neither_it_nor_the_host(gate, wait):
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


def test_torch_calls_every_method_through_the_class(monkeypatch, gate):
    seen = []
    for owner, name in ((torch.cuda.Event, "wait"), (torch.cuda.Event, "record"), (torch.cuda.Stream, "wait_event")):
        original = getattr(owner, name)

        def watched(self, *args, name=name, original=original):
            seen.append(name)
            return original(self, *args)

        monkeypatch.setattr(owner, name, watched)
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert seen == ["record", "wait_event", "wait"]


def test_a_read_waits_for_all_launched_work():
    launch(20)
    event = recorded()
    assert read(torch.ones(1)) == 1.0
    assert event.query()


def test_the_current_stream_is_the_threads_own():
    mine, found = torch.cuda.Stream(), []
    with torch.cuda.stream(mine):
        in_a_thread(lambda: found.append(torch.cuda.current_stream()))
        assert torch.cuda.current_stream() == mine == torch.cpu.current_stream()
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == mine
    assert found == [torch.cuda.current_stream()]
    assert mine != torch.cuda.current_stream()
    assert mine.device == torch.cuda.current_stream().device


def test_a_stream_reports_whether_it_has_work(gate):
    stream = torch.cuda.Stream()
    assert stream.query()
    stream.put(gate.wait)
    assert not stream.query()


def test_the_host_runs_ahead_only_so_far(gate):
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


def test_a_failure_on_the_device_is_raised_at_the_next_wait():
    torch.cuda.current_stream().put(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="division by zero"):
        read(torch.ones(1))
