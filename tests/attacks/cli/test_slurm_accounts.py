"""The attack: a Slurm job whose account injects lines, fields, paths or commands into the prolog, in dash and bash.

Without accounting, Slurm accepts any text as an account.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.deploy.slurmd import SCRIPT, Slurmd


@pytest.fixture(params=["dash", "bash"])
def slurmd(request: pytest.FixtureRequest, tmp_path: Path) -> Slurmd:
    shell = shutil.which(request.param)
    assert shell, f"{request.param} is not installed"
    return Slurmd(tmp_path / "rankscope-slurm", shell)


ACCOUNTS = {
    r"x\n666 root": r"x\n666?root",
    "x\n666 root": "x?666?root",
    "x\r666 root": "x?666?root",
    "x\x0b666\x0c667\x1c668": "x?666?667?668",
    "x\x85666 root": "x??666?root",
    "x\u2028666 root": "x???666?root",
    "x user=root uid=0 sluid=s9G5M8BD1KND00": "x?user=root?uid=0?sluid=s9G5M8BD1KND00",
    "user=root": "user=root",
    r"x\0\c\e[2J\x1b[2J": r"x\0\c\e[2J\x1b[2J",
    "x\x1b]0;owned\x07": "x?]0;owned?",
    "$(touch owned) `touch owned` ; touch owned & | > owned": "$(touch?owned)?`touch?owned`?;?touch?owned?&?|?>?owned",
    "* ? [a-z]* ~ {a,b}": "*???[a-z]*?~?{a,b}",
    "'\"'\"' %s %n %d": "'\"'\"'?%s?%n?%d",
    "-n -e --help": "-n?-e?--help",
    "100 kB " + "x" * 100_000: "100?kB?" + "x" * 57,
}


@pytest.mark.parametrize("account", ACCOUNTS)
def test_an_account_is_one_field_of_one_line_and_ends_with_its_job(slurmd: Slurmd, account: str) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", ACCOUNT=account, GPUS="0")
    assert slurmd.jobs == {"0": [("7", "alice", ACCOUNTS[account])]}
    slurmd.runs("epilog", ID="7", USER="alice", GPUS="0")
    assert slurmd.jobs == {}
    assert not list(slurmd.directory.parent.rglob("owned"))


def test_a_long_account_hides_no_other_job_of_a_shared_gpu(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", ACCOUNT="train", GPUS="0")
    slurmd.runs("prolog", ID="8", USER="bob", ACCOUNT="x" * 100_000, GPUS="0")
    assert [job[0] for job in slurmd.jobs["0"]] == ["8", "7"]


def test_a_user_with_a_line_break_is_one_line(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="a\n666 root", ACCOUNT="train", GPUS="0")
    assert [job[0] for job in slurmd.jobs["0"]] == ["7"]


@pytest.mark.parametrize("number", [".*", "7\n666", "-e", "7 root x", "$(id)", "[0-9]*"])
def test_an_invalid_job_id_adds_and_removes_nothing(slurmd: Slurmd, number: str) -> None:
    slurmd.runs("prolog", ID="8", USER="bob", ACCOUNT="train", GPUS="0")
    for context in ("prolog", "epilog"):
        slurmd.runs(context, ID=number, USER="alice", GPUS="0")
    assert slurmd.jobs == {"0": [("8", "bob", "train")]}


@pytest.mark.parametrize("gpus", ["../owned", "/owned", "*", "-f", ".", "..", "0/../../owned", ".lock"])
def test_an_invalid_gpu_creates_no_file(slurmd: Slurmd, gpus: str) -> None:
    slurmd.runs("prolog", ID="8", USER="bob", ACCOUNT="train", GPUS="0")
    for context, files in (("prolog", ["0", "1"]), ("epilog", ["0"])):
        slurmd.runs(context, ID="7", USER="alice", GPUS=f"{gpus},1")
        made = {path.relative_to(slurmd.directory.parent).as_posix() for path in slurmd.directory.parent.rglob("*")}
        names = ["rankscope-slurm", "rankscope-slurm/.lock", *(f"rankscope-slurm/{name}" for name in files)]
        assert made == set(names)


def test_another_user_can_read_the_files_and_not_write_them(slurmd: Slurmd) -> None:
    command = ["sh", "-c", 'umask 077; exec "$0" "$@"', *slurmd.shell, str(SCRIPT)]
    environment = {"RANKSCOPE_SLURM_DIR": str(slurmd.directory), "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_USER": "alice", "SLURM_JOB_GPUS": "0"}
    subprocess.run(command, env=environment, check=True)
    assert [path.stat().st_mode & 0o777 for path in (slurmd.directory, slurmd.directory / "0")] == [0o755, 0o644]
