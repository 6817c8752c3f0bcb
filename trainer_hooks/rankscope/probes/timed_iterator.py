"""A wrapper of the script's iterator that watches its fetches and has all its methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from typing import Any

MOST_TYPES = 32  # types of iterators whose watched types are cached
FETCHES = frozenset({"send", "throw"})  # methods of a generator that return an item, in addition to `__next__`


class TimedIterator:
    """A wrapper with the attributes of an iterator. `fetch` is called with the method that returns the next item."""

    __slots__ = ("__weakref__", "_fetch", "_iterator", "has_loader")
    has_loader: bool

    def __init__(self, iterator: Iterator[Any], fetch: Callable[[TimedIterator, Callable[[], Any]], Any]) -> None:
        set_own = partial(object.__setattr__, self)
        set_own("_iterator", iterator)
        set_own("_fetch", fetch)
        set_own("has_loader", False)  # whether the last item came from a DataLoader, which is watched too

    def __iter__(self) -> TimedIterator:
        again = iter(self._iterator)  # starts an epoch, in some iterators
        return self if again is self._iterator else timed_iterator(again, self._fetch)

    # The defaults are names that these methods need while the interpreter ends and clears modules.
    def __next__(self, bind: type[partial[Any]] = partial) -> Any:
        return self._fetch(self, bind(next, self._iterator))

    def __getattr__(self, name: str, fetches: frozenset[str] = FETCHES, bind: type[partial[Any]] = partial) -> Any:
        value = getattr(self._iterator, name)
        return bind(self._fetch_by, value) if name in fetches else value

    def __setattr__(self, name: str, value: Any, own: Collection[str] = __slots__) -> None:
        owner = self if name in own else self._iterator
        object.__setattr__(owner, name, value) if owner is self else setattr(owner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._iterator, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the iterator itself: the process that gets it may not have Rankscope."""
        return iter, (self._iterator,)

    def _fetch_by(self, method: Callable[..., Any], *args: Any, bind: type[partial[Any]] = partial) -> Any:
        return self._fetch(self, bind(method, *args))


def timed_iterator(iterator: Iterator[Any], fetch: Callable[..., Any]) -> TimedIterator:
    """Return a wrapper of `iterator` with the special methods of its type."""
    return _watched_type(type(iterator))(iterator, fetch)


@lru_cache(MOST_TYPES)
def _watched_type(kind: type) -> type[TimedIterator]:
    # Not `dir` and `getattr`, which ask the class of the class.
    stored = {name: value for base in reversed(type.mro(kind)) for name, value in vars(base).items()}
    names = {
        name for name, value in stored.items() if name.startswith("__") and name.endswith("__") and _is_method(value)
    }
    own = {*dir(TimedIterator), "__del__", "__getstate__", "__setstate__"}
    forwarded = {name: _forward(name) for name in names - own}
    return type(type.__getattribute__(kind, "__name__"), (TimedIterator,), {"__slots__": (), **forwarded})


def _is_method(value: object) -> bool:
    return callable(value) or type(value) in (classmethod, staticmethod)


def _forward(name: str) -> Callable[..., Any]:
    """Return a special method that calls the iterator's: Python looks these up in the type."""

    def forward(self: TimedIterator, *args: Any, **kwargs: Any) -> Any:
        iterator = self._iterator
        result = getattr(type(iterator), name)(iterator, *args, **kwargs)
        return self if result is iterator else result  # as `__enter__` does

    return forward
