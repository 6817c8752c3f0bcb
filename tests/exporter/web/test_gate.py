"""The gate by itself: what a check of a password leaves behind, and what an Authorization header may be."""

from __future__ import annotations

import asyncio
import base64

import bcrypt
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.web.gate import credentials
from rankscope_exporter.web.passwords import Passwords


def users(**passwords: bytes) -> dict[str, bytes]:
    return {name: bcrypt.hashpw(password, bcrypt.gensalt(4)) for name, password in passwords.items()}


def test_requests_that_come_together_cost_one_check(checked: list[bytes]) -> None:
    async def together() -> list[bool]:
        passwords, known = Passwords(), users(alice=b"right")
        return await asyncio.gather(*(passwords.admits(known, "alice", b"right") for _ in range(20)))

    assert all(asyncio.run(together()))
    assert checked == [b"right"]


def test_an_unknown_user_costs_a_check_and_is_refused_with_a_known_users_password(checked: list[bytes]) -> None:
    assert not asyncio.run(Passwords().admits(users(alice=b"right"), "mallory", b"right"))
    assert checked == [b"right"]


def test_a_wrong_password_is_checked_each_time_and_forgets_nothing(checked: list[bytes]) -> None:
    async def in_turn() -> list[bool]:
        passwords, known = Passwords(), users(alice=b"right")
        return [await passwords.admits(known, "alice", given) for given in (b"right", b"wrong", b"wrong", b"right")]

    assert asyncio.run(in_turn()) == [True, False, False, True]
    assert checked == [b"right", b"wrong", b"wrong"]


def test_a_password_longer_than_bcrypt_takes_is_compared_as_far_as_that() -> None:
    known = users(alice=b"a" * 72)
    assert asyncio.run(Passwords().admits(known, "alice", b"a" * 100))
    assert not asyncio.run(Passwords().admits(known, "alice", b"a" * 71))


@given(name=st.text().filter(lambda name: ":" not in name), password=st.binary())
def test_credentials_are_what_was_encoded(name: str, password: bytes) -> None:
    header = b"Basic " + base64.b64encode(name.encode() + b":" + password)
    assert credentials(header) == (name, password)


@given(header=st.binary())
def test_no_header_raises(header: bytes) -> None:
    credentials(header)
    credentials(b"Basic " + header)
