"""Counting the samples and tokens of a batch by its structure.

If the structure is ambiguous, the size is unknown: tensors of several leading dimensions, lists of tensors (inputs and
targets, or one tensor per sample), texts, and objects of the script.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from torch import Size, Tensor
from torch.nn.utils.rnn import PackedSequence

from rankscope.foreign import attribute, is_known, items, mapping_of
from rankscope.record.numbers import as_number
from rankscope.timeline.batches import Batch

MOST_ITEMS = 64  # looked at in a batch
MOST_LEVELS = 4  # of nested containers
TOKEN_LEVELS = 2  # likewise, in which `input_ids` are looked for
SIZES = ("batch_size", "num_graphs")  # attributes with the number of samples: of TensorDict and DGL; of PyG


class UnknownSizeError(Exception):
    """The structure of a batch is ambiguous."""


def size_of(batch: Any, samples: float | None = None) -> Batch:
    """Return the size of a batch of any type; `samples` if that number is known. Never raises.

    An object of an unknown type is not asked. A known one may still raise: its parts are the script's.
    """
    if samples is None:
        with suppress(Exception):
            samples = samples_of(batch)
    with suppress(Exception):
        return Batch(samples, tokens_of(batch))
    return Batch(samples)


def tokens_of(batch: Any, levels: int = TOKEN_LEVELS) -> float:
    """Return the number of elements of `input_ids` in the batch or in one of its items; 0 if there is none."""
    if type(batch) is list and batch and type(batch[0]) is Tensor:  # nearly always: the default collation of pairs
        return 0.0
    if (mapping := mapping_of(batch)) is not None:
        ids: Any = dict.get(mapping, "input_ids")
        return float(ids.numel()) if is_tensor(ids) and ids.dim() else 0.0
    if levels and (found := items(batch)) is not None:
        return next(filter(None, (tokens_of(item, levels - 1) for item in islice(found, MOST_ITEMS))), 0.0)
    return 0.0


def samples_of(batch: Any) -> float | None:
    """Return the number of samples of a batch; None if its structure is ambiguous."""
    try:
        sizes = set(_sizes(batch, MOST_LEVELS))
    except UnknownSizeError:
        return None
    return float(sizes.pop()) if len(sizes) == 1 else None


def is_tensor(value: Any) -> bool:
    """Return whether this is a tensor of a known type. A subclass of the script sees what is asked of it."""
    return issubclass(type(value), Tensor) and is_known(type(value))


def _sizes(batch: Any, levels: int) -> Iterator[float]:
    """Yield the number of samples of each part of a batch; nothing for parts such as a number or a text."""
    if type(batch) is PackedSequence:
        yield float(batch.batch_sizes[0])
    elif issubclass(type(batch), Tensor):
        if not is_tensor(batch):
            raise UnknownSizeError
        if batch.dim():
            yield float(batch.size(0))  # a nested tensor has this one, and no shape
    elif (size := _own_size(batch)) is not None:
        yield size
    elif (found := items(batch)) is not None:
        if issubclass(type(batch), list) and is_list_of_samples(batch):
            raise UnknownSizeError
        yield from _each(found, levels)


def _each(found: Iterator[Any], levels: int) -> Iterator[float]:
    parts = list(islice(found, MOST_ITEMS + 1))
    if len(parts) > MOST_ITEMS or not levels:
        raise UnknownSizeError
    for part in parts:
        yield from _sizes(part, levels - 1)


def _own_size(batch: Any) -> float | None:
    """Return the number of samples from the attributes of an object or of another library's array."""
    for name in ("shape", *SIZES):
        size = attribute(batch, name)
        if type(size) in (tuple, Size) and size:
            size = size[0]
        elif name == "shape":
            continue
        if type(size) is int:
            return as_number(size)
    return None


def is_list_of_samples(batch: list[Any]) -> bool:
    """Return whether a list may hold one item per sample: containers, or tensors with equally many dimensions."""
    parts = list(list.__iter__(batch))
    if all(items(part) is not None for part in parts):
        return True
    dimensions = [part.dim() for part in parts if is_tensor(part)]
    return len(dimensions) > 1 and len(set(dimensions)) == 1
