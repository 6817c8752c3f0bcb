"""The gate by itself: what a check of a password leaves behind, and what an Authorization header may be."""

from __future__ import annotations

import asyncio
import base64

import bcrypt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.web import passwords
from rankscope_exporter.web.gate import credentials
from rankscope_exporter.web.passwords import Passwords


def users(**passwords: bytes) -> dict[str, bytes]:
    return {name: bcrypt.hashpw(password, bcrypt.gensalt(4)) for name, password in passwords.items()}


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The passwords that bcrypt was asked about."""
    asked: list[bytes] = []
    check = bcrypt.checkpw

    def counting(password: bytes, hashed: bytes) -> bool:
        asked.append(password)
        return check(password, hashed)

    monkeypatch.setattr(passwords.bcrypt, "checkpw", counting)
    return asked


def test_requests_that_come_together_cost_one_check(checks: list[bytes]) -> None:
    async def together() -> list[bool]:
        passwords, known = Passwords(), users(alice=b"right")
        return await asyncio.gather(*(passwords.admits(known, "alice", b"right") for _ in range(20)))

    assert all(asyncio.run(together()))
    assert checks == [b"right"]


def test_an_unknown_user_costs_a_check_and_is_refused_with_a_known_users_password(checks: list[bytes]) -> None:
    assert not asyncio.run(Passwords().admits(users(alice=b"right"), "mallory", b"right"))
    assert checks == [b"right"]


def test_a_wrong_password_is_checked_each_time_and_forgets_nothing(checks: list[bytes]) -> None:
    async def in_turn() -> list[bool]:
        passwords, known = Passwords(), users(alice=b"right")
        return [await passwords.admits(known, "alice", given) for given in (b"right", b"wrong", b"wrong", b"right")]

    assert asyncio.run(in_turn()) == [True, False, False, True]
    assert checks == [b"right", b"wrong", b"wrong"]


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
