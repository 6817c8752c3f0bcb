"""Each error in a file that a flag names is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankscope_exporter.diagnosis.thresholds import Thresholds, change_thresholds
from rankscope_exporter.documents import DocumentError, read_document

LOADERS = {"JSON": json.loads, "YAML": yaml.safe_load}
INVALID = [
    ("JSON", "[" * 100_000, "nested too deeply"),
    ("JSON", '{"stuck":\n secret}', "not JSON at line 2"),
    ("JSON", "9" * 5000, "not JSON"),
    ("JSON", '{"stuck": 1' + "0" * 400 + "}", "int too large to convert to float"),
    ("JSON", "[]", "not a JSON object of numbers by name"),
    ("YAML", "[" * 100_000, "nested too deeply"),
    ("YAML", "stuck:\n  - [secret", "not YAML at line 2"),
    ("YAML", "stuck: !!bool secret", "not YAML"),
    ("YAML", "stuck: !!timestamp secret", "not YAML"),
    ("YAML", "stuck: 2024-99-99", "not YAML"),
    ("YAML", "nested: " + "[" * 60 + "]" * 60, "unknown threshold 'nested'"),
]


def read(path: Path, form: str) -> Thresholds:
    def parse(values: Any) -> Thresholds:
        return change_thresholds(Thresholds(), values)

    return read_document(path, form, LOADERS[form], parse)


@pytest.mark.parametrize(("form", "text", "problem"), INVALID)
def test_an_error_is_one_line_that_names_the_file(form: str, text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read(path, form)
    assert str(caught.value) == f"{path}: {problem}"


def test_a_missing_file_and_another_encoding_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="No such file or directory"):
        read(tmp_path / "missing", "JSON")
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(DocumentError, match="not UTF-8"):
        read(tmp_path / "file", "YAML")


@pytest.mark.parametrize("form", LOADERS)
def test_a_valid_file_is_parsed(form: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"stuck": 20}')
    assert read(tmp_path / "file", form).stuck == 20.0
