"""The task prolog, the mail program and the controller's epilog, run like Slurm does, in dash and bash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from testing.waiting import eventually

SCRIPTS = Path(__file__).parents[2] / "deploy/slurm"
MAIL_PROG_TIMEOUT = 120  # seconds, in Slurm's src/slurmctld/agent.c
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1001"}


@pytest.fixture(params=["dash", "bash"])
def shell(request: pytest.FixtureRequest) -> str:
    found = shutil.which(request.param)
    assert found, f"{request.param} is not installed"
    return found


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    (tmp_path / "hook/rankscope").mkdir(parents=True)
    return tmp_path / "hook"


def task_prolog(shell: str, hook: Path, **variables: str) -> dict[str, str]:
    """Return the variables that it adds to the task's environment."""
    environment = {"PATH": os.environ["PATH"], "RANKSCOPE_HOOK": str(hook), **variables}
    done = subprocess.run(
        [shell, SCRIPTS / "task_prolog.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), "a task prolog that fails ends the task"
    lines = done.stdout.splitlines()
    assert all(line.startswith("export ") for line in lines)
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_a_task_with_a_gpu_is_watched(shell: str, hook: Path) -> None:
    assert task_prolog(shell, hook, SLURM_JOB_GPUS="0,1") == {"RANKSCOPE": "1", "PYTHONPATH": str(hook)}
    assert task_prolog(shell, hook, SLURM_STEP_GPUS="0")["RANKSCOPE"] == "1"


def test_the_users_own_packages_come_first(shell: str, hook: Path) -> None:
    found = task_prolog(shell, hook, SLURM_JOB_GPUS="0", PYTHONPATH="/home/alice/lib")
    assert found["PYTHONPATH"] == f"/home/alice/lib:{hook}"


@pytest.mark.parametrize("value", ["0", "", "1", "no"])
def test_a_value_that_the_user_has_set_is_not_changed(shell: str, hook: Path, value: str) -> None:
    assert task_prolog(shell, hook, SLURM_JOB_GPUS="0", RANKSCOPE=value) == {}


def test_a_task_without_a_gpu_is_not_changed(shell: str, hook: Path) -> None:
    assert task_prolog(shell, hook) == {}


def test_without_an_installed_hook_only_the_jobs_own_is_enabled(shell: str, tmp_path: Path) -> None:
    assert task_prolog(shell, tmp_path / "absent", SLURM_JOB_GPUS="0") == {"RANKSCOPE": "1"}


def test_a_line_break_in_a_path_adds_no_line(shell: str, hook: Path) -> None:
    found = task_prolog(shell, hook, SLURM_JOB_GPUS="0", PYTHONPATH="/a\nexport LD_PRELOAD=/b")
    assert found == {"RANKSCOPE": "1"}


def program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def configuration(directory: Path, report: str, *more: str) -> Path:
    """Write the content of /etc/default/rankscope-report on a cluster, and return its path."""
    mail = program(directory / "mail", f'printf "%s\\n" "$@" > {directory}/sent; cat >> {directory}/sent')
    command = program(directory / "report", f'echo "$@" > {directory}/asked', report)
    path = directory / "rankscope-report"
    path.write_text(f'REPORT="{command} --url http://prometheus:9090"\nMAIL={mail}\nWAIT=0\n' + "\n".join(more))
    return path


def mail(shell: str, directory: Path, report: str, *settings: str, **variables: str) -> str:
    """Return the arguments and the text that are mailed."""
    path = configuration(directory, report, *settings)
    environment = {"PATH": os.environ["PATH"], "RANKSCOPE_REPORT_CONFIG": str(path)}
    command = [shell, SCRIPTS / "mail.sh", "-s", "Slurm Job_id=7 Name=train Ended", "alice"]
    environment |= variables
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return (directory / "sent").read_text()


HEAD = "-s\nSlurm Job_id=7 Name=train Ended\nalice\n"


def test_the_mail_has_the_users_report(shell: str, tmp_path: Path) -> None:
    sent = mail(shell, tmp_path, "printf 'a report\\n%%s \\\\n\\n'", SLURM_JOB_MAIL_TYPE="Ended", **JOB)
    assert sent == HEAD + "a report\n%s \\n\n"
    assert (tmp_path / "asked").read_text() == "--url http://prometheus:9090 --slurm-job 7 --owner 1001\n"


# All values with which a job ends, and then all others (_mail_type_str in Slurm's src/slurmctld/agent.c).
ENDS = ("Ended", "Failed", "Reached time limit")
OTHERS = ("Began", "Requeued", "Invalid dependency", "StageOut/Teardown", "Reached 90% of time limit", "unknown")


@pytest.mark.parametrize("kind", [*ENDS, *OTHERS])
def test_a_mail_about_the_end_of_a_job_has_the_report(tmp_path: Path, kind: str) -> None:
    sent = mail("/bin/sh", tmp_path, "echo a report", SLURM_JOB_MAIL_TYPE=kind, **JOB)
    assert sent == HEAD + ("a report\n" if kind in ENDS else "")


def test_a_report_that_takes_too_long_does_not_delay_the_mail_until_slurm_kills_it(tmp_path: Path) -> None:
    text = (SCRIPTS / "mail.sh").read_text()
    seconds = {name: int(value) for name, value in re.findall(r"^(WAIT|LONGEST)=(\d+)", text, re.MULTILINE)}
    assert sum(seconds.values()) < MAIL_PROG_TIMEOUT
    assert mail("/bin/sh", tmp_path, "sleep 60", "LONGEST=0.1", SLURM_JOB_MAIL_TYPE="Ended", **JOB) == HEAD


@pytest.mark.parametrize("report", ["exit 2", "exit 1", "echo no such job >&2; exit 2"])
def test_without_a_report_the_mail_is_unchanged(shell: str, tmp_path: Path, report: str) -> None:
    assert mail(shell, tmp_path, report, SLURM_JOB_MAIL_TYPE="Ended", **JOB) == HEAD


@pytest.mark.parametrize("variables", [{}, {"SLURM_JOB_MAIL_TYPE": "Began", **JOB}, {"SLURM_JOB_MAIL_TYPE": "Ended"}])
def test_no_report_is_requested_before_the_job_has_ended(shell: str, tmp_path: Path, variables: dict[str, str]) -> None:
    assert mail(shell, tmp_path, "echo a report", **variables) == HEAD
    assert not (tmp_path / "asked").exists()


def epilog(shell: str, directory: Path, report: str, **variables: str) -> None:
    program(
        directory / "sacctmgr", f'printf "%s\\n" "$@" > {directory}/set.new; mv {directory}/set.new {directory}/set'
    )
    script = program(directory / "epilog", f"exec {shell} {SCRIPTS / 'job_report.sh'}")
    shutil.copy(SCRIPTS / "job_report.sh", script)
    path = f"{directory}:{os.environ['PATH']}"
    environment = {"PATH": path, "RANKSCOPE_REPORT_CONFIG": str(configuration(directory, report))}
    done = subprocess.run([script], env=environment | variables, capture_output=True, timeout=10, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), "a job waits for its epilog"


def test_the_epilog_stores_the_report_with_the_job(shell: str, tmp_path: Path) -> None:
    epilog(shell, tmp_path, 'echo \'{"useful":0.5, "x":"$(id)"}\'', **JOB)
    eventually((tmp_path / "set").exists)
    *command, comment = (tmp_path / "set").read_text().splitlines()
    assert command == ["--immediate", "modify", "job", "where", "jobid=7", "set"]
    assert comment == 'AdminComment={"useful":0.5, "x":"$(id)"}'


def test_without_a_report_the_epilog_changes_nothing(shell: str, tmp_path: Path) -> None:
    epilog(shell, tmp_path, "exit 2", **JOB)
    eventually((tmp_path / "asked").exists)
    assert not (tmp_path / "set").exists()
