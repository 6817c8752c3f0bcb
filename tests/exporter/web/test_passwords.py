"""The order of password checks: addresses take turns, and checks of disconnected clients are dropped."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import bcrypt
import pytest

from rankscope_exporter.web import limits
from rankscope_exporter.web.passwords import NICE, Check, CheckQueue, Passwords, TooManyChecksError


def check(password: str, user: str = "alice") -> Check:
    return Check(user, password.encode(), b"", password.encode(), is_known=True)


def is_connected() -> bool:
    return False


def is_disconnected() -> bool:
    return True


def order(queue: CheckQueue) -> list[str]:
    checks = []
    while one := queue.next():
        checks.append(one.password.decode())
    return checks


def run_in_loop(test: Callable[[CheckQueue], None]) -> None:
    async def run() -> None:
        test(CheckQueue())

    asyncio.run(run())


def test_addresses_take_turns() -> None:
    def turns(queue: CheckQueue) -> None:
        for number in range(4):
            queue.add("attacker", check(f"guess {number}"), is_connected)
        queue.add("prometheus", check("right"), is_connected)
        assert order(queue) == ["guess 0", "right", "guess 1", "guess 2", "guess 3"]

    run_in_loop(turns)


def test_equal_credentials_are_queued_once() -> None:
    def same(queue: CheckQueue) -> None:
        first = queue.add("x", check("a"), is_disconnected)
        assert queue.add("x", check("a", "bob"), is_connected) is not first
        assert len(queue) == 1  # the client of the first check has disconnected
        again = queue.add("x", check("a"), is_connected)
        assert queue.add("x", check("a"), is_disconnected) is again
        assert len(queue) == 2
        assert order(queue) == ["a", "a"]  # bob's and alice's; one of alice's two clients is connected

    run_in_loop(same)


def test_checks_of_disconnected_clients_are_dropped_and_fail() -> None:
    def disconnected(queue: CheckQueue) -> None:
        numbers = range(3 * limits.PASSWORD_CHECKS_PER_ADDRESS)
        checks = [queue.add("x", check(f"{number}"), is_disconnected) for number in numbers]
        assert order(queue) == []
        assert not any(one.matches.result() for one in checks)

    run_in_loop(disconnected)


def test_one_address_gets_a_part_of_the_queue() -> None:
    def part(queue: CheckQueue) -> None:
        for number in range(limits.PASSWORD_CHECKS_PER_ADDRESS):
            queue.add("x", check(f"{number}"), is_connected)
        with pytest.raises(TooManyChecksError):
            queue.add("x", check("more"), is_connected)
        queue.add("y", check("other"), is_connected)

    run_in_loop(part)


def test_a_full_queue_drops_a_check_of_the_busiest_address_for_a_new_one() -> None:
    def full(queue: CheckQueue) -> None:
        numbers = range(4 * limits.PASSWORD_CHECKS_PER_ADDRESS)
        waiting = [queue.add(f"{number % 4}", check(f"{number}"), is_connected) for number in numbers]
        assert len(queue) == limits.PASSWORD_CHECKS
        queue.add("new", check("right"), is_connected)
        assert len(queue) == limits.PASSWORD_CHECKS
        (dropped,) = (one for one in waiting if one.matches.done())
        assert isinstance(dropped.matches.exception(), TooManyChecksError)

    run_in_loop(full)


def test_a_queue_full_of_different_addresses_rejects_a_new_one() -> None:
    def full(queue: CheckQueue) -> None:
        for number in range(limits.PASSWORD_CHECKS):
            queue.add(f"{number}", check("x"), is_connected)
        with pytest.raises(TooManyChecksError):
            queue.add("new", check("right"), is_connected)

    run_in_loop(full)


def test_checks_run_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    nice: list[int] = []

    def record_nice(*_: bytes) -> bool:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True

    monkeypatch.setattr(bcrypt, "checkpw", record_nice)
    assert asyncio.run(Passwords().verify({"alice": b"hash"}, "alice", b"right"))
    assert nice == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)]
