"""The attack: a job writes dumps that take a capture's time and memory, or leads it to files of others."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.attacks.cli.test_hang_with_hostile_dumps import DUMPS
from tests.attacks.users import VICTIM, needs_root
from tests.exporter.capture.test_torch_dumps import folder, rank

from rankscope_exporter.capture.source import UnavailableError
from rankscope_exporter.capture.torch_dumps import DUMP_BYTES, TEXT_BYTES, copy_dumps, locate_dumps

__all__ = ["folder"]
SECRET = "the victim's"


@pytest.mark.parametrize("kind", DUMPS)
def test_a_hostile_dump_is_copied_and_named_as_unreadable(folder: Path, tmp_path: Path, kind: str) -> None:
    with rank(TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "dump")) as pid:
        size = (tmp_path / "dump0").write_bytes(DUMPS[kind]())
        text = copied(pid, folder)
    is_large = size > DUMP_BYTES
    assert ("longer than 16 MiB" if is_large else f"{folder}/nccl_trace_rank_0: ") in text
    assert len(text.encode()) <= TEXT_BYTES


def copied(pid: int, folder: Path) -> str:
    """Copy the dump of rank 0. Return what it says, or the reason why it is not copied."""
    try:
        return copy_dumps(locate_dumps({0: pid}), folder)
    except UnavailableError as error:
        return str(error)


@needs_root
@pytest.mark.parametrize("target", ["secret", "folder/secret"])
def test_a_jobs_link_does_not_lead_to_files_of_others(folder: Path, tmp_path: Path, target: str) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "folder").mkdir()
    (tmp_path / target).write_text(SECRET)
    with rank(user=VICTIM, TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "link/dump")) as pid:
        places = locate_dumps({0: pid})
        (tmp_path / "link").symlink_to((tmp_path / target).parent)
        (tmp_path / target).rename((tmp_path / target).with_name("dump0"))
        with pytest.raises(UnavailableError, match="belongs to another user"):
            copy_dumps(places, folder)
    assert [*folder.iterdir()] == []


@needs_root
def test_a_file_that_is_exchanged_while_it_is_read_is_never_the_victims(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    dump, secret, own = tmp_path / "dump0", tmp_path / "secret", tmp_path / "own"
    secret.write_text(SECRET)
    done = Event()

    def exchange() -> None:
        while not done.is_set():
            own.write_text("own")
            os.chown(own, VICTIM, VICTIM)
            own.rename(dump)
            (tmp_path / "link").symlink_to(secret)
            (tmp_path / "link").rename(dump)

    with rank(user=VICTIM, TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "dump")) as pid:
        thread = Thread(target=exchange)
        thread.start()
        try:
            for _ in range(10):
                copied(pid, folder)
                assert all(SECRET not in one.read_text() for one in folder.iterdir())
        finally:
            done.set()
            thread.join()


@needs_root
def test_a_link_in_the_captures_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text(SECRET)
    (folder / "nccl_trace_rank_0.part").symlink_to(victim)
    (folder / "nccl_trace_rank_0").symlink_to(victim)
    with rank(TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "dump")) as pid:
        (tmp_path / "dump0").write_text("dump")
        with pytest.raises(UnavailableError):
            copy_dumps(locate_dumps({0: pid}), folder)
        (folder / "nccl_trace_rank_0.part").unlink()
        copy_dumps(locate_dumps({0: pid}), folder)
    assert victim.read_text() == SECRET
    assert (folder / "nccl_trace_rank_0").read_text() == "dump"
