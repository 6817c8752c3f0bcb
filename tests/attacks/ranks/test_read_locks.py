"""Attack: a read lock on another user's record, to keep a killed rank alive."""

from __future__ import annotations

from pathlib import Path

from testing.programs import python, running
from tests.attacks.ranks.ranks_support import clock, living
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.ranks.run_directory import RunDirectory

pytestmark = needs_root
# A lock of the process (lockf) or of the open file (F_OFD_SETLK).
LOCK = """
import fcntl, os, struct, sys
from testing.users import become
become(int(sys.argv[1]))
descriptor = os.open(sys.argv[2], os.O_RDONLY)
if sys.argv[3] == "process":
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
else:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_read_lock_does_not_keep_a_rank_alive(run_dir: Path) -> None:
    directory = RunDirectory([run_dir], clock)
    for kind in ("process", "file"):
        with living(run_dir, VICTIM, kind, run=kind) as victim:
            victim.end()
        with running(*python(LOCK, MALLORY, run_dir / f"{kind}.rank", kind)):
            (rank,) = (rank for rank in directory.scan().ranks if rank.key[0] == kind)
        assert not rank.snapshot.alive
        assert rank.snapshot.lock_pid == 0
        assert rank.snapshot.exit_reason == "killed"
