"""Attack: a lock for reading on somebody else's record, which is to keep a killed rank alive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attacks.ranks.ranks_support import BECOME, MALLORY, VICTIM, clock, kill, living, need_root

from rankscope_exporter.ranks.run_directory import RunDirectory

# By process (lockf) or by open file (F_OFD_SETLK), for reading or, where that is refused, not at all.
IMPORTS = "import fcntl, struct"
LOCK = """
descriptor = os.open(sys.argv[2], os.O_RDONLY)
if sys.argv[3] == "process":
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
else:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def reading(path: Path, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user that waits with a lock for reading."""
    command = [sys.executable, "-c", IMPORTS + BECOME + LOCK, str(MALLORY), str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process


def test_whoever_reads_a_record_does_not_keep_its_rank_alive(run_dir: Path) -> None:
    need_root()
    directory = RunDirectory([run_dir], clock)
    for kind in ("process", "file"):
        with living(run_dir, VICTIM, kind, run=kind) as victim:
            kill(victim)
        with reading(run_dir / f"{kind}.rank", kind):
            (rank,) = (rank for rank in directory.scan().ranks if rank.key[0] == kind)
        assert not rank.snapshot.alive
        assert rank.snapshot.lock_pid == 0
        assert rank.snapshot.exit_reason == "killed"
