"""Texts that may be shown as links, and the removal of credentials."""

from __future__ import annotations

import pytest

from rankscope.record.text import LABEL_LIMIT, is_link, without_credentials

LINKS = [
    "https://wandb.ai/my-team/my%20project/runs/5sdy7lvo",
    "http://mlflow.internal:5000/#/experiments/0/runs/de78a7ec925b46e8a26397e5562040bc",
    "http://[::1]:5000/#/experiments/0/runs/1",
    "https://host",
]
NO_LINKS = [
    "",
    "javascript:alert(1)",
    "file:///etc/passwd",
    "ftp://host/x",
    "//host/x",
    "https://",
    "https:///x",
    "https://user:password@host/x",
    "https://host/x?token=1",
    "https://host/x#token",
    "https://host:port/x",
    "https://user:12/secret@host",
    'https://host/"onmouseover="alert(1)',
    "https://host/<script>",
    "https://host/a b",
    "https://host/${__user.login}",
    "https://host\\@evil/",
    "https://höst/",
    "https://host/\u202e",
    "https://host/x\n",
    "https://host/" + "x" * LABEL_LIMIT,
]


@pytest.mark.parametrize("text", LINKS)
def test_a_url_is_a_link(text: str) -> None:
    assert is_link(text)


@pytest.mark.parametrize("text", NO_LINKS)
def test_other_text_is_not_a_link(text: str) -> None:
    assert not is_link(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:password@host:80/a/b", "https://host:80/a/b"),
        ("https://token@host", "https://host"),
        ("https://a@b@host/x", "https://host/x"),
        ("https://host/a?api_key=secret#x", "https://host/a"),
        ("https://host?api_key=secret", "https://host"),
        ("https://host#access_token=secret", "https://host"),
        ("s3://key:secret@bucket/runs", "s3://bucket/runs"),
        ("runs/user@host?", "runs/user@host?"),
        ("/logs/a#b", "/logs/a#b"),
    ],
)
def test_user_password_and_query_are_removed(text: str, expected: str) -> None:
    assert without_credentials(text) == expected
