"""Patches of one attribute are undone exactly, in any order."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from rankscope.patch import Undo, replace


class Base:
    def method(self) -> list[str]:
        return ["original"]


def patched(owner: Any, names: str) -> list[Undo]:
    """Patch the method once for each name, and return what undoes each."""
    return [replace(owner, "method", lambda original, by=by: lambda self: [by, *original(self)]) for by in names]


@pytest.mark.parametrize("order", [*permutations(range(3))])
@pytest.mark.parametrize("is_inherited", [False, True])
def test_patches_are_undone_in_any_order(order: tuple[int, ...], is_inherited: bool) -> None:
    owner: Any = type("Derived", (Base,), {} if is_inherited else {"method": Base.method})
    before = dict(vars(owner))
    undo = patched(owner, "abc")
    assert owner().method() == ["c", "b", "a", "original"]
    for number in order:
        undo[number]()
    assert dict(vars(owner)) == before


def test_a_patch_of_other_code_stays() -> None:
    owner: Any = type("Derived", (Base,), {"method": Base.method})
    (undo,) = patched(owner, "a")
    owner.method = other = Base.__init__
    undo()
    assert owner.method is other
