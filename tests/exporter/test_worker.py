"""The worker thread: continues after an exception, and closes what it opened on its own thread."""

from __future__ import annotations

import threading

import pytest

from rankscope_exporter.worker import Worker


def test_a_repeated_exception_is_logged_once_and_the_calls_continue(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    has_recovered = threading.Event()

    def task() -> None:
        calls.append(1)
        if len(calls) < 4:
            raise ZeroDivisionError
        has_recovered.set()

    worker = Worker("test", 0.01, task, "a call failed")
    worker.start()
    assert has_recovered.wait(60)
    assert worker.stop(60)
    assert not worker.is_running
    assert [record.getMessage() for record in caplog.records] == ["a call failed"]


def test_a_call_can_set_the_time_until_the_next() -> None:
    was_called_twice = threading.Event()
    pauses = iter([0.0])

    def task() -> float:
        pause = next(pauses, None)
        if pause is None:
            was_called_twice.set()
        return pause or 0.0

    worker = Worker("test", 3600.0, task, "a call failed")
    worker.start()
    assert was_called_twice.wait(60)
    assert worker.stop(60)


def test_at_end_runs_on_the_thread_after_the_last_call() -> None:
    events: list[tuple[str, int]] = []

    def task() -> None:
        events.append(("task", threading.get_ident()))
        worker.request_stop()

    worker = Worker("test", 3600.0, task, "", at_end=lambda: events.append(("end", threading.get_ident())))
    worker.start()
    assert worker.join(60)
    assert [event for event, _ in events] == ["task", "end"]
    assert len({thread for _, thread in events} - {threading.get_ident()}) == 1


def test_a_call_that_hangs_does_not_delay_stop() -> None:
    may_return = threading.Event()
    worker = Worker("test", 0.0, lambda: may_return.wait(60) and None, "")
    worker.start()
    assert not worker.stop(0.01)
    may_return.set()
    assert worker.join(60)
