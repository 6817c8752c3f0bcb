"""Reading the job's objects without running the job's code.

A probe gets objects of any type: a proxy that loads its content when asked, a generator, a mock. Of an unknown type
it reads only what the object stores, and it identifies types with `type`, because `isinstance` asks the object for its
`__class__`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
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


def own_attribute(thing: Any, name: str) -> Any:
    """Return an attribute from the object's own dictionary; None without one. Faster than `attribute`."""
    return object.__getattribute__(thing, "__dict__").get(name)


def items(value: Any) -> Iterator[Any] | None:
    """Return the items of a list or a tuple, or the values of a mapping, by Python's own methods; None for others.

    A mapping is a dict, or a UserDict by its data. Subclasses are read in the same way.
    """
    kind = type(value)
    if issubclass(kind, list):
        return list.__iter__(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    mapping = mapping_of(value)
    return None if mapping is None else iter(dict.values(mapping))


def mapping_of(value: Any) -> dict[Any, Any] | None:
    """Return a dict as it is, and the data of a UserDict; None for other objects."""
    if issubclass(type(value), UserDict):
        value = attribute(value, "data")
    return value if issubclass(type(value), dict) else None
