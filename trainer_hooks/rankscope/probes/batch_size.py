"""Counting the samples and tokens of a batch by its structure.

If the structure is ambiguous, the size is unknown: tensors of several leading dimensions, lists of tensors (inputs and
targets, or one tensor per sample), texts, and objects of the script.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

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

    The script's object may raise anything, also when it is only asked for its type.
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
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return float(ids.numel()) if isinstance(ids, Tensor) and ids.dim() else 0.0
    if levels and isinstance(batch, (list, tuple)):
        return next(filter(None, (tokens_of(item, levels - 1) for item in islice(batch, MOST_ITEMS))), 0.0)
    return 0.0


def samples_of(batch: Any) -> float | None:
    """Return the number of samples of a batch; None if its structure is ambiguous."""
    try:
        sizes = set(_sizes(batch, MOST_LEVELS))
    except UnknownSizeError:
        return None
    return float(sizes.pop()) if len(sizes) == 1 else None


def _sizes(batch: Any, levels: int) -> Iterator[float]:
    """Yield the number of samples of each part of a batch; nothing for parts such as a number or a text."""
    if isinstance(batch, PackedSequence):
        yield float(batch.batch_sizes[0])
    elif isinstance(batch, Tensor):
        if batch.dim():
            yield float(batch.size(0))  # a nested tensor has this one, and no shape
    elif (size := _own_size(batch)) is not None:
        yield size
    elif isinstance(batch, Mapping):
        yield from _each(batch.values(), levels)
    elif isinstance(batch, (list, tuple)):
        if isinstance(batch, list) and is_list_of_samples(batch):
            raise UnknownSizeError
        yield from _each(batch, levels)


def _each(items: Iterable[Any], levels: int) -> Iterator[float]:
    found = list(islice(items, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS or not levels:
        raise UnknownSizeError
    for item in found:
        yield from _sizes(item, levels - 1)


def _own_size(batch: Any) -> float | None:
    """Return the number of samples from the attributes of an object or of another library's array."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple) and shape:
        return as_number(shape[0])
    for name in SIZES:
        size = getattr(batch, name, None)
        if isinstance(size, tuple) and size:
            return as_number(size[0])
        if isinstance(size, int):
            return as_number(size)
    return None


def is_list_of_samples(batch: list[Any]) -> bool:
    """Return whether a list may hold one item per sample: containers, or tensors with equally many dimensions."""
    if all(isinstance(item, (Mapping, list, tuple)) for item in batch):
        return True
    dimensions = [item.dim() for item in batch if isinstance(item, Tensor)]
    return len(dimensions) > 1 and len(set(dimensions)) == 1
