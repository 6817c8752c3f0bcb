"""`rankscope.timed` of an iterator supports everything that the iterator does."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from testing.own_record import seconds, value
from torch.utils.data import DataLoader, IterableDataset

import rankscope
from rankscope.probes.timed_iterator import TimedIterator
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline


def pickle_again(iterator: Any) -> Any:
    return pickle.loads(pickle.dumps(iterator))


def batches() -> Iterator[Any]:
    """Yield a batch, then the value that is sent, then a constant after an exception."""
    given = yield (torch.randn(4, 8),)
    with contextlib.suppress(KeyError):
        yield given
    yield "thrown"


def test_a_watched_generator_can_be_closed_sent_to_and_thrown_into(timeline: Timeline) -> None:
    rankscope.step()
    generator: Any = rankscope.timed(batches())
    with contextlib.closing(generator) as iterator:
        next(iterator)
        assert iterator.send("sent") == "sent"
        assert iterator.throw(KeyError("key")) == "thrown"
        assert iterator.gi_frame is not None
    assert list(iterator) == []
    assert seconds(timeline, layout.DATA_WAIT) > 0


class Reader:
    """An iterator of the script, with many special methods."""

    def __init__(self) -> None:
        self.position, self.is_open = 0, False

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        self.position += 1
        return (torch.ones(3, 8) * self.position,)

    def __len__(self) -> int:
        return 5

    def __enter__(self) -> Reader:
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}


def test_a_watched_iterator_has_the_attributes_of_the_original(timeline: Timeline) -> None:
    reader = Reader()
    watched: Any = rankscope.timed(reader)
    assert len(watched) == 5
    with watched as opened:
        assert opened is watched
        assert reader.is_open
        weight = torch.nn.Parameter(torch.ones(8))
        (weight * next(opened)[0]).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
    assert not reader.is_open
    assert watched.state_dict() == {"position": 1}
    watched.position = 7
    assert reader.position == 7
    assert value(timeline, "samples") == 3


def test_a_watched_iterator_has_no_other_attributes(timeline: Timeline) -> None:
    watched: Any = rankscope.timed(batches())
    assert not any(hasattr(watched, name) for name in ("__len__", "__enter__", "state_dict"))
    assert value(timeline, "steps") == 0
    with pytest.raises(AttributeError, match="state_dict"):
        watched.state_dict()


class Unmeasurable(Reader):
    """An iterator without a length or a truth value, like that of a DataLoader over a stream."""

    def __len__(self) -> int:
        raise TypeError("no length")


class Empty(Reader):
    """An iterator that is false, although it returns items."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Unmeasurable, Empty])
def test_an_iterator_is_watched_whatever_its_length_is(timeline: Timeline, kind: type[Reader]) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    for (batch,) in itertools.islice(rankscope.timed(kind()), 4):
        (weight * batch).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
    assert value(timeline, "samples") == 4 * 3


def test_a_stream_loader_in_timed_is_iterated_as_without_the_hook(timeline: Timeline) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.ones(20, 8))

    assert [len(batch) for batch in rankscope.timed(DataLoader(Stream(), batch_size=8))] == [8, 8, 4]
    assert value(timeline, "steps") == 0


def test_the_start_of_an_epoch_is_data_wait(timeline: Timeline) -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            time.sleep(0.05)
            return iter([1, 2])

    rankscope.step()
    assert list(rankscope.timed(Loader())) == [1, 2]
    assert seconds(timeline, layout.DATA_WAIT) >= 0.05


def test_an_object_that_cannot_be_iterated_raises_as_without_the_hook(timeline: Timeline) -> None:
    rankscope.step()
    with pytest.raises(TypeError, match="not iterable"):
        rankscope.timed(7)  # type: ignore[arg-type]
    assert timeline.open_phases == (layout.OTHER, None)


class Restarting(Reader):
    """An iterator whose `__iter__` starts another epoch."""

    def __iter__(self) -> Restarting:
        self.position = 0
        return self

    def __next__(self) -> Any:
        if self.position == 3:
            raise StopIteration
        return super().__next__()


class Renewed(Restarting):
    """An iterator whose `__iter__` returns another one."""

    def __iter__(self) -> Restarting:
        return Restarting()


@pytest.mark.parametrize("kind", [Restarting, Renewed])
def test_each_loop_over_a_watched_iterator_starts_as_without_the_hook(
    timeline: Timeline, kind: type[Restarting]
) -> None:
    watched = rankscope.timed(kind())
    weight = torch.nn.Parameter(torch.ones(8))
    for _epoch in range(2):
        for (batch,) in watched:
            (weight * batch).sum().backward()
            torch.optim.SGD([weight], lr=0.1).step()
    assert (value(timeline, "steps"), value(timeline, "samples")) == (6, 18)


@pytest.mark.parametrize("copied", [pickle_again, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a_watched_iterator_is_pickled_and_copied_as_the_original(
    timeline: Timeline, copied: Callable[[Any], Any]
) -> None:
    watched: Any = rankscope.timed(iter([1, 2, 3]))
    assert next(watched) == 1
    again = copied(watched)
    assert list(again) == [2, 3]
    assert not isinstance(again, TimedIterator)
    assert value(timeline, "steps") == 0


def test_a_generator_cannot_be_pickled_as_without_the_hook(timeline: Timeline) -> None:
    with pytest.raises(TypeError, match="generator"):
        pickle.dumps(rankscope.timed(batches()))
    assert value(timeline, "steps") == 0
