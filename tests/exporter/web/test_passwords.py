"""The order in which passwords are checked: the addresses take turns, and none waits for who has left."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import bcrypt
import pytest

from rankscope_exporter.web import limits
from rankscope_exporter.web.passwords import NICE, Check, Passwords, Queue, TooManyChecksError


def check(password: str, user: str = "alice") -> Check:
    return Check(user, password.encode(), b"", password.encode(), is_known=True)


def here() -> bool:
    return False


def gone() -> bool:
    return True


def order(queue: Queue) -> list[str]:
    checks = []
    while one := queue.next():
        checks.append(one.password.decode())
    return checks


def in_a_loop(test: Callable[[Queue], None]) -> None:
    async def run() -> None:
        test(Queue())

    asyncio.run(run())


def test_addresses_take_turns() -> None:
    def turns(queue: Queue) -> None:
        for number in range(4):
            queue.add("attacker", check(f"guess {number}"), here)
        queue.add("prometheus", check("right"), here)
        assert order(queue) == ["guess 0", "right", "guess 1", "guess 2", "guess 3"]

    in_a_loop(turns)


def test_the_same_password_of_a_user_waits_once() -> None:
    def same(queue: Queue) -> None:
        first = queue.add("x", check("a"), gone)
        assert queue.add("x", check("a", "bob"), here) is not first
        assert len(queue) == 1  # nobody waits for the first any more
        again = queue.add("x", check("a"), here)
        assert queue.add("x", check("a"), gone) is again
        assert len(queue) == 2
        assert order(queue) == ["a", "a"]  # bob's and alice's, whom one of two still asks about

    in_a_loop(same)


def test_who_has_left_makes_room_and_hears_no() -> None:
    def left(queue: Queue) -> None:
        checks = [queue.add("x", check(f"{number}"), gone) for number in range(3 * limits.CHECKS_OF_ONE_ADDRESS)]
        assert order(queue) == []
        assert not any(one.matches.result() for one in checks)

    in_a_loop(left)


def test_one_address_has_a_part_of_the_queue() -> None:
    def part(queue: Queue) -> None:
        for number in range(limits.CHECKS_OF_ONE_ADDRESS):
            queue.add("x", check(f"{number}"), here)
        with pytest.raises(TooManyChecksError):
            queue.add("x", check("more"), here)
        queue.add("y", check("other"), here)

    in_a_loop(part)


def test_a_full_queue_takes_a_new_address_at_the_cost_of_the_longest_line() -> None:
    def full(queue: Queue) -> None:
        waiting = [
            queue.add(f"{number % 4}", check(f"{number}"), here) for number in range(4 * limits.CHECKS_OF_ONE_ADDRESS)
        ]
        assert len(queue) == limits.CHECKS
        queue.add("new", check("right"), here)
        assert len(queue) == limits.CHECKS
        (dropped,) = (one for one in waiting if one.matches.done())
        assert isinstance(dropped.matches.exception(), TooManyChecksError)

    in_a_loop(full)


def test_a_queue_that_is_full_of_as_many_addresses_takes_no_more() -> None:
    def full(queue: Queue) -> None:
        for number in range(limits.CHECKS):
            queue.add(f"{number}", check("x"), here)
        with pytest.raises(TooManyChecksError):
            queue.add("new", check("right"), here)

    in_a_loop(full)


def test_a_check_gives_way_to_whatever_else_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    nice: list[int] = []

    def checked(*_: bytes) -> bool:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True

    monkeypatch.setattr(bcrypt, "checkpw", checked)
    assert asyncio.run(Passwords().admits({"alice": b"hash"}, "alice", b"right"))
    assert nice == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)]
