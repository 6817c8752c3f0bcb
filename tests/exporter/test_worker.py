"""The one kind of thread: it goes on after a mistake, and what it opened is closed where it was opened."""

from __future__ import annotations

import threading

import pytest

from rankscope_exporter.worker import Worker


def test_a_mistake_in_every_turn_is_logged_once_and_the_next_turn_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[int] = []
    has_gone_on = threading.Event()

    def turn() -> None:
        turns.append(1)
        if len(turns) < 4:
            raise ZeroDivisionError
        has_gone_on.set()

    worker = Worker("turns", 0.01, turn, "a turn failed")
    worker.start()
    assert has_gone_on.wait(60)
    assert worker.stop(60)
    assert not worker.is_running
    assert [record.getMessage() for record in caplog.records] == ["a turn failed"]


def test_a_turn_says_itself_when_the_next_one_is() -> None:
    has_turned_twice = threading.Event()
    pauses = iter([0.0])

    def turn() -> float:
        pause = next(pauses, None)
        if pause is None:
            has_turned_twice.set()
        return pause or 0.0

    worker = Worker("turns", 3600.0, turn, "a turn failed")
    worker.start()
    assert has_turned_twice.wait(60)
    assert worker.stop(60)


def test_the_end_comes_in_the_thread_after_the_last_turn() -> None:
    seen: list[tuple[str, int]] = []

    def turn() -> None:
        seen.append(("turn", threading.get_ident()))
        worker.request_stop()

    worker = Worker("turns", 3600.0, turn, "", at_end=lambda: seen.append(("end", threading.get_ident())))
    worker.start()
    assert worker.join(60)
    assert [what for what, _ in seen] == ["turn", "end"]
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_a_call_that_hangs_does_not_hold_up_who_stops_it() -> None:
    goes_on = threading.Event()
    worker = Worker("turns", 0.0, lambda: goes_on.wait(60) and None, "")
    worker.start()
    assert not worker.stop(0.01)
    goes_on.set()
    assert worker.join(60)
