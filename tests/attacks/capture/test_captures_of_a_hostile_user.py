"""The attack: records and processes of a hostile user make a capture read, write or show what is another user's."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from testing.programs import python, running
from testing.records import living_rank
from testing.users import NOBODY
from tests.attacks.cli_support import process
from tests.attacks.users import VICTIM, needs_root

from rankscope.process.stack_dump import SIGNAL
from rankscope_exporter.capture import capturing, ranks
from rankscope_exporter.capture.request import Request, WantedRank
from rankscope_exporter.ranks.run_directory import RunDirectory

SECRET = "argument-of-another-user"


@pytest.fixture
def captures() -> Iterator[Path]:
    """Yield the directory of captures. Other users cannot enter pytest's own directories."""
    with TemporaryDirectory(prefix="rankscope-test-") as directory:
        Path(directory).chmod(0o711)
        path = Path(directory) / "captures"
        path.mkdir(mode=0o711)
        yield path


def request(run_dir: Path, run: str, owner: int, limit: int = 256) -> Request:
    """Return a request for all records in the directory, as if the exporter had believed each of them."""
    records = sorted(run_dir.glob("*.rank"))[:limit]
    wanted = [WantedRank(number, str(path), f"Rank {number}") for number, path in enumerate(records)]
    return Request(run, owner, run, run, "hang", "node-a", wanted)


def capture(request: Request, directory: Path, **limits: Any) -> Path:
    """Capture in a process, as the exporter does. Return the folder."""
    job = {"directory": str(directory), "stacks": "hook", "bytes": 2**30, "days": 1.0, "request": request.as_json()}
    command = [sys.executable, "-m", "rankscope_exporter.capture"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False, **limits)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "name" in answer, answer
    return directory / str(answer["name"])


def content(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())


@needs_root
def test_a_record_that_names_another_users_process_shows_only_the_one_that_holds_its_lock(
    shared: Path, captures: Path
) -> None:
    with running(
        *python(
            "import os, sys; os.setresuid(61001, 61001, 61001); print('ready', flush=True); sys.stdin.read()", SECRET
        )
    ) as victim:
        code = f'become(); w = publish("e.0", pid="{victim.pid}"); live()'
        with process(code, shared) as evil:
            text = content(capture(request(shared, "evil", NOBODY), captures))
    assert SECRET not in text
    assert f"pid {evil.pid}" in text


@needs_root
def test_another_users_process_that_holds_the_lock_is_neither_read_nor_signaled(shared: Path, captures: Path) -> None:
    forged = f"""
descriptor = os.memfd_create("rankscope-stacks")
def caught(*_):
    os.write(descriptor, b"signaled")
signal.signal({int(SIGNAL)}, caught)
writer = publish("e.0", stacks={{"signal": {int(SIGNAL)}, "descriptor": descriptor}})
os.chown(directory / "e.0.rank", user, user)
print("ready", flush=True)
sys.stdin.read()
"""
    with process(forged, shared) as victim:
        text = content(capture(request(shared, "evil", NOBODY), captures))
        answers = [one for one in Path(f"/proc/{victim.pid}/fd").iterdir() if "rankscope-stacks" in str(one.readlink())]
        assert [one.stat().st_size for one in answers] == [0]
    assert "belongs to another user than the record" in text
    assert "command: " not in text


@needs_root
def test_records_of_other_users_and_runs_are_not_in_a_capture(shared: Path, captures: Path) -> None:
    with (
        process('become(); w = publish("a.0", run="evil"); live()', shared),
        process('become(); w = publish("b.0", run="other"); live()', shared),
        process('become(); w = publish("c.0", run="evil"); live()', shared, VICTIM) as victim,
    ):
        folder = capture(request(shared, "evil", NOBODY), captures)
    figures = json.loads((folder / "capture.json").read_text())
    assert figures["ranks"] == 1
    assert f"pid {victim.pid}" not in content(folder)


@needs_root
def test_a_link_with_the_name_of_a_record_is_not_followed(shared: Path, captures: Path) -> None:
    with living_rank(captures.parent, "secret", run="evil"):
        (shared / "e.0.rank").symlink_to(next(captures.parent.glob("*.rank")))
        folder = capture(request(shared, "evil", os.geteuid()), captures)
    assert json.loads((folder / "capture.json").read_text())["ranks"] == 0


@needs_root
def test_the_owner_may_read_the_capture_and_change_nothing_and_no_other_user_may_enter_it(
    shared: Path, captures: Path
) -> None:
    with process('become(); w = publish("e.0"); live()', shared):
        folder = capture(request(shared, "evil", NOBODY), captures)
    if not json.loads((folder / "capture.json").read_text())["owner_may_read"]:
        pytest.skip("this file system has no access control lists")
    code = """
import os, sys
user, folder = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
def can(action):
    try: action()
    except PermissionError: return 0
    return 1
report = f"{folder}/report.html"
print(can(lambda: open(report).read()), can(lambda: open(report, "a")), can(lambda: os.unlink(report)),
      can(lambda: open(f"{folder}/new", "w")), can(lambda: os.listdir(os.path.dirname(folder))))
"""
    allowed = {
        user: subprocess.run([*map(str, python(code, user, folder))], capture_output=True, text=True, check=True).stdout
        for user in (NOBODY, VICTIM)
    }
    assert allowed == {NOBODY: "1 0 0 0 0\n", VICTIM: "0 0 0 0 0\n"}


@needs_root
def test_names_and_arguments_cannot_leave_the_directory_or_the_page(shared: Path, captures: Path) -> None:
    run = "../../../tmp/x\n</title><script>alert(1)</script>\x1b[2J"
    code = f"""
become()
import ctypes
ctypes.CDLL(None).prctl(15, b"<b>\\x1b[2J", 0, 0, 0)
w = publish("e.0", run={run!r}, node="<img src=x>", phases=["<u>"])
live()
"""
    with process(code, shared):
        folder = capture(request(shared, run, NOBODY), captures)
    assert folder.parent == captures
    assert [one.name for one in captures.iterdir()] == [folder.name]
    page = (folder / "report.html").read_text()
    assert not {"<script", "<img", "<b>", "<u>"} & {page[at : at + 7] for at in range(len(page))}
    assert "<script" not in page
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert all(line.isprintable() for path in folder.glob("*.txt") for line in path.read_text().split("\n"))


@needs_root
def test_a_full_disk_leaves_nothing_and_is_named(shared: Path, captures: Path) -> None:
    job = {"directory": str(captures), "stacks": "none", "bytes": 2**30, "days": 1.0}
    with process('become(); w = publish("e.0"); live()', shared):
        job["request"] = request(shared, "evil", NOBODY).as_json()
        done = subprocess.run(
            [sys.executable, "-m", "rankscope_exporter.capture"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)),
        )
    assert json.loads(done.stdout)["reason"] == "no_space"
    assert [*captures.iterdir()] == []


@needs_root
def test_256_ranks_that_never_answer_take_a_bounded_time(
    shared: Path, captures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "STACKS_WITHIN", 2.0)
    code = f"""
signal.signal({int(SIGNAL)}, lambda *_: None)
become()
descriptor = os.memfd_create("rankscope-stacks")
answer = {{"signal": {int(SIGNAL)}, "descriptor": descriptor}}
writers = [publish(f"e.{{rank}}", rank=str(rank), world_size="300", stacks=answer) for rank in range(300)]
live()
"""
    directory = os.open(captures, os.O_RDONLY)
    with process(code, shared):
        figures = capturing.capture(request(shared, "evil", NOBODY), directory, "hook")
    os.close(directory)
    asked = [line for line in content(captures / figures["name"]).splitlines() if "no answer within" in line]
    assert figures["ranks"] == 256
    assert "the other ranks took 2 s" in content(captures / figures["name"])
    assert 0 < len(asked) < 10
    assert figures["bytes"] <= 9 * 2**20


@needs_root
def test_a_process_with_endless_arguments_and_threads_is_cut_off(shared: Path, captures: Path) -> None:
    code = """
import threading, time
for _ in range(200):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
become()
w = publish("e.0")
live()
"""
    with process(code + "#" + "x" * 100_000, shared):
        folder = capture(request(shared, "evil", NOBODY), captures)
    text = (folder / "processes.txt").read_text()
    assert text.count("\nthread ") <= 64
    assert len(text) < 200_000


@needs_root
def test_the_exporter_believes_no_pid_of_a_record(shared: Path) -> None:
    with process('become(); w = publish("e.0", pid="1"); live()', shared) as evil:
        (rank,) = RunDirectory([shared]).scan().ranks
    assert rank.snapshot.lock_pid == evil.pid
