"""The forward pass of any model: root modules are found, submodules cost nothing, compiled code does not change."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from testing.own_record import snapshot
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import default_collate

import rankscope
from rankscope.record.layout import OPS

SECONDS = 0.02  # for a slow module


pytestmark = pytest.mark.usefixtures("attached")


class Slow(torch.nn.Module):
    """A module whose forward takes `SECONDS`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        time.sleep(SECONDS)
        return self.layer(inputs)


class Container(torch.nn.Module):
    """A module that is never called itself, like many GANs and LightningModules."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Slow(), torch.nn.Sequential(Slow(), torch.nn.Sequential(torch.nn.Linear(4, 1)))


def forward_seconds() -> float:
    return snapshot().phase_seconds["forward"]


def steps(count: int, forward: Callable[[], torch.Tensor], *parameters: torch.nn.Parameter) -> None:
    """Make training steps. The first one is startup."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for _ in range(count):
        optimizer.zero_grad()
        forward().sum().backward()
        optimizer.step()


def own_calls() -> dict[str, bool]:
    """Return which module classes have their own `__call__` now."""
    classes = (torch.nn.Linear, torch.nn.Sequential, torch.nn.ReLU, Slow)
    return {module_class.__name__: "__call__" in vars(module_class) for module_class in classes}


@pytest.mark.parametrize("wrap", [lambda slow: slow, lambda slow: torch.nn.Sequential(slow, torch.nn.ReLU())])
def test_the_forward_of_a_plain_model_is_forward(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    model = wrap(Slow())
    steps(7, lambda: model(torch.ones(2, 4)), *model.parameters())
    assert forward_seconds() >= 6 * SECONDS
    assert snapshot().phase_seconds["other"] < forward_seconds() / 2


def test_the_parts_of_a_model_that_is_never_called_are_root_modules() -> None:
    model = Container()
    steps(7, lambda: model.critic(model.generator(torch.ones(2, 4))), *model.parameters())
    assert forward_seconds() >= 12 * SECONDS


@pytest.mark.usefixtures("process_group")
def test_the_forward_of_an_fsdp2_model_is_forward() -> None:
    model = torch.nn.Sequential(Slow(), torch.nn.ReLU())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(model[0], mesh=mesh)  # changes the classes of these two instances
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    steps(7, lambda: model(torch.ones(2, 4)), *model.parameters())
    assert forward_seconds() >= 6 * SECONDS
    assert own_calls() == {"Linear": False, "Sequential": False, "ReLU": False, "Slow": False}


def test_only_classes_of_root_modules_are_watched_after_the_search() -> None:
    model = torch.nn.Sequential(Slow(), torch.nn.Linear(4, 4), torch.nn.ReLU())
    before = vars(torch.nn.Module)["__call__"]
    steps(3, lambda: model(torch.ones(2, 4)), *model.parameters())
    assert own_calls() == {"Linear": False, "Sequential": True, "ReLU": False, "Slow": False}
    assert vars(torch.nn.Module)["__call__"] is before


def test_uninstrument_restores_the_classes_during_a_search_and_after_it() -> None:
    rankscope.uninstrument()
    before = dict(vars(torch.nn.Module)), own_calls()
    for count in (2, 4):
        rankscope.instrument()
        model = Slow()
        steps(count, lambda model=model: model(torch.ones(2, 4)), *model.parameters())
        assert (dict(vars(torch.nn.Module)), own_calls()) != before
        rankscope.uninstrument()
        assert (dict(vars(torch.nn.Module)), own_calls()) == before


def distill(teacher: torch.nn.Module, student: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        teacher(torch.ones(2, 4))
    output: torch.Tensor = student(torch.ones(2, 4))
    return output


def test_a_second_model_that_is_used_later_is_found() -> None:
    student, teacher = torch.nn.Linear(4, 4), Slow()

    steps(10, lambda: student(torch.ones(2, 4)), *student.parameters())
    steps(8, lambda: distill(teacher, student), *student.parameters())
    assert own_calls()["Slow"]


def evaluate(model: torch.nn.Module, *, evaluated: Callable[..., Any] | None = None, passes: int = 5) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(passes):
            (evaluated or model)(torch.ones(2, 4))
    model.train()


def test_passes_without_gradients_in_evaluation_mode_are_evaluation() -> None:
    model = Slow()
    steps(7, lambda: model(torch.ones(2, 4)), *model.parameters())
    before = forward_seconds()
    evaluate(model)
    assert snapshot().phase_seconds["evaluation"] >= 5 * SECONDS
    assert forward_seconds() == before


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("inner", [False, True], ids=["DDP", "the module in DDP"])
def test_evaluation_with_the_module_in_ddp_is_evaluation(inner: bool) -> None:
    ddp = DistributedDataParallel(Slow())
    steps(7, lambda: ddp(torch.ones(2, 4)), *ddp.parameters())
    forward = forward_seconds()
    evaluate(ddp, evaluated=ddp.module if inner else None)
    assert snapshot().phase_seconds["evaluation"] >= 5 * SECONDS
    assert forward_seconds() == forward


class Autoencoder(torch.nn.Module):
    """A model that is trained by its call and evaluated by its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Slow(), torch.nn.Sequential(Slow())

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.decoder(self.encoder(inputs))

    def encode(self, inputs: torch.Tensor) -> Any:
        return self.encoder(inputs)


@pytest.mark.parametrize("part", [lambda model: model.encode, lambda model: model.decoder], ids=["method", "submodule"])
def test_evaluation_by_a_part_of_the_trained_model_is_evaluation(part: Callable[[Any], Callable[..., Any]]) -> None:
    model, plain = Autoencoder(), vars(torch.nn.Module)["__call__"]
    steps(7, lambda: model(torch.ones(2, 4)), *model.parameters())
    before = forward_seconds()
    for _ in range(2):
        evaluate(model, evaluated=part(model))
    steps(1, lambda: model(torch.ones(2, 4)), *model.parameters())
    seconds = snapshot().phase_seconds
    assert seconds["evaluation"] >= 10 * SECONDS
    assert 2 * SECONDS <= forward_seconds() - before < 10 * SECONDS
    assert vars(torch.nn.Module)["__call__"] is plain  # the search has ended


def test_a_frozen_part_that_a_script_calls_in_training_is_forward() -> None:
    model = Autoencoder()
    steps(7, lambda: model(torch.ones(2, 4)), *model.parameters())
    model.encoder.eval()
    evaluate(model, evaluated=model.encode)
    model.encoder.eval()
    before = snapshot().phase_seconds["evaluation"]

    def step() -> torch.Tensor:
        with torch.no_grad():
            hidden = model.encode(torch.ones(2, 4))
        output: torch.Tensor = model.decoder(hidden)
        return output

    steps(7, step, *model.parameters())
    assert snapshot().phase_seconds["evaluation"] == before


def test_another_model_of_a_later_stage_is_found_if_no_known_one_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.timeline.steps.POLL_INTERVAL", 0.0)
    first, second = torch.nn.Linear(4, 4), Slow()
    steps(25, lambda: first(torch.ones(2, 4)), *first.parameters())
    steps(10, lambda: second(torch.ones(2, 4)), *second.parameters())
    assert forward_seconds() >= 6 * SECONDS


def test_searches_become_rare_in_a_job_without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.timeline.steps.POLL_INTERVAL", 0.0)
    weight, searches, plain = torch.nn.Parameter(torch.ones(4)), [], vars(torch.nn.Module)["__call__"]

    def forward() -> torch.Tensor:
        searches.append(vars(torch.nn.Module)["__call__"] is not plain)
        return weight * 2

    steps(400, forward, weight)
    assert 0 < sum(searches) < 30


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
def test_evaluation_by_the_module_in_a_compiled_one_is_evaluation() -> None:
    model = Slow()
    compiled = torch.compile(model, backend="eager")
    steps(7, lambda: compiled(torch.ones(2, 4)), *model.parameters())
    evaluate(model)
    assert snapshot().phase_seconds["evaluation"] >= 5 * SECONDS


@pytest.mark.parametrize("mode", [True, False], ids=["training mode", "evaluation mode"])
def test_a_teacher_that_never_trains_is_forward(mode: bool) -> None:
    student, teacher = Slow(), Slow().train(mode)

    steps(7, lambda: distill(teacher, student), *student.parameters())
    assert forward_seconds() >= 12 * SECONDS
    assert snapshot().phase_seconds["evaluation"] == 0


def test_a_model_that_trains_in_evaluation_mode_is_not_evaluated() -> None:
    model = Slow()
    steps(4, lambda: model(torch.ones(2, 4)), *model.parameters())
    model.eval()
    steps(2, lambda: model(torch.ones(2, 4)), *model.parameters())
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert forward_seconds() >= 6 * SECONDS
    assert snapshot().phase_seconds["evaluation"] == 0


def test_a_copy_of_the_model_that_averages_its_weights_is_forward() -> None:
    model = Slow()
    steps(7, lambda: model(torch.ones(2, 4)), *model.parameters())
    before = forward_seconds()
    average = torch.optim.swa_utils.AveragedModel(model)
    evaluate(average)
    assert forward_seconds() - before >= 5 * SECONDS


def test_a_phase_of_the_script_inside_a_model_gets_its_time() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(Slow())

        def forward(self, inputs: torch.Tensor) -> Any:
            with rankscope.phase("attention"):
                return self.inner(inputs)

    model = torch.nn.Sequential(Attention())
    steps(5, lambda: model(torch.ones(2, 4)), *model.parameters())
    assert snapshot().phase_seconds["attention"] >= 4 * SECONDS
    assert forward_seconds() < SECONDS


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_forward_recomputed_in_the_backward_pass_is_backward(reentrant: bool) -> None:
    block = torch.nn.Sequential(Slow())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), block)

    def forward() -> torch.Tensor:
        hidden = model[0](torch.ones(2, 4))
        return torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=reentrant)

    steps(7, forward, *model.parameters())
    seconds = snapshot().phase_seconds
    assert seconds["backward"] >= 6 * SECONDS
    assert seconds["forward"] >= 6 * SECONDS
    assert snapshot()["micro_steps"] == 7


def test_a_module_that_transforms_data_belongs_to_the_data_wait() -> None:
    slow = Slow()

    def collate(rows: list[Any]) -> Any:
        with torch.no_grad():
            return slow(default_collate(rows)[0])

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=2, collate_fn=collate):
        model(batch).sum().backward()
        optimizer.step()
    assert snapshot().phase_seconds["data_wait"] >= 5 * SECONDS
    assert not own_calls()["Slow"]


def test_many_short_blocks_that_a_script_calls_one_by_one_are_not_watched() -> None:
    blocks = [torch.nn.ReLU() for _ in range(40)]
    weight = torch.nn.Parameter(torch.ones(1))

    def forward() -> torch.Tensor:
        hidden: torch.Tensor = weight
        for block in blocks:
            hidden = block(hidden)
        return hidden

    steps(5, forward, weight)
    assert not own_calls()["ReLU"]


def test_watched_models_are_copied_pickled_and_traced_as_without_the_hook() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    root = torch.nn.Linear(4, 4)
    steps(5, lambda: root(model(torch.ones(2, 4))), *model.parameters())
    assert own_calls() == {"Linear": True, "Sequential": True, "ReLU": False, "Slow": False}
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(model), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))
    # torch.fx traces calls of modules by replacing nn.Module.__call__, which the watched one must still call.
    assert [node.op for node in torch.fx.symbolic_trace(model).graph.nodes] == ["placeholder", "call_module", "output"]


SENDER = """
import sys, torch, cloudpickle, rankscope
rankscope.instrument()
class Model(torch.nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * 0 + 7
model = Model(4, 1)
for _ in range(4):
    model(torch.ones(1, 4)).sum().backward()
    rankscope.step()
assert "__call__" in vars(Model)
sys.stdout.buffer.write(cloudpickle.dumps(model))
"""
RECEIVER = """
import sys, torch, pickle
sys.modules["rankscope"] = None
print(pickle.load(sys.stdin.buffer)(torch.ones(1, 4)).item())
"""


def test_a_model_class_of_the_script_can_be_sent_to_a_process_without_the_hook() -> None:
    sent = subprocess.run([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, check=True).stdout
    received = subprocess.run([sys.executable, "-c", RECEIVER], input=sent, stdout=subprocess.PIPE, check=True).stdout
    assert float(received) == 7


def test_an_exception_in_a_forward_is_raised_unchanged_and_closes_the_phase() -> None:
    class Failing(torch.nn.Module):
        def forward(self, fail: bool) -> torch.Tensor:
            if fail:
                raise ZeroDivisionError("user error")
            return weight

    weight, model = torch.nn.Parameter(torch.ones(1)), Failing()
    for count in (2, 4):  # in the search, and after it
        steps(count, lambda: model(False), weight)
        with pytest.raises(ZeroDivisionError):
            model(True)
        assert snapshot().phase == "other"


def compilation(
    count: int, make: Callable[[], torch.nn.Module], wrap: Callable[[Any], Any]
) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Return torch.compile's counters over some steps with changing shapes, and the trained parameters."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make()
    call = wrap(model)
    sizes = iter([2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 12])
    steps(count, lambda: call(torch.ones(next(sizes), 4)), *model.parameters())
    kinds = {"frames": counters["frames"]["total"], "graphs": counters["stats"]["unique_graphs"]}
    sums = {kind: sum(counters[kind].values()) for kind in ("graph_break", "recompiles", "unimplemented")}
    return {**kinds, **sums}, [parameter.detach().clone() for parameter in model.parameters()]


def in_place(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="aot_eager")
    return model


def in_a_function(model: torch.nn.Module) -> Any:
    return torch.compile(lambda inputs: model(inputs), backend="aot_eager")


def plain_first(model: torch.nn.Module) -> Any:
    """Call the model eagerly for some steps, until its class is watched, then compiled."""
    compiled = torch.compile(model, backend="aot_eager")
    calls = iter(range(100))
    return lambda inputs: (model if next(calls) < 4 else compiled)(inputs)


def as_module(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 2)))


def ddp() -> torch.nn.Module:
    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [as_module, in_place, in_a_function, plain_first])
@pytest.mark.parametrize("make", [layers, ddp])
def test_compiled_models_compile_as_without_the_hook(
    make: Callable[[], torch.nn.Module], wrap: Callable[[Any], Any]
) -> None:
    rankscope.uninstrument()
    compilation(12, make, wrap)  # the first time compiles more of torch itself
    expected, parameters = compilation(12, make, wrap)
    rankscope.instrument()
    counted, watched_parameters = compilation(12, make, wrap)
    assert counted["graphs"] == expected["graphs"]
    assert {kind: count for kind, count in counted.items() if count > expected[kind]} == {}
    assert all(map(torch.equal, parameters, watched_parameters))


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
@pytest.mark.parametrize("wrap", [as_module, in_place])
def test_the_forward_of_a_compiled_model_is_forward(wrap: Callable[[Any], Any]) -> None:
    compilation(8, Slow, wrap)
    assert forward_seconds() >= 6 * SECONDS


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
@pytest.mark.usefixtures("process_group")
def test_the_exposed_wait_of_a_compiled_ddp_is_counted() -> None:
    compilation(8, ddp, as_module)
    assert snapshot().many("collectives")[OPS.index("ddp_all_reduce")] == 8
