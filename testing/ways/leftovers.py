"""Find Rankscope's code in other modules, classes and lists of hooks, without a list of the patches."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from rankscope.probes.frameworks import FRAMEWORKS

FRAMEWORK_PACKAGES = {package.partition(".")[0] for framework in FRAMEWORKS for package in framework.packages}
WATCHED = {"torch", "gc", "pickle", "safetensors", *FRAMEWORK_PACKAGES}
Location = tuple[str, str]


def patches() -> dict[Location, Any]:
    """Return each attribute of a watched module or class, and each hook in a module's list, with code of Rankscope."""
    return {location: value for location, value in _attributes() if _is_ours(value)}


def attributes() -> dict[Location, Any]:
    """Return every attribute, to compare patched ones before and after."""
    return dict(_attributes())


def _attributes() -> Iterator[tuple[Location, Any]]:
    for index, callback in enumerate(gc.callbacks):
        yield ("gc.callbacks", str(index)), callback
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in WATCHED:
            yield from _of_module(name, module)


def _of_module(name: str, module: ModuleType) -> Iterator[tuple[Location, Any]]:
    # Checks the type only: isinstance() calls the object, and some of torch's then import CUDA or warn.
    for key, value in list(vars(module).items()):
        yield (name, key), value
        if issubclass(type(value), type) and value.__module__ == name:
            yield from (((f"{name}.{key}", attribute), held) for attribute, held in list(vars(value).items()))
        elif "hook" in key and issubclass(type(value), dict):
            yield from (((f"{name}.{key}", repr(entry)), held) for entry, held in list(value.items()))


def _is_ours(value: Any) -> bool:
    function = value.__func__ if type(value) in (MethodType, staticmethod, classmethod) else value
    return type(function) is FunctionType and "/rankscope/" in function.__code__.co_filename
