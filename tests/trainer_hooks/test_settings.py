"""A run's settings in its record, and the time when they are read."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testing.own_record import snapshot
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.settings import INTERVAL, Settings
from rankscope.timeline.steps import SETTLED_STEPS
from rankscope.timeline.timeline import Timeline


def train(model: torch.nn.Module, steps: int, autocast: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(2 * steps, 8))
    for (batch,) in DataLoader(data, batch_size=2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()


def settings() -> dict[str, str]:
    """Return the settings in the record."""
    found: dict[str, str] = snapshot().info["settings"]
    return found


@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize("steps", [1, 2, SETTLED_STEPS - 1, SETTLED_STEPS, SETTLED_STEPS + 1])
def test_a_plain_loop_has_settings_from_its_first_step_on(steps: int) -> None:
    train(torch.nn.Linear(8, 2), steps)
    assert list(settings()) == list(layout.SETTINGS)
    assert {name: value for name, value in settings().items() if name != "compiled"} == {
        "accumulation_steps": "1",
        "step_marker": "optimizer",
        "parallelism": "single",
        "precision": "float32",
        "loader_workers": "0",
        "pin_memory": "false",
        "batch_size": "2",
        "comm_hook": "",
        "bucket_bytes": "",
    }


@pytest.mark.usefixtures("attached", "process_group")
def test_ddp_has_its_hook_and_buckets() -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 2), bucket_cap_mb=3)
    model.register_comm_hook(None, fp16_compress_hook)
    train(model, SETTLED_STEPS + 1)
    found = settings()
    assert found["parallelism"] == "ddp"
    assert found["comm_hook"] == "fp16_compress_hook"
    assert found["bucket_bytes"] == str(3 * 1024 * 1024)


@pytest.mark.usefixtures("attached", "process_group")
def test_ddp_without_a_hook_has_none() -> None:
    train(DistributedDataParallel(torch.nn.Linear(8, 2)), SETTLED_STEPS + 1)
    assert settings()["comm_hook"] == "none"


@pytest.mark.usefixtures("attached")
def test_autocasts_type_is_the_precision() -> None:
    train(torch.nn.Linear(8, 2), SETTLED_STEPS + 1, autocast=True)
    assert settings()["precision"] == "bfloat16 autocast"


def test_the_watch_of_autocast_ends_after_the_first_steps(run_dir: Path) -> None:
    before = vars(torch.autocast)["__enter__"]
    rankscope.instrument()
    assert vars(torch.autocast)["__enter__"] is not before
    train(torch.nn.Linear(8, 2), SETTLED_STEPS + 1)
    assert vars(torch.autocast)["__enter__"] is before
    rankscope.uninstrument()
    assert vars(torch.autocast)["__enter__"] is before


class Module(SimpleNamespace):
    """A stand-in for a DDP module; SimpleNamespace does not support weak references."""


class Run:
    """A timeline with settings that the test polls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.changes = 0
        self.timeline = Timeline(RankWriter(), lambda: self.now)
        self.settings = Settings(self.timeline, self.changed, lambda: self.now)
        self.objects: list[Any] = []

    def changed(self) -> None:
        self.changes += 1

    def add(self, role: str, thing: Any) -> None:
        self.objects.append(thing)
        self.timeline.job.objects[role] = weakref.ref(thing)

    def steps(self, number: int = SETTLED_STEPS, micro_steps: int = 0) -> None:
        for _ in range(number):
            self.timeline.step()
        self.timeline.writer.slots[INDEX["micro_steps"]] += micro_steps
        self.settings.poll()


@pytest.fixture
def run() -> Run:
    return Run()


def test_settings_are_read_every_ten_seconds_and_written_only_if_they_change(run: Run) -> None:
    run.steps()
    run.steps()
    assert run.changes == 1
    run.now += INTERVAL
    run.steps()
    assert run.changes == 1
    run.add("ddp", Module(_comm_hooks=[], bucket_bytes_cap=1))
    run.steps()
    assert run.changes == 1
    run.now += INTERVAL
    run.steps()
    assert run.changes == 2
    assert run.settings.known["parallelism"] == "ddp"


def test_objects_that_the_job_drops_are_not_kept_alive(run: Run) -> None:
    run.add("ddp", Module(_comm_hooks=[], bucket_bytes_cap=1))
    run.objects.clear()
    run.steps()
    assert run.settings.known["parallelism"] == "single"


def test_accumulation_is_rounded_over_the_steps_since_the_last_poll(run: Run) -> None:
    run.steps(micro_steps=4 * SETTLED_STEPS + 1)
    assert run.settings.known["accumulation_steps"] == "4"
    run.now += INTERVAL
    run.steps(number=2 * SETTLED_STEPS, micro_steps=4 * SETTLED_STEPS)
    assert run.settings.known["accumulation_steps"] == "2"
    run.now += INTERVAL
    run.steps(number=1, micro_steps=9)
    assert run.settings.known["accumulation_steps"] == "2"


def test_settings_are_read_at_each_poll_of_the_first_steps_and_then_at_the_interval(run: Run) -> None:
    for step in range(SETTLED_STEPS):
        run.add("ddp", Module(_comm_hooks=[], bucket_bytes_cap=step))
        run.steps(number=1)
        assert run.settings.known["bucket_bytes"] == str(step)
    run.add("ddp", Module(_comm_hooks=[], bucket_bytes_cap=99))
    run.steps(number=1)
    assert run.settings.known["bucket_bytes"] == str(SETTLED_STEPS - 1)
    run.now += INTERVAL
    run.steps(number=1)
    assert run.settings.known["bucket_bytes"] == "99"


def test_accumulation_is_known_from_the_first_step_on_and_counted_over_more(run: Run) -> None:
    run.steps(number=1, micro_steps=4)
    assert run.settings.known["accumulation_steps"] == "4"
    run.steps(number=SETTLED_STEPS - 1, micro_steps=8 * (SETTLED_STEPS - 1))
    assert run.settings.known["accumulation_steps"] == "8"


def test_accumulation_is_known_later_with_a_gradient_scaler_which_skips_first_steps(run: Run) -> None:
    run.timeline.writer.slots[INDEX["amp_scale"]] = 65536.0
    run.steps(number=1, micro_steps=4)
    assert run.settings.known["accumulation_steps"] == ""
    run.steps(number=SETTLED_STEPS - 1, micro_steps=SETTLED_STEPS - 1)
    assert run.settings.known["accumulation_steps"] == "1"


def test_accumulation_is_unknown_without_backward_passes(run: Run) -> None:
    run.steps()
    assert run.settings.known["accumulation_steps"] == ""


@pytest.mark.usefixtures("process_group")
def test_averaging_by_the_script_is_recognized_by_its_collectives(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    run.steps()
    assert run.settings.known["parallelism"] == ""
    run.timeline.writer.slots[INDEX["collectives"] + layout.OPS.index("all_reduce")] = SETTLED_STEPS
    run.now += INTERVAL
    run.steps()
    assert run.settings.known["parallelism"] == "hand"


@pytest.mark.filterwarnings("ignore")  # torch warns about a mesh of one process
@pytest.mark.usefixtures("process_group")
def test_fsdp2_is_recognized_by_its_parameters(run: Run) -> None:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 2)
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    run.add("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    run.steps()
    assert run.settings.known["parallelism"] == "fsdp2"


@pytest.mark.filterwarnings("ignore")  # torch warns about FSDP on the CPU
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp_is_recognized_by_its_parameters(run: Run, use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        torch.nn.Linear(8, 2), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    run.add("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    run.steps()
    assert run.settings.known["parallelism"] == "fsdp"


@pytest.mark.parametrize(("names", "parallelism"), [(("dp",), "fsdp2"), (("dp", "tp"), "fsdp2+tp"), (("tp",), "tp")])
def test_a_mesh_shows_the_parallelism_by_its_names(run: Run, names: tuple[str, ...], parallelism: str) -> None:
    mesh = SimpleNamespace(mesh_dim_names=names)
    parameter = SimpleNamespace(device_mesh=mesh, dtype=torch.float32)
    run.add("optimizer", Module(param_groups=[{"params": [parameter]}]))
    run.steps()
    assert run.settings.known["parallelism"] == parallelism


def test_parameters_of_several_types_are_all_named(run: Run) -> None:
    types = [torch.float32, torch.bfloat16]
    run.add("optimizer", torch.optim.SGD([torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in types], lr=0.1))
    run.steps()
    assert run.settings.known["precision"] == "bfloat16+float32"


def test_compilation_is_recognized_by_dynamos_counters(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={}))
    run.steps()
    assert run.settings.known["compiled"] == "false"
    sys.modules["torch._dynamo.utils"].counters["frames"] = {"ok": 3}
    run.now += INTERVAL
    run.steps()
    assert run.settings.known["compiled"] == "true"


def test_long_names_leave_space_in_the_record(run: Run) -> None:
    def hook() -> None: ...

    hook.__name__ = "h" * 10000
    run.add("ddp", Module(_comm_hooks=[(hook, None)], bucket_bytes_cap=1))
    run.steps()
    assert len(json.dumps(run.settings.known)) < layout.INFO_CAPACITY / 8
