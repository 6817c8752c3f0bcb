"""Password checks and their memory, and the parsing of Authorization headers."""

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


def test_simultaneous_requests_need_one_check(checked: list[bytes]) -> None:
    async def simultaneous() -> list[bool]:
        passwords, known = Passwords(), users(alice=b"right")
        return await asyncio.gather(*(passwords.verify(known, "alice", b"right") for _ in range(20)))

    assert all(asyncio.run(simultaneous()))
    assert checked == [b"right"]


def test_an_unknown_user_is_rejected_after_a_check(checked: list[bytes]) -> None:
    assert not asyncio.run(Passwords().verify(users(alice=b"right"), "mallory", b"right"))
    assert checked == [b"right"]


def test_a_wrong_password_is_checked_each_time_and_the_right_one_stays_remembered(checked: list[bytes]) -> None:
    async def in_sequence() -> list[bool]:
        passwords, known = Passwords(), users(alice=b"right")
        return [await passwords.verify(known, "alice", given) for given in (b"right", b"wrong", b"wrong", b"right")]

    assert asyncio.run(in_sequence()) == [True, False, False, True]
    assert checked == [b"right", b"wrong", b"wrong"]


def test_only_the_first_72_bytes_of_a_password_count() -> None:
    known = users(alice=b"a" * 72)
    assert asyncio.run(Passwords().verify(known, "alice", b"a" * 100))
    assert not asyncio.run(Passwords().verify(known, "alice", b"a" * 71))


@given(name=st.text().filter(lambda name: ":" not in name), password=st.binary())
def test_credentials_are_decoded(name: str, password: bytes) -> None:
    header = b"Basic " + base64.b64encode(name.encode() + b":" + password)
    assert credentials(header) == (name, password)


@given(header=st.binary())
def test_no_header_causes_an_exception(header: bytes) -> None:
    credentials(header)
    credentials(b"Basic " + header)
