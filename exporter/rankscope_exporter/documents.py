"""JSON and YAML files: every error in one is a single line that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")


class DocumentError(ValueError):
    """A file that cannot be read or parsed. The message of a syntax error has no text of the file: it may be secret."""


def read_document(path: Path, form: str, load: Callable[[str], Any], parse: Callable[[Any], Parsed]) -> Parsed:
    """Return what `parse` makes of the document. `load` reads the `form`, JSON or YAML. Raise DocumentError."""
    try:
        return parse(_load(path, form, load))
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not UTF-8") from error
    except RecursionError as error:
        raise DocumentError(f"{path}: nested too deeply") from error
    except (ValueError, OverflowError) as error:
        raise DocumentError(f"{path}: {error}") from error


def _load(path: Path, form: str, load: Callable[[str], Any]) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return load(text)
    except (DocumentError, RecursionError):
        raise
    except Exception as error:  # PyYAML raises also KeyError, AttributeError and others
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        raise DocumentError(f"not {form}{f' at line {line}' if line else ''}") from error
