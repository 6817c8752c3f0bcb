"""A log line is one line, whatever names and texts of other people are in it."""

from __future__ import annotations

import json
import logging
import os

import pytest

from rankscope_exporter.logs import StructuredFormatter, logfmt

HOSTILE = os.fsdecode(b'/run/a\nlevel=error msg="\x1b[2J\x9b\xe2\x80\xae\xff".rank')


@pytest.mark.parametrize("notation", ["logfmt", "json"])
def test_a_hostile_name_is_escaped(notation: str) -> None:
    record = logging.LogRecord("rankscope", logging.WARNING, "", 0, "skipped %s", (HOSTILE,), None)
    line = StructuredFormatter(notation).format(record)
    assert line.isprintable()
    line.encode()  # a file's name may be no UTF-8, a log line is
    assert "\\n" in line


def test_a_value_is_quoted_as_json_quotes_it() -> None:
    assert logfmt({"msg": 'a "b" \\c\n≤'}) == r'msg="a \"b\" \\c\n≤"'
    assert json.loads(logfmt({"msg": HOSTILE}).removeprefix("msg=")) == HOSTILE
