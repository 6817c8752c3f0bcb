"""The attack: another user's records and processes make `rankscope stacks` print, obey or signal as root."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testing.records import living_rank
from testing.users import NOBODY
from tests.attacks.cli_support import BECOME, ask, process
from tests.attacks.users import needs_root

from rankscope.process.stack_dump import SIGNAL

# Catches the signal, and has the file for the answer.
ANSWERING = f"""
descriptor = os.memfd_create("rankscope-stacks")
answer = {{"signal": {int(SIGNAL)}, "descriptor": descriptor}}
"""
MIB = 1024**2
pytestmark = needs_root


def test_a_name_with_escapes_is_printed_escaped_and_with_its_user(shared: Path) -> None:
    code = r'become(); w = publish("e.0", run="\x1b]0;owned\x07\u202eevil\n=== run victim", groups=["\x9b2J"]); live()'
    with process(code, shared):
        answer = ask(shared)
    assert all(line.isprintable() for line in answer.stdout.split("\n"))
    assert r"=== run \x1b]0;owned\x07\u202eevil\n=== run victim, of user " in answer.stdout.splitlines()[1]


@pytest.mark.parametrize("rank", ['"9" * 5000', '"x"', '"²"', "7", "None", "[]"])
def test_an_invalid_rank_is_skipped_without_effect_on_others(shared: Path, rank: str) -> None:
    code = f"""
become()
writers = [publish("e.0", rank={rank}), publish("e.1", rank="1")]
live()
"""
    with process(code, shared):
        answer = ask(shared)
    assert answer.stderr == ""
    assert answer.stdout.count("=== run evil") == 1
    assert answer.returncode == 1


@pytest.mark.parametrize("names", ["run=['a']", "run=None", "stacks={'signal': 10**400, 'descriptor': 10**4000}"])
def test_a_record_with_wrong_types_causes_no_traceback(shared: Path, names: str) -> None:
    with process(f'become(); w = publish("e.0", {names}); live()', shared):
        answer = ask(shared)
    assert "Traceback" not in answer.stderr
    assert len(answer.stdout) < 2000


def test_an_endless_answer_is_cut_off(shared: Path) -> None:
    code = f"""
{ANSWERING}
def flood(*_):
    os.ftruncate(descriptor, 256 * {MIB})
signal.signal({int(SIGNAL)}, flood)
become()
os.close(descriptor)
descriptor = os.memfd_create("rankscope-stacks")
answer["descriptor"] = descriptor
writer = publish("e.0", stacks=answer)
live()
"""
    with process(code, shared):
        answer = ask(shared)
    assert len(answer.stdout) < 5 * MIB
    assert f"(cut off after {MIB} bytes)" in answer.stdout


@pytest.mark.parametrize("kind", ["/dev/zero", "root's file", "a file of the name"])
def test_only_the_ranks_own_memory_file_is_read(shared: Path, kind: str, tmp_path: Path) -> None:
    if kind == "a file of the name":
        made = 'os.open(directory / "memfd:rankscope-stacks", os.O_RDWR | os.O_CREAT)'
    else:
        made = 'os.memfd_create("rankscope-stacks")' if kind == "root's file" else 'os.open("/dev/zero", os.O_RDWR)'
    code = f"""
descriptor = {made}
def flood(*_):
    os.write(descriptor, b"taken for an answer")
signal.signal({int(SIGNAL)}, flood)
become()
writer = publish("e.0", stacks={{"signal": {int(SIGNAL)}, "descriptor": descriptor}})
live()
"""
    with process(code, shared):
        answer = ask(shared)
    assert "taken for an answer" not in answer.stdout
    assert "no longer has the file" in answer.stdout


def test_another_users_process_that_holds_the_lock_gets_no_signal(shared: Path) -> None:
    forged = f"""
{ANSWERING}
def caught(*_):
    os.write(descriptor, b"signaled")
signal.signal({int(SIGNAL)}, caught)
writer = publish("e.0", stacks=answer)
os.chown(directory / "e.0.rank", user, user)
live()
"""
    with process(forged, shared):
        answer = ask(shared)
    assert "signaled" not in answer.stdout
    assert "belongs to another user than the record" in answer.stdout


def test_a_reader_that_locks_anothers_record_is_not_asked(shared: Path) -> None:
    with process('w = publish("v.0", run="victim"); live()', shared):
        pass  # it has ended, and its record stays
    reader = """
become()
descriptor = os.open(directory / "v.0.rank", os.O_RDONLY)
fcntl.lockf(descriptor, fcntl.LOCK_SH)
live()
"""
    with process(reader, shared):
        answer = ask(shared, path=str(Path(sys.executable).parent))
    assert "Python v3" not in answer.stdout  # py-spy's
    assert "no longer holds the record's lock" in answer.stdout or "no living rank" in answer.stderr


def test_an_unprivileged_user_cannot_ask_other_users_ranks(shared: Path) -> None:
    code = 'become(); rankscope.cli.launch.main(["stacks", f"--run-dir={directory}"])'
    with process('w = publish("v.0", run="victim\\x1b[2J"); live()', shared):
        command = [sys.executable, "-c", BECOME + code, str(shared), str(NOBODY)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert (
        answer.stderr == f"rankscope stacks: no living rank in {shared}; 1 of other users: run this as the job's user\n"
    )


def test_another_users_link_as_run_directory_is_not_followed(shared: Path) -> None:
    (shared / "real").mkdir()
    (shared / "link").symlink_to(shared / "real")
    os.lchown(shared / "link", NOBODY, NOBODY)
    with living_rank(shared / "real"):
        answer = ask(shared / "link")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "is a link that another user made" in answer.stderr


def test_entries_that_are_no_records_do_not_block(shared: Path) -> None:
    os.mkfifo(shared / "pipe.rank")
    (shared / "folder.rank").mkdir()
    (shared / "link.rank").symlink_to("/dev/zero")
    (shared / "empty.rank").touch()
    with (shared / "locked.rank").open("wb") as junk:
        junk.write(os.urandom(50_000))
        junk.flush()
        fcntl.lockf(junk, fcntl.LOCK_EX)
        answer = ask(shared)
    assert answer.stderr == f"rankscope stacks: no living rank in {shared}\n"
