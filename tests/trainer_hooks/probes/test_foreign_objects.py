"""No probe asks an object of the job's own type for anything: what it would do then is not known."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from testing.own_record import seconds, snapshot, value
from tests.trainer_hooks.probes.batches import Training, loader
from torch.utils.data import DataLoader, IterableDataset

import rankscope
from rankscope import foreign
from rankscope.announcements import print_line, standard_error
from rankscope.probes import collectives, ddp, h2d_copy, optimizer
from rankscope.probes.batch_size import size_of
from rankscope.probes.data_wait import full_batch_size, is_repeated, length_of
from rankscope.probes.timed_iterator import timed_iterator
from rankscope.record import layout
from rankscope.settings import ddp_settings, loader_settings, name_of, parameter_types, parameters, sharding_of
from rankscope.timeline.framework_groups import describe_by_framework
from rankscope.timeline.timeline import Timeline

ASKED: list[str] = []


def asking(name: str) -> Callable[..., Any]:
    def ask(*_args: object) -> Any:
        ASKED.append(name)
        raise LookupError(f"user error: asked for {name}")

    return ask


NAMES = """bool len iter next contains getitem hash eq ne lt gt le ge int index float str repr fspath call enter exit
getattr getattribute dir length_hint reversed add sub mul instancecheck array torch_function"""
SPECIAL = [f"__{name}__" for name in NAMES.split()]

Proxy = type("Proxy", (), {name: asking(name) for name in SPECIAL})
"""A type of the job whose objects note each question, and raise."""


def proxy_of(kind: Any) -> Any:
    """Return an object of a subclass of a type of Python that behaves alike."""
    return kind.__new__(type(f"A{kind.__name__}", (kind,), {name: asking(name) for name in SPECIAL}))


class Lying:
    """An object that claims to be a tensor, like a lazy one, and notes when it is asked."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        ASKED.append("__class__")
        return torch.Tensor

    __getattr__ = asking("__getattr__")


class Seen(torch.Tensor):
    """A tensor of the job that sees each function of torch that is called with it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ASKED.append(str(function))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def seen(*shape: int) -> Any:
    return torch.zeros(shape).as_subclass(Seen)


def generator() -> Iterator[int]:
    ASKED.append("generator")
    yield 1


@pytest.fixture(autouse=True)
def nothing_is_asked() -> Iterator[None]:
    ASKED.clear()
    yield
    assert ASKED == []


FOREIGN: dict[str, Callable[[], Any]] = {
    "a proxy": Proxy,
    "a list": lambda: proxy_of(list),
    "a tuple": lambda: proxy_of(tuple),
    "a dict": lambda: proxy_of(dict),
    "a text": lambda: proxy_of(str),
    "a number": lambda: proxy_of(int),
    "a liar": Lying,
    "a tensor": lambda: seen(2, 3),
    "a generator": generator,
}

QUESTIONS: dict[str, Callable[[Any], object]] = {
    "size of a batch": size_of,
    "size of a nested batch": lambda thing: size_of([thing, {"input_ids": thing, "x": (thing,)}]),
    "length of an index": length_of,
    "the same index": lambda thing: is_repeated([thing, thing], [object(), thing]),
    "a sampler's batch size": lambda thing: full_batch_size(SimpleNamespace(_drop_last=True, _index_sampler=thing)),
    "a loader's settings": lambda thing: loader_settings(SimpleNamespace(_num_workers=1, _index_sampler=thing)),
    "an iterator's settings": loader_settings,
    "a timed iterator's type": lambda thing: timed_iterator(thing, lambda *_: None),
    "an optimizer's parameters": lambda thing: list(parameters(thing)),
    "parameters": lambda thing: list(parameters(SimpleNamespace(param_groups=thing))),
    "types of parameters": lambda thing: parameter_types(SimpleNamespace(param_groups=[{"params": [thing]}])),
    "a parameter's sharding": sharding_of,
    "a mesh": lambda thing: sharding_of(SimpleNamespace(device_mesh=thing)),
    "a module's settings": ddp_settings,
    "a hook's name": lambda thing: (name_of(thing), ddp_settings(SimpleNamespace(_comm_hooks=[(thing, thing)]))),
    "a payload": collectives.measure,
    "nested payloads": lambda thing: collectives.measure([[thing], thing]),
    "a work": collectives.is_completed,
    "a module's outputs": ddp.graph_nodes,
    "nested outputs": lambda thing: ddp.graph_nodes([thing, {"x": (thing,)}]),
    "a copy to": lambda thing: h2d_copy.read_to(thing, (thing, thing, thing), {}),
    "a copy": lambda thing: h2d_copy.read_copy(thing, (thing, thing), {}),
    "a device": h2d_copy.device_type,
    "a scaler's decision": optimizer.was_skipped,
    "an attribute": lambda thing: foreign.attribute(thing, "missing"),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("kind", FOREIGN)
def test_an_object_of_the_jobs_own_type_is_not_asked(kind: str, question: str) -> None:
    QUESTIONS[question](FOREIGN[kind]())


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_mock_is_not_called(question: str) -> None:
    mock = MagicMock()
    QUESTIONS[question](mock)
    assert mock.mock_calls == []
    assert set(vars(mock)["_mock_children"]) <= {"__str__"}


def test_a_variable_of_a_framework_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_MODEL_PARALLEL_GROUP=Proxy(), mpu=Proxy(), _DATA_PARALLEL_GROUP=Lying())
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)
    assert describe_by_framework(object()) == ""


def test_standard_error_of_the_job_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Proxy())
    assert standard_error() is None
    print_line("text")


@pytest.fixture
def training(timeline: Timeline) -> Training:
    made = Training(timeline)
    made.train(loader(8))
    return made


@pytest.mark.parametrize("kind", ["a proxy", "a dict", "a liar", "a generator", "a tensor"])
def test_a_batch_of_the_jobs_own_type_is_only_passed_on(training: Training, kind: str) -> None:
    batches = [FOREIGN[kind]() for _ in range(3)]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    training.train(DataLoader(Stream(), batch_size=None, collate_fn=lambda batch: batch), on=(torch.randn(4, 8),))
    training.train(rankscope.timed(batches), on=(torch.randn(4, 8),))
    assert value(training.timeline, "steps") == 2 + 6
    assert training.samples == 0
    assert snapshot().info["probes_disabled"] == []


class Sampler:
    """A sampler of batches of the job, whose batch size is expensive."""

    batch_size = property(asking("batch_size"))
    drop_last = True

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1], [2, 3]] * 15)


def test_a_sampler_of_the_job_is_only_iterated(training: Training) -> None:
    dataset: Any = torch.randn(4, 8)
    training.train(DataLoader(dataset, batch_sampler=Sampler()), on=(torch.randn(4, 8),))
    assert training.samples == 8 + 60
    assert snapshot().info["settings"]["batch_size"] == ""


class Optimizer(torch.optim.SGD):
    """An optimizer that notes questions for attributes that it does not have."""

    __getattr__ = asking("__getattr__")
    __hash__ = asking("__hash__")
    __eq__ = asking("__eq__")

    @torch.no_grad()
    def step(self, _closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def test_an_optimizer_of_the_job_only_steps(training: Training) -> None:
    training.optimizer = Optimizer(training.model.parameters(), lr=0.1)
    training.train(loader(88))
    assert value(training.timeline, "steps") == 24
    assert snapshot().info["settings"]["precision"] == "float32"


def test_a_scaler_asks_the_same_of_an_optimizer_of_the_job_with_and_without_the_hook(training: Training) -> None:
    class Noting(torch.optim.SGD):
        def __getattr__(self, name: str) -> Any:
            ASKED.append(name)
            raise AttributeError(name)

    training.optimizer, scaler, asked = Noting(training.model.parameters(), lr=0.1), torch.amp.GradScaler("cpu"), []
    for instrumented in (True, False):
        if not instrumented:
            rankscope.uninstrument()
        for batch in loader(8):
            scaler.scale(training.loss(batch)).backward()
            scaler.step(training.optimizer)
            scaler.update()
        asked.append(ASKED.copy())
        ASKED.clear()
    assert asked[0] == asked[1]


class Lazy(torch.nn.Module):
    """A module that loads its parts when it is asked for all of them."""

    modules = named_modules = asking("modules")

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.parts(inputs)


def test_a_module_of_the_job_is_not_asked_for_its_parts(training: Training) -> None:
    lazy: Any = Lazy()
    training.model, training.optimizer = lazy, torch.optim.SGD(lazy.parts.parameters(), lr=0.1)
    for batch in loader(88):
        training.step(batch)
        lazy.eval()
        with torch.no_grad():
            lazy(batch[0])
        assert snapshot().info["probes_disabled"] == []
        lazy.train()
    assert value(training.timeline, "steps") == 24
    assert seconds(training.timeline, layout.EVALUATION) > 0


@pytest.mark.usefixtures("process_group")
def test_tensors_of_the_job_in_a_collective_see_what_they_see_without_the_hook(training: Training) -> None:
    group: Any = dist.group.WORLD
    tensor = seen(4)
    ASKED.clear()
    group.allreduce([tensor]).wait()
    by_hook = ASKED.copy()
    ASKED.clear()
    rankscope.uninstrument()
    group.allreduce([tensor]).wait()
    assert by_hook == ASKED
    ASKED.clear()


@pytest.mark.usefixtures("process_group")
def test_a_process_group_whose_questions_raise_costs_its_call_alone(training: Training) -> None:
    class Silent:
        size = group_desc = _get_sequence_number_for_group = property(asking("group"))
        __hash__ = None  # type: ignore[assignment]

    watched, groups = collectives.Collectives(training.timeline), training.timeline.groups
    call = watched.begin(Silent(), 0, groups.count_next)
    assert call is not None
    watched.end_issue(call, 0, collectives.NOTHING, None)
    with pytest.raises(LookupError):
        watched.begin(object(), 0, asking("count"))
    ASKED.clear()
    assert training.timeline.open_phases[1] is None


def test_only_stored_attributes_are_read() -> None:
    class Slotted:
        __slots__ = ("__weakref__", "missing", "size")

        def __init__(self) -> None:
            self.size = 3

    slotted = Slotted()
    assert foreign.attribute(slotted, "size") == 3
    assert foreign.attribute(slotted, "missing", 4) == 4
    assert foreign.attribute(weakref.ref(slotted), "nothing") is None
