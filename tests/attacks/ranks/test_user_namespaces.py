"""Attack: records from a user namespace, in which a user is root or has many uids."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.attacks.ranks.ranks_support import as_user, clock, ended, living
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.ranks.run_directory import RunDirectory

UNSHARED = subprocess.run([*as_user(MALLORY), "unshare", "--user", "true"], capture_output=True, check=False)
pytestmark = [
    needs_root,
    pytest.mark.skipif(
        UNSHARED.returncode != 0, reason="did not run: users cannot create user namespaces on this machine"
    ),
]
# Become root of a user namespace that maps only this user, like unshare(1). The process first makes itself dumpable,
# because a process that has changed its uid does not own its /proc entries.
UNSHARE = """
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
uid = os.getuid()
assert not libc.unshare(0x10000000)  # CLONE_NEWUSER
Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
assert os.getuid() == 0
"""


def test_root_of_a_user_namespace_is_the_user_who_created_it(run_dir: Path) -> None:
    with living(run_dir, MALLORY, "inside", run="inside", before=UNSHARE):
        (rank,) = RunDirectory([run_dir], clock).scan().ranks
    assert rank.key == ("inside", "0", str(MALLORY))
    assert rank.snapshot.lock_pid > 0


@pytest.mark.parametrize(("before", "is_known"), [(UNSHARE, True), ("", False)])
def test_a_process_is_known_if_the_records_owner_is_its_user_inside_or_outside_of_its_namespace(
    run_dir: Path, before: str, *, is_known: bool
) -> None:
    """The owner is the user inside on an idmapped mount. Another user's record does not describe the process."""
    with living(run_dir, MALLORY, "inside", before=before):
        os.chown(run_dir / "inside.rank", 0, 0)
        (rank,) = RunDirectory([run_dir], clock).scan().ranks
    assert rank.snapshot.alive
    assert bool(rank.snapshot.lock_pid) == is_known


def test_an_exporter_in_a_user_namespace_sees_all_unmapped_users_as_one(run_dir: Path) -> None:
    """They are 65534, so runs with the same name of two users are mixed. The exporter should run outside."""
    ended(run_dir, VICTIM, "mine", run="mine")
    ended(run_dir, MALLORY, "forged", run="forged")
    run_dir.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from rankscope_exporter.ranks.run_directory import RunDirectory\n"
        "print(sorted(rank.key for rank in RunDirectory([Path(sys.argv[1])], lambda: 1.7e9).scan().ranks))"
    )
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code, str(run_dir)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    assert answer.stdout.strip() == str([("forged", "0", "65534"), ("mine", "0", "65534")]), answer.stderr
