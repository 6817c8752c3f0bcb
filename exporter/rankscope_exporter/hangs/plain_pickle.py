"""Read a pickle of numbers, strings, lists and dictionaries, in time and memory in proportion to its length.

`pickle.Unpickler` can run code. Without it, a file of a few bytes can still make it work for hours or allocate
gigabytes: with a dictionary's key of nested tuples, or a large index of an object.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pickletools import genops
from typing import Any

OPERATIONS_LIMIT = 4_000_000
"""Each takes at most 100 bytes of memory. torch writes about 75 for a collective."""
KEY_LIMIT = 2**31
"""Larger numbers, as keys of a dictionary, could all have the same hash value."""
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "BINFLOAT",
    "LONG1",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    *CONSTANTS,
}
TAKEN = {"APPEND": 1, "SETITEM": 2, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPENDS": 0, "SETITEMS": 0, "TUPLE": 0}
"""The objects that an operation takes from the stack; 0 for all since the last mark."""


def loads(data: bytes) -> Any:
    """Return the value. An object may be in it many times, and in itself. Raise ValueError."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        for operation, argument, _ in islice(genops(data), OPERATIONS_LIMIT):
            name = operation.name
            if name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])  # type: ignore[index]
            elif name in VALUES:
                stack.append(CONSTANTS[name]() if name in CONSTANTS else argument)
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name == "STOP":
                return stack[-1]
            elif name in TAKEN:
                _build(name, stack, len(stack) - TAKEN[name] if TAKEN[name] else marks.pop())
            elif name not in ("PROTO", "FRAME"):
                raise ValueError("it has more than numbers, strings, lists and dictionaries")
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("it is no complete pickle") from error
    raise ValueError(f"it has more than {OPERATIONS_LIMIT} values")


def _build(name: str, stack: list[Any], begin: int) -> None:
    """Move objects from the stack into a list, a dictionary or a tuple."""
    items = stack[begin:]
    del stack[begin:]
    if name.startswith("TUPLE"):
        stack.append(tuple(items))
    elif name.startswith("APPEND"):
        list.extend(stack[-1], items)
    else:
        keys = items[::2]
        if not all(isinstance(key, str) or (isinstance(key, int) and abs(key) < KEY_LIMIT) for key in keys):
            raise ValueError("a dictionary has a key that is no string")
        dict.update(stack[-1], zip(keys, items[1::2], strict=True))
