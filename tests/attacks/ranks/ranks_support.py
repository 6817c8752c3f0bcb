"""What the attacks on ranks share: records of several users, living and ended, and what a scan shows of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.rank import Rank, Scan

VICTIM, MALLORY = 61_001, 61_002
NOW = 1_700_000_000.0

# Becomes another user. After the imports: an interpreter may lie in a home directory that nobody else may enter.
BECOME = """
import os, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
"""
# A rank that lives until its input ends; each line of that is another info.
IMPORTS = """
import ctypes, json, sys
from pathlib import Path
from rankscope.record.writer import RankWriter
from rankscope.record.layout import INDEX
"""
LIVING = """
writer = RankWriter()
writer.publish(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
for field, value in json.loads(sys.argv[5]).items():
    writer.slots[INDEX[field]] = value
print("published", flush=True)
for line in sys.stdin:
    writer.write_info(json.loads(line))
    print("written", flush=True)
"""


def need_root() -> None:
    """Skips the test where other users' files cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("did not run: it needs root, to be several users")


def as_user(uid: int) -> list[str]:
    """What makes a command another user's."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def info(**labels: Any) -> dict[str, Any]:
    """Of rank 0 of the run `train`, unless the labels say otherwise."""
    return {**dict.fromkeys(LABELS, ""), "run": "train", "rank": "0", "pid": "1", "phases": [], **labels}


@contextmanager
def living(
    directory: Path, uid: int, name: str, started: float = NOW - 100, before: str = "", **labels: Any
) -> Iterator[Any]:
    """A rank of that user that lives meanwhile; the value is its process. It runs the code `before` it begins."""
    directory.chmod(0o1777)
    command = [sys.executable, "-c", IMPORTS + BECOME + before + LIVING, str(uid), str(directory), name]
    arguments = [json.dumps(info(**labels)), json.dumps({"started_unix": started})]
    with subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line == b"refused\n":
            pytest.skip("did not run: this machine lets users make no user namespace")
        assert line == b"published\n"
        yield process


def ended(directory: Path, uid: int, name: str, at: float = NOW, **labels: Any) -> Path:
    """The record of a rank of that user which ended with an exception."""
    writer = RankWriter()
    writer.publish(directory, name, info(**labels))
    for field, value in {"started_unix": NOW - 100, "ended": layout.EXCEPTION, "ended_unix": at}.items():
        writer.slots[INDEX[field]] = value
    assert writer.path is not None
    path = writer.path
    writer.detach()
    os.chown(path, uid, uid)
    return path


def say(process: subprocess.Popen[bytes], **labels: Any) -> None:
    """Has a living rank replace what its record says of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(info(**labels)).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"written\n"


def kill(process: subprocess.Popen[bytes]) -> None:
    """As the kernel does when memory runs out."""
    process.kill()
    process.wait()


def owned(scan: Scan, owner: int) -> list[Rank]:
    """The ranks of one user that are shown."""
    return [rank for rank in scan.ranks if rank.owner == owner]


def clock() -> float:
    """The exporter's: just after all that ended."""
    return NOW + 1
