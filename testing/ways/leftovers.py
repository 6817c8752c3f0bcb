"""Find Rankscope's code in other modules, classes and lists of hooks, without a list of the patches."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, MethodType
from typing import Any

from rankscope.probes.frameworks import FRAMEWORKS

FRAMEWORK_PACKAGES = {package.partition(".")[0] for framework in FRAMEWORKS for package in framework.packages}
WATCHED = {"torch", "gc", "pickle", "safetensors", *FRAMEWORK_PACKAGES}
FUNCTIONS = {FunctionType, MethodType, staticmethod, classmethod}
Location = tuple[str, str]


def attributes() -> dict[str, dict[str, Any]]:
    """Return the attributes of every watched module and class, and the hooks in every module's lists."""
    found = {"gc.callbacks": {str(index): callback for index, callback in enumerate(gc.callbacks)}}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in WATCHED:
            own = dict(vars(module))
            found.setdefault(name, {}).update(own)
            # Checks the type only: isinstance() calls the object, and some of torch's then import CUDA or warn.
            for key, value in own.items():
                if issubclass(type(value), type) and value.__module__ == name:
                    found.setdefault(f"{name}.{key}", {}).update(vars(value))
                elif "hook" in key and issubclass(type(value), dict):
                    found.setdefault(f"{name}.{key}", {}).update({repr(one): held for one, held in value.items()})
    return found


def patches(attributes: dict[str, dict[str, Any]]) -> dict[Location, Any]:
    """Return those with code of Rankscope."""
    return {
        (place, name): value
        for place, held in attributes.items()
        for name, value in held.items()
        if type(value) in FUNCTIONS and _is_ours(value)
    }


def _is_ours(value: Any) -> bool:
    function = value if type(value) is FunctionType else value.__func__
    return type(function) is FunctionType and "/rankscope/" in function.__code__.co_filename
