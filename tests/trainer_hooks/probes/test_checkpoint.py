"""Checkpoints: the saves that count, and their time and size, compared with the script's own measurements."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from testing.own_record import installed, seconds, value
from testing.torchrun import reports
from testing.waiting import in_a_thread

import rankscope
from rankscope import guard
from rankscope.attach import Attachment
from rankscope.guard import Guard
from rankscope.probes import checkpoint
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

JOB = Path(__file__).parents[1] / "jobs" / "distributed_checkpoint.py"
MODEL = torch.nn.Linear(256, 256)
SIZE = 256 * 257 * 4
OPTIMIZER = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
"""The state of an optimizer. To make one here would import torch's compiler, which takes seconds, in each test run."""


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timeline]:
    """Make a timeline after startup, with the probe installed."""
    monkeypatch.setattr(guard, "reraise", True)
    timeline = Timeline(RankWriter())
    with installed(timeline, checkpoint):
        timeline.step()
        yield timeline


def test_torch_save_to_a_path_is_a_checkpoint_of_the_files_size(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    before = time.time()
    torch.save(MODEL.state_dict(), path)
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_bytes") == value(timeline, "checkpoint_last_bytes") == path.stat().st_size
    assert before <= value(timeline, "checkpoint_last_unix") <= time.time()


def test_the_time_of_a_save_is_checkpoint_time_by_the_scripts_own_timer(timeline: Timeline, tmp_path: Path) -> None:
    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            time.sleep(0.2)
            return (dict, ())

    began = time.monotonic()
    torch.save({"model": MODEL.state_dict(), "slow": Slow()}, tmp_path / "model.pt")
    took = time.monotonic() - began
    assert 0.2 <= value(timeline, "checkpoint_last_seconds") <= took
    assert 0.2 <= seconds(timeline, layout.CHECKPOINT) <= took


def test_torch_save_to_an_open_file_counts_the_written_bytes(timeline: Timeline, tmp_path: Path) -> None:
    with (tmp_path / "model.pt").open("wb") as file:
        file.write(b"a header of the user")
        header = file.tell()
        torch.save(MODEL.state_dict(), file)
        assert value(timeline, "checkpoint_last_bytes") == file.tell() - header


def test_arguments_may_be_given_by_name(timeline: Timeline, tmp_path: Path) -> None:
    torch.save(obj=MODEL.state_dict(), f=str(tmp_path / "model.pt"))
    assert value(timeline, "checkpoint_bytes") == (tmp_path / "model.pt").stat().st_size


class Upload:
    """A file without descriptor and position, like a client of an object store."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, content: bytes) -> int:
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


class Proxy:
    """An object of the script that raises when it is looked at."""

    def __getattr__(self, name: str) -> Any:
        if name == "_metadata":
            raise RuntimeError("user error")
        raise AttributeError(name)


def plain(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's state without metadata, as if gathered from several ranks."""
    return {f"layer.{name}": tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("saved", "checkpoints"),
    [
        ({"step": 7, "state": {"model": {"encoder": MODEL.state_dict()}}}, 1),
        ([MODEL.state_dict(), OPTIMIZER], 1),
        ({"optimizer": OPTIMIZER, "step": 7}, 1),
        ({"ema": MODEL, "step": 7}, 1),
        (plain(MODEL), 1),
        ({"model": plain(MODEL)}, 1),
        ({"pixels": torch.zeros(256, 256), "weight": torch.zeros(256)}, 0),
        ([[torch.zeros(256, 256)] * 4] * 4, 0),
        ({"names.weight": "text", "pixels": torch.zeros(256, 256)}, 0),
        ({"proxy": Proxy()}, 0),
    ],
    ids=[
        *("nested", "list", "optimizer", "module", "plain", "plain in a dict"),
        *("batch", "lists of tensors", "no tensor", "raises"),
    ],
)
def test_a_state_in_memory_is_recognized_in_containers_and_by_its_names(
    timeline: Timeline, saved: object, checkpoints: int
) -> None:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    assert value(timeline, "checkpoints") == checkpoints
    assert value(timeline, "checkpoint_bytes") == checkpoints * len(buffer.getvalue())


def test_a_checkpoint_written_from_memory_counts_once(timeline: Timeline, tmp_path: Path) -> None:
    for number in range(1, 4):
        buffer = io.BytesIO()
        torch.save(MODEL.state_dict(), buffer)
        temporary = tmp_path / "model.tmp"
        temporary.write_bytes(buffer.getvalue())
        temporary.replace(tmp_path / "model.pt")
        timeline.step()
        assert value(timeline, "checkpoints") == number


def test_an_uploaded_checkpoint_counts_with_unknown_size(timeline: Timeline) -> None:
    upload = Upload()
    torch.save(MODEL.state_dict(), upload)
    assert upload.size > SIZE
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_bytes") == 0


class Remote(io.RawIOBase):
    """A stream of the script, whose methods raise what no file raises and note that they were called."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return len(content)

    def fileno(self) -> int:
        self.asked.append("fileno")
        raise NotImplementedError

    def seek(self, *_args: int) -> int:
        self.asked.append("seek")
        raise RuntimeError


class RemotePath:
    """A path of the script that notes each use, like one that downloads its file."""

    def __init__(self, path: Path) -> None:
        self.path, self.uses = path, 0

    def __fspath__(self) -> str:
        self.uses += 1
        return str(self.path)


class LazyState(dict[str, Any]):
    """A dict of the script that raises when its values are read."""

    def values(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("wrap", [lambda raw: raw, io.BufferedWriter], ids=["raw", "buffered"])
def test_a_stream_of_the_script_is_not_asked_and_its_saves_count(
    timeline: Timeline, wrap: Callable[[Remote], Any]
) -> None:
    save = torch.serialization.save
    remote = Remote()
    save(MODEL.state_dict(), wrap(remote))
    by_torch = remote.asked.copy()
    uninstrumented = Remote()
    inspect.unwrap(save)(MODEL.state_dict(), wrap(uninstrumented))
    assert by_torch == uninstrumented.asked
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_bytes") == 0


def test_a_spooled_file_stays_in_memory_and_counts(timeline: Timeline) -> None:
    with tempfile.SpooledTemporaryFile(max_size=1 << 30) as spooled:
        torch.save(MODEL.state_dict(), spooled)
        assert not spooled._rolled  # type: ignore[attr-defined]
    assert value(timeline, "checkpoints") == 1


def test_a_path_of_the_script_is_used_only_by_torch(timeline: Timeline, tmp_path: Path) -> None:
    watched, plain_path = RemotePath(tmp_path / "a.pt"), RemotePath(tmp_path / "b.pt")
    torch.save(MODEL.state_dict(), watched)
    inspect.unwrap(torch.save)(MODEL.state_dict(), plain_path)
    assert watched.uses == plain_path.uses
    assert value(timeline, "checkpoints") == 1


def test_containers_of_the_script_are_read_without_their_methods(timeline: Timeline) -> None:
    torch.save(LazyState(model=MODEL.state_dict()), io.BytesIO())
    assert value(timeline, "checkpoints") == 1


def test_a_closed_buffer_has_no_size() -> None:
    closed = io.BytesIO()
    closed.close()
    assert checkpoint.written_bytes(closed) == 0.0


def test_a_temporary_file_with_a_name_counts_the_written_bytes(timeline: Timeline) -> None:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(MODEL.state_dict(), file)
        file.flush()
        assert value(timeline, "checkpoint_bytes") == Path(file.name).stat().st_size


def test_a_state_sent_through_a_socket_is_not_a_checkpoint(timeline: Timeline) -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver, sender.makefile("wb") as file:
        torch.save({"lr.weight": torch.zeros(4)}, file)
    assert value(timeline, "checkpoints") == 0


def test_sizes_of_a_writer_of_the_script_are_not_known_if_they_raise() -> None:
    assert (
        checkpoint.bytes_of_rank(SimpleNamespace(storage_data={"a": SimpleNamespace(relative_path="__0_0.distcp")}), 0)
        == 0.0
    )


@pytest.mark.filterwarnings("ignore")  # torch uses its own deprecated functions
@pytest.mark.usefixtures("process_group")
def test_a_state_sent_by_torch_distributed_is_not_a_checkpoint(timeline: Timeline) -> None:
    from torch.distributed.optim.zero_redundancy_optimizer import _broadcast_object

    _broadcast_object(MODEL.state_dict(), src_rank=0, group=torch.distributed.group.WORLD)
    assert value(timeline, "checkpoints") == 0


def test_a_save_into_memory_without_state_or_into_a_pipe_is_not_a_checkpoint(timeline: Timeline) -> None:
    torch.save({"batch": torch.zeros(256, 256)}, io.BytesIO())
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as pipe:
        torch.save(1, pipe)
    os.close(read_end)
    assert value(timeline, "checkpoints") == 0
    assert seconds(timeline, layout.CHECKPOINT) == 0


@pytest.mark.parametrize("metric", [torch.zeros(4), {"loss": 0.5, "step": 7}, [1, 2, 3]])
def test_a_small_file_without_state_is_not_a_checkpoint(timeline: Timeline, tmp_path: Path, metric: object) -> None:
    torch.save(metric, tmp_path / "metric.pt")
    assert value(timeline, "checkpoints") == 0


@pytest.mark.parametrize(
    "state",
    [
        torch.nn.Linear(1, 1),
        torch.nn.Linear(1, 1).state_dict(),
        {"epoch": 1, "model": torch.nn.Linear(1, 1).state_dict()},
        {"optimizer": OPTIMIZER},
    ],
    ids=["module", "state_dict", "model in a dict", "optimizer in a dict"],
)
def test_a_small_file_with_state_is_a_checkpoint(timeline: Timeline, tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "model.pt")
    assert value(timeline, "checkpoints") == 1


def test_files_saved_between_the_same_two_steps_are_one_checkpoint(timeline: Timeline, tmp_path: Path) -> None:
    for _ in range(2):
        for name in ("model.pt", "optimizer.pt"):
            torch.save(MODEL.state_dict(), tmp_path / name)
        timeline.step()
    both = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert value(timeline, "checkpoints") == 2
    assert value(timeline, "checkpoint_last_bytes") == both
    assert value(timeline, "checkpoint_bytes") == 2 * both


def test_a_save_that_raises_is_not_a_checkpoint_and_raises_in_the_script(timeline: Timeline, tmp_path: Path) -> None:
    class Unpicklable:
        def __reduce__(self) -> str:
            raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        torch.save({"model": MODEL.state_dict(), "bad": Unpicklable()}, tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(MODEL.state_dict(), tmp_path / "missing" / "model.pt")
    assert value(timeline, "checkpoints") == 0
    torch.save(MODEL.state_dict(), tmp_path / "model.pt")
    assert value(timeline, "checkpoints") == 1


def test_a_state_that_another_thread_saves_counts_at_the_next_step_without_time(
    timeline: Timeline, tmp_path: Path
) -> None:
    for number in range(1, 4):
        for name in ("model.pt", "average.pt"):
            in_a_thread(torch.save, MODEL.state_dict(), tmp_path / name)
        assert value(timeline, "checkpoints") == number - 1
        timeline.step()
        assert value(timeline, "checkpoints") == number
        assert value(timeline, "checkpoint_last_bytes") == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert value(timeline, "checkpoint_last_seconds") == 0
    assert seconds(timeline, layout.CHECKPOINT) == 0


def test_other_files_that_another_thread_saves_are_no_checkpoints(timeline: Timeline, tmp_path: Path) -> None:
    in_a_thread(torch.save, torch.zeros(256, 256), tmp_path / "features.pt")
    timeline.step()
    assert value(timeline, "checkpoints") == 0


@pytest.mark.filterwarnings("ignore")  # torch warns about a single process
def test_the_threads_of_a_distributed_save_do_not_count_twice(timeline: Timeline, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    writer = distributed_checkpoint.FileSystemWriter(tmp_path / "1", thread_count=4)
    distributed_checkpoint.save({"model": model.state_dict()}, storage_writer=writer)
    timeline.step()
    written = sum(path.stat().st_size for path in (tmp_path / "1").glob("__0_*.distcp"))
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_bytes") == written


def test_safetensors_are_checkpoints_whether_imported_before_or_after_the_hook(tmp_path: Path) -> None:
    sys.modules.pop("safetensors.torch", None)
    timeline = Timeline(RankWriter())
    with installed(timeline, checkpoint):
        from safetensors.torch import load_file, save_file  # before the first poll, as transformers does

        timeline.step()
        save_file(MODEL.state_dict(), tmp_path / "taken.safetensors")
        timeline.step()
        sys.modules["safetensors.torch"].save_model(MODEL, str(tmp_path / "model.safetensors"))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert value(timeline, "checkpoints") == 2
    assert value(timeline, "checkpoint_bytes") == sum(sizes)
    assert torch.equal(load_file(tmp_path / "taken.safetensors")["weight"], MODEL.weight)


def test_safetensors_that_the_script_writes_are_a_checkpoint_unless_they_are_small(timeline: Timeline) -> None:
    import safetensors.torch

    timeline.step()  # the hook finds later imports at the end of a step
    safetensors.torch.save({"loss": torch.zeros(4)})
    assert value(timeline, "checkpoints") == 0
    content = safetensors.torch.save(MODEL.state_dict())
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_bytes") == len(content)


@pytest.mark.parametrize("metadata", [None, SimpleNamespace(storage_data=None)])
def test_sizes_that_the_metadata_lacks_are_those_of_the_ranks_own_files(tmp_path: Path, metadata: object) -> None:
    for name, size in (("__1_0", 5), ("__1_1", 7), ("__1_3", 9), ("__10_0", 11), ("__0_0", 13)):
        (tmp_path / f"{name}.distcp").write_bytes(bytes(size))
    for directory in (tmp_path, str(tmp_path)):
        assert checkpoint.bytes_of_rank(metadata, 1, directory) == 5 + 7
    assert checkpoint.bytes_of_rank(metadata, 2, tmp_path) == 0.0
    assert checkpoint.bytes_of_rank(metadata, 1, "s3://bucket/1") == 0.0
    for number in range(checkpoint.MOST_FILES):
        (tmp_path / f"__3_{number}.distcp").write_bytes(b"x")
    assert checkpoint.bytes_of_rank(metadata, 3, tmp_path) == 0.0  # perhaps not all of them
    writer = SimpleNamespace(path=tmp_path)
    assert checkpoint.directory_of(({}, writer), {}) is checkpoint.directory_of((), {"checkpoint_id": tmp_path})


def test_each_rank_of_a_sharded_save_counts_its_bytes(run_dir: Path, tmp_path: Path) -> None:
    for rank in reports(2, JOB, tmp_path):
        for count, kind in enumerate(("save", "async_save"), start=1):
            seen, found = rank[kind], rank[kind]["record"]
            assert found["checkpoints"] == count, kind
            assert found["checkpoint_last_bytes"] == seen["file_bytes"] > 0, kind
            assert found["checkpoint_bytes"] == count * seen["file_bytes"], kind
            assert 0 < found["checkpoint_last_seconds"] <= seen["took"], kind
        both = rank["save"]["took"] + rank["async_save"]["took"]
        assert 0 < rank["async_save"]["record"]["phase_seconds"] <= both


def test_an_asynchronous_save_counts_when_it_is_finished_with_its_blocking_time(timeline: Timeline) -> None:
    saves = checkpoint.AsyncSaves(timeline)
    future: Future[Any] = Future()
    save = checkpoint.in_checkpoint(timeline, Guard("checkpoint", lambda _: None), saves.measure)(lambda: future)
    assert save() is future
    blocked = seconds(timeline, layout.CHECKPOINT)
    saves.poll()
    assert value(timeline, "checkpoints") == 0
    in_a_thread(future.set_result, None)
    assert value(timeline, "checkpoints") == 0  # the other thread only notes it
    saves.poll()
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_last_seconds") <= blocked


def test_a_nested_asynchronous_save_adds_only_its_bytes(timeline: Timeline) -> None:
    saves, metadata = checkpoint.AsyncSaves(timeline), SimpleNamespace(storage_data={})
    metadata.storage_data = {"weight": SimpleNamespace(relative_path="__0_0.distcp", length=7)}
    future: Future[Any] = Future()
    outer = timeline.checkpoints.begin()
    checkpoint.in_checkpoint(timeline, Guard("checkpoint", lambda _: None), saves.measure)(lambda: future)()
    timeline.checkpoints.end(outer, 0.0)
    future.set_result(metadata)
    saves.poll()
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_last_bytes") == 7


def test_a_watched_function_can_still_be_pickled(timeline: Timeline) -> None:
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    assert pickle.loads(pickle.dumps(distributed_checkpoint.save)) is distributed_checkpoint.save


def test_an_asynchronous_save_that_fails_is_not_a_checkpoint(timeline: Timeline) -> None:
    saves = checkpoint.AsyncSaves(timeline)
    future: Future[Any] = Future()
    checkpoint.in_checkpoint(timeline, Guard("checkpoint", lambda _: None), saves.measure)(lambda: future)()
    future.set_exception(OSError("disk full"))
    saves.poll()
    assert value(timeline, "checkpoints") == 0


def test_lightnings_writer_counts_although_it_saves_into_memory_first(
    timeline: Timeline, tmp_path: Path, load: Callable[..., object]
) -> None:
    class TorchCheckpointIO:
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Path) -> None:
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            path.write_bytes(buffer.getvalue())

    load("lightning.fabric.plugins.io.torch_io", TorchCheckpointIO=TorchCheckpointIO)
    timeline.step()
    TorchCheckpointIO().save_checkpoint({"state_dict": MODEL.state_dict()}, tmp_path / "last.ckpt")
    assert value(timeline, "checkpoints") == 1
    assert value(timeline, "checkpoint_bytes") == (tmp_path / "last.ckpt").stat().st_size


class TestTheUsersOwnPhase:
    @pytest.fixture(autouse=True)
    def end_startup(self, attached: Attachment) -> None:
        self.record = attached.timeline
        rankscope.step()

    def test_is_one_checkpoint_with_the_bytes_of_its_saves(self, tmp_path: Path) -> None:
        with rankscope.phase("checkpoint"):
            torch.save(MODEL.state_dict(), tmp_path / "model.pt")
            torch.save(MODEL.state_dict(), tmp_path / "best.pt")
        sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert value(self.record, "checkpoints") == 1
        assert value(self.record, "checkpoint_last_bytes") == sizes

    def test_counts_an_unknown_writer(self) -> None:
        with rankscope.phase("checkpoint"):
            time.sleep(0.01)
        assert value(self.record, "checkpoints") == 1
        assert value(self.record, "checkpoint_last_seconds") >= 0.01
        assert value(self.record, "checkpoint_last_bytes") == 0

    def test_does_not_count_if_it_raises(self) -> None:
        with pytest.raises(OSError, match="disk full"), rankscope.phase("checkpoint"):
            raise OSError("disk full")
        assert value(self.record, "checkpoints") == 0
        with rankscope.phase("checkpoint"):
            pass
        assert value(self.record, "checkpoints") == 1
