"""The hook in a long-running process: its memory, its threads, and what remains after `uninstrument`."""

from __future__ import annotations

import gc
import logging
import resource
import shutil
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testing.leaving import leave
from testing.own_record import attachment
from testing.waiting import in_a_thread
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope import attach, guard
from rankscope.probes.ddp import WatchedModule
from rankscope.record import layout
from rankscope.record.clock import boot_id
from rankscope.record.reader import read_rank

HOOK = str(Path(attach.__file__).parent)
STEPS = 25  # more than the search for root modules and the first polls take


@pytest.fixture(autouse=True)
def named_run(hook_fails_loudly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN", "job")


def train(steps: int = STEPS) -> list[torch.Tensor]:
    """Train with everything that the hook watches, and return the parameters."""
    gc.collect()  # free the last optimizer, which is part of a cycle and would still mark the steps
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 4)
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for (batch,) in rankscope.timed(DataLoader(TensorDataset(torch.randn(steps, 4)))):
        with torch.autocast("cpu", torch.bfloat16), rankscope.phase("tokenize"):
            output = model(batch)
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.save(model.state_dict(), BytesIO())
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
    return [parameter.detach().clone() for parameter in network.parameters()]


def is_ours(value: Any) -> bool:
    """Return whether this is a function or object of the hook. Reads only its type: some of torch's objects warn."""
    if type(value) is FunctionType:
        return value.__code__.co_filename.startswith(HOOK) or is_ours(vars(value).get("__wrapped__"))
    return type(value).__module__.startswith("rankscope")


def ours_in_torch() -> list[str]:
    """Return every attribute of torch's modules and classes that belongs to the hook."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    owners: list[Any] = [module for module in modules if isinstance(module, ModuleType)]
    classes = {value for module in owners for value in vars(module).values() if issubclass(type(value), type)}
    owned = [(owner, name, value) for owner in [*owners, *classes] for name, value in list(vars(owner).items())]
    return [f"{owner}.{name}" for owner, name, value in owned if is_ours(value)]


@pytest.mark.usefixtures("process_group")
def test_a_patch_that_cannot_be_undone_does_not_prevent_the_others_from_being_undone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "reraise", False)
    excepthook = sys.excepthook

    def broken() -> None:
        raise RuntimeError("foreign import hook")

    rankscope.instrument()
    train()
    assert len(ours_in_torch()) > 20
    attachment()._undo.insert(3, broken)
    attachment()._logged._patches._undo[0, "a logger's method"] = broken
    rankscope.uninstrument()
    assert ours_in_torch() == []
    assert not any(map(is_ours, gc.callbacks))
    assert sys.excepthook is excepthook
    assert attach.current() is None
    assert len(caplog.records) == 2


def test_instrumenting_again_replaces_the_record_of_the_same_run(run_dir: Path) -> None:
    rankscope.instrument()
    train(5)
    rankscope.uninstrument()
    (path,) = run_dir.iterdir()
    first = read_rank(path)
    assert (first.exit_reason, first["steps"]) == ("finished", 5)
    assert first.info["boot_id"] == boot_id()
    train(5)  # not counted
    rankscope.instrument()
    train(2)
    (path,) = run_dir.iterdir()
    second = read_rank(path)
    assert second["steps"] == 2
    assert second["ended"] == layout.RUNNING
    assert second["started_unix"] > first["started_unix"]


def test_training_is_followed_to_another_thread_and_back() -> None:
    rankscope.instrument()
    for expected in (10, 20, 30):
        if expected == 20:
            in_a_thread(train, 10)
        else:
            train(10)
        assert attachment().timeline.steps.count == expected
        assert attachment().timeline.open_phases == (layout.OTHER, None)


def test_all_backward_passes_of_a_single_training_thread_are_counted() -> None:
    rankscope.instrument()
    in_a_thread(train, 10)
    steps = attachment().timeline.steps
    assert (steps.count, steps.micro_steps) == (10, 10)


@pytest.mark.parametrize("threads", [2, 3])
def test_all_steps_of_alternating_threads_of_a_pool_are_counted(threads: int) -> None:
    rankscope.instrument()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss = model(torch.randn(8, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    pool = [ThreadPoolExecutor(1) for _ in range(threads)]
    for number in range(60):
        pool[number % threads].submit(step).result()
    steps = attachment().timeline.steps
    assert (steps.count, steps.micro_steps) == (60, 60)
    for one in pool:
        one.shutdown()


@pytest.mark.parametrize("parts", [(0, 1, 1), (0, 0, 1), (1, 1, 0), (0, 1, 2)])
def test_steps_whose_parts_run_in_different_threads_are_counted(parts: tuple[int, int, int]) -> None:
    """Run forward, backward and optimizer each in one of three threads, one after the other."""
    rankscope.instrument()
    weights = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
    threads = [ThreadPoolExecutor(1) for _ in range(3)]
    forward, backward, update = (threads[part].submit for part in parts)
    for _ in range(30):
        loss = forward(lambda: weights(torch.randn(8, 4)).sum()).result()
        backward(loss.backward).result()
        update(optimizer.step).result()
    steps = attachment().timeline.steps
    assert (steps.count, steps.micro_steps) == (30, 30)
    assert attachment().timeline.seconds[layout.FORWARD] > 0
    for one in threads:
        one.shutdown()


def test_a_step_accumulated_by_several_threads_is_counted() -> None:
    rankscope.instrument()
    weights = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
    threads = [ThreadPoolExecutor(1) for _ in range(3)]
    for number in range(60):
        threads[number % 3].submit(lambda: weights(torch.randn(8, 4)).sum().backward()).result()
        if number % 2:
            optimizer.step()  # in the main thread
    steps = attachment().timeline.steps
    assert (steps.count, steps.micro_steps) == (30, 60)
    for one in threads:
        one.shutdown()


def test_a_thread_that_runs_another_model_does_not_take_the_steps() -> None:
    """Run a model with gradients in another thread, which is busy afterwards, between the steps of the main thread."""
    rankscope.instrument()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    has_run, may_run = threading.Event(), threading.Semaphore(0)
    is_done = False

    def score() -> None:
        while not is_done:
            if may_run.acquire(blocking=False):
                model(torch.randn(8, 4))
                has_run.set()

    other = threading.Thread(target=score)
    other.start()
    for _ in range(40):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        has_run.clear()
        may_run.release()
        has_run.wait()
    is_done = True
    other.join()
    steps = attachment().timeline.steps
    assert (steps.count, steps.micro_steps) == (40, 40)


def test_a_thread_that_evaluates_between_steps_is_not_followed() -> None:
    rankscope.instrument()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(8, 4))

    with ThreadPoolExecutor(1) as other:
        for _ in range(20):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            other.submit(evaluate).result()
    assert attachment().timeline.steps.count == 20


def test_of_two_threads_that_train_at_once_only_one_is_recorded() -> None:
    def both(barrier: threading.Barrier) -> None:
        weights = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weights], lr=0.1)
        for _ in range(10):
            barrier.wait()
            with rankscope.phase("tokenize"):
                weights.sum().backward()
            optimizer.step()
            barrier.wait()

    rankscope.instrument()
    barrier = threading.Barrier(2)
    train(1)  # the main thread is followed
    thread = threading.Thread(target=both, args=(barrier,))
    thread.start()
    both(barrier)
    thread.join()
    timeline, slots = attachment().timeline, attachment().writer.slots
    index = layout.INDEX["phase_seconds"]
    total = sum(slots[index : index + layout.MAX_PHASES])
    assert timeline.open_phases == (layout.OTHER, None)
    assert total == pytest.approx(timeline.last_event - slots[layout.INDEX["started_monotonic"]], abs=1e-6)


@pytest.mark.usefixtures("process_group")
def test_modules_that_the_script_drops_are_freed() -> None:
    rankscope.instrument()
    for _ in range(8):
        train(2)
    gc.collect()
    watched = [item for item in gc.get_objects() if type(item) is WatchedModule]  # isinstance reads attributes
    assert len(watched) <= 1


@pytest.mark.usefixtures("process_group")
def test_memory_does_not_grow_with_steps() -> None:
    rankscope.instrument()
    train(200)
    gc.collect()
    tracemalloc.start()
    try:
        before = allocated_bytes()
        train(1000)
        gc.collect()
        assert allocated_bytes() - before < 10_000  # 10 bytes per step would be as much
    finally:
        tracemalloc.stop()


def allocated_bytes() -> int:
    """Return the bytes allocated by the hook's own lines."""
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{HOOK}/*")])
    return sum(statistic.size for statistic in snapshot.statistics("filename"))


def test_recreated_process_groups_keep_their_name_and_their_sequence_number_grows() -> None:
    rankscope.instrument()
    numbers = []
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(20):
            group = dist.new_group([0])
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
            del group
        train(2)
        leave()
        numbers.append(attachment().writer.slots[layout.INDEX["group_collectives"]])
    gc.collect()
    assert attachment().timeline.groups.names == ["0"]
    assert len(attachment().timeline.groups._known) <= 1
    assert 20 < numbers[0] < numbers[1] < numbers[2]


def full_file_system(_: Path) -> Callable[[], None]:
    """Limit files to 4 KiB, so that writing a record fails as on a full file system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def not_a_directory(run_dir: Path) -> Callable[[], None]:
    """Replace the directory by a file, which even root cannot use."""
    run_dir.rmdir()
    run_dir.touch()

    def restore() -> None:
        run_dir.unlink()
        run_dir.mkdir()

    return restore


@pytest.mark.parametrize("spoil", [full_file_system, not_a_directory])
def test_a_full_or_invalid_run_directory_causes_only_one_warning(
    run_dir: Path, spoil: Callable[[Path], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    expected = train()
    restore = spoil(run_dir)
    try:
        rankscope.instrument()
        assert all(map(torch.equal, expected, train()))
    finally:
        restore()
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    assert "training continues" in caplog.text
    assert list(run_dir.iterdir()) == []


def test_a_deleted_run_directory_does_not_affect_training(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = train()
    rankscope.instrument()
    train(2)
    shutil.rmtree(run_dir)
    assert all(map(torch.equal, expected, train()))
    assert attachment().timeline.steps.count == 2 + STEPS
    [record] = run_dir.glob("*.rank")
    assert caplog.messages == [f"rankscope: this rank's record was removed; recorded again: {record}"]
