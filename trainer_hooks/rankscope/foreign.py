"""Reading the job's objects without running the job's code.

A probe gets objects of any type: a proxy that loads its content when asked, a generator, a mock. Of an unknown type
it reads only what the object stores, and it identifies types with `type`, because `isinstance` asks the object for its
`__class__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import getattr_static
from types import MemberDescriptorType
from typing import Any

# Packages whose objects may be asked: reading their attributes has no effects.
KNOWN = frozenset(
    {"builtins", "cupy", "dgl", "jaxlib", "numpy", "tensordict", "torch", "torch_geometric", "torchvision"}
)


def is_known(kind: type) -> bool:
    """Return whether a class is Python's own or of a known package. A subclass of the job's is not."""
    module = type.__getattribute__(kind, "__module__")
    return type(module) is str and module.partition(".")[0] in KNOWN


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of an object: of an unknown type only one that the object or its class stores.

    A property of an unknown type is returned as it is, so check the type of what this returns.
    """
    if is_known(type(thing)):
        return getattr(thing, name, default)
    found = getattr_static(thing, name, default)
    if type(found) is MemberDescriptorType:  # of a class with `__slots__`
        try:
            return found.__get__(thing)
        except AttributeError:
            return default
    return found


def items(value: Any) -> Iterator[Any] | None:
    """Return the items of a list or a tuple, by the methods of these types; None for any other object."""
    for kind in (list, tuple):
        if issubclass(type(value), kind):
            stored: Iterable[Any] = kind.__iter__(value)
            return iter(stored)
    return None
