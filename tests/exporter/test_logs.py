"""A log record is one line even if it contains hostile names and texts."""

from __future__ import annotations

import json
import logging
import os

import pytest

from rankscope_exporter.logs import StructuredFormatter, logfmt

HOSTILE = os.fsdecode(b'/run/a\nlevel=error msg="\x1b[2J\x9b\xe2\x80\xae\xff".rank')


@pytest.mark.parametrize("log_format", ["logfmt", "json"])
def test_a_hostile_name_is_escaped(log_format: str) -> None:
    record = logging.LogRecord("rankscope", logging.WARNING, "", 0, "skipped %s", (HOSTILE,), None)
    line = StructuredFormatter(log_format).format(record)
    assert line.isprintable()
    line.encode()  # a file name may not be UTF-8, a log line must be
    assert "\\n" in line


def test_a_value_is_quoted_as_in_json() -> None:
    assert logfmt({"msg": 'a "b" \\c\n≤'}) == r'msg="a \"b\" \\c\n≤"'
    assert json.loads(logfmt({"msg": HOSTILE}).removeprefix("msg=")) == HOSTILE
