"""Dumps of torch's flight recorder in a capture: found where the ranks' processes write them, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.attacks.users import needs_root
from tests.exporter.hangs.test_flight_recorder import trained, write

from rankscope_exporter.capture import child, torch_dumps
from rankscope_exporter.capture.source import UnavailableError
from rankscope_exporter.capture.torch_dumps import Place, copy_dumps, locate_dumps

SECRET = "s3cret"


@contextmanager
def rank(user: int | None = None, directory: Path | None = None, **environment: str) -> Iterator[int]:
    """Run a process with only these variables. Yield its process ID."""
    command = ["sh", "-c", "echo; read end"]
    variables = {"API_KEY": SECRET, **environment}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, user=user, cwd=directory
    ) as process:
        assert process.stdout
        assert process.stdin
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "capture").mkdir()
    return tmp_path / "capture"


@pytest.fixture
def dumps(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that writes the dumps of four ranks, and returns their directory."""

    def make() -> Path:
        (tmp_path / "dumps").mkdir()
        recorders = trained()
        for one in recorders[:3]:
            one.issue("TENSOR", completes=one.rank < 2)
        return write(tmp_path / "dumps", recorders)

    return make


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_the_dumps_are_copied_and_their_first_line_names_the_blocking_rank(folder, tmp_path, dumps) -> None:
    with rank(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/dumps/nccl_trace_rank_") as pid:
        dumps()
        places = locate_dumps(dict.fromkeys(range(4), pid))
        text = copy_dumps(places, folder)
    assert "blocks the other ranks." in text.splitlines()[0]
    assert names(folder) == [f"nccl_trace_rank_{one}" for one in range(4)]
    assert (folder / "nccl_trace_rank_0").read_bytes() == (tmp_path / "dumps/nccl_trace_rank_0").read_bytes()
    assert SECRET not in repr(places) + text


@pytest.mark.parametrize(
    "variables",
    [
        {"XDG_CACHE_HOME": "{}/.cache"},
        {"HOME": "{}"},
        {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": ".cache/torch/comm_lib_trace_rank_"},
    ],
)
def test_the_place_is_a_default_of_torch_or_relative_to_the_processs_directory(
    folder, tmp_path, dumps, variables
) -> None:
    environment = {name: value.format(tmp_path) for name, value in variables.items()}
    with rank(directory=tmp_path, **environment) as pid:
        (tmp_path / ".cache/torch").mkdir(parents=True)
        (dumps() / "nccl_trace_rank_0").rename(tmp_path / ".cache/torch/comm_lib_trace_rank_0")
        copy_dumps(locate_dumps({0: pid}), folder)
    assert names(folder) == ["nccl_trace_rank_0"]


def test_a_dump_is_copied_after_its_process_has_ended(folder, tmp_path, dumps) -> None:
    with rank(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/dumps/nccl_trace_rank_") as pid:
        places = locate_dumps({0: pid})
        dumps()
    copy_dumps(places, folder)
    assert names(folder) == ["nccl_trace_rank_0"]


def test_a_dump_of_an_earlier_run_is_not_copied(folder, tmp_path, dumps) -> None:
    old = time.time() - 60.0
    os.utime(dumps() / "nccl_trace_rank_0", (old, old))
    with (
        rank(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/dumps/nccl_trace_rank_") as pid,
        pytest.raises(UnavailableError, match=r"torch has written no dump yet\..*when NCCL's watchdog times out"),
    ):
        copy_dumps(locate_dumps({0: pid}), folder)
    assert names(folder) == []


def test_a_rank_that_has_ended_or_is_hidden_has_no_place(folder) -> None:
    with rank() as pid:
        pass
    assert locate_dumps({0: pid}) == []
    with pytest.raises(UnavailableError, match="CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"):
        copy_dumps([], folder)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Yield the place of a rank whose dump would be `dump0` of this test."""
    with rank(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/dump") as pid:
        [found] = locate_dumps({0: pid})
        yield found


def refused(place: Place, folder: Path) -> str:
    with pytest.raises(UnavailableError) as raised:
        copy_dumps([place], folder)
    assert names(folder) == []
    return str(raised.value)


def test_a_link_a_pipe_and_a_large_file_are_not_copied(place, folder, tmp_path) -> None:
    dump, secret = tmp_path / "dump0", tmp_path / "secret"
    secret.write_text(SECRET)
    dump.symlink_to(secret)
    assert "is a link" in refused(place, folder)
    dump.unlink()
    os.mkfifo(dump)
    assert "not a regular file" in refused(place, folder)
    dump.unlink()
    with dump.open("wb") as file:
        file.truncate(torch_dumps.DUMP_BYTES + 1)
    assert "longer than 16 MiB" in refused(place, folder)


@needs_root
def test_a_link_in_a_container_leads_to_its_own_files(folder, tmp_path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/dump0").write_text(SECRET)
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    for name, target in {"host": str(tmp_path / "outside"), "up": "../../outside", "own": "/real"}.items():
        (root / name).symlink_to(target)
    with rank(TORCH_FR_DUMP_TEMP_FILE="") as pid:
        [found] = locate_dumps({0: pid})
        for link in ("host", "up"):
            with pytest.raises(FileNotFoundError):
                torch_dumps.read_file(root, f"/{link}/dump0", {0}, 100)
        (root / "real/dump0").write_text("own")
        assert torch_dumps.read_file(root, "/own/dump0", {0}, 100)[0] == b"own"
    assert "container" in refused(found._replace(is_in_container=True), folder)


def test_all_dumps_are_read_although_not_all_fit_into_the_capture(folder, tmp_path, dumps) -> None:
    with rank(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/dumps/nccl_trace_rank_") as pid:
        sizes = sorted(one.stat().st_size for one in dumps().iterdir())
        text = copy_dumps(locate_dumps(dict.fromkeys(range(4), pid)), folder, sum(sizes) - 1)
    assert text.startswith("Rank 3 of 4 blocks the other ranks.")
    assert text.splitlines()[-1].startswith("1 dumps were read and are not kept")
    assert sorted(one.stat().st_size for one in folder.iterdir()) == sizes[:-1]


STARTED = """print('{"has_started": true}', flush=True)"""


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("import time; time.sleep(600)", 0.5, "no result within 0.5 s: there is no CPU time"),
        (f"{STARTED}; import time; time.sleep(600)", 5.0, "no result within 5 s: a file system may not answer"),
        ("1 / 0", 60.0, "failed with status 1"),
    ],
)
def test_a_child_that_blocks_or_fails_is_the_reason(code, seconds, reason, tmp_path, monkeypatch) -> None:
    (tmp_path / "job.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=reason):
        child.run_child("job", seconds=seconds)
