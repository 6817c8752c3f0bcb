"""Flags declared as fields of a dataclass of settings, next to the code that uses them."""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from typing import Any


def flag(name: str, **options: Any) -> Any:
    """Return a dataclass field that the flag sets. `options` go to argparse's `add_argument`."""
    return field(default=options.get("default"), metadata={"flag": name, "options": options})


def add_flags(parser: argparse._ActionsContainer, settings: type) -> None:
    """Add the flags of a dataclass to the parser, in the order of its fields."""
    for one in fields(settings):
        parser.add_argument(one.metadata["flag"], dest=one.name, **one.metadata["options"])


def flag_name(settings: type, setting: str) -> str:
    """Return the name of the flag that sets the field `setting`."""
    (name,) = (one.metadata["flag"] for one in fields(settings) if one.name == setting)
    return str(name)
