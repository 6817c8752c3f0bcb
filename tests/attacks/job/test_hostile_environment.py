"""An attack or a mistake: environment variables with invalid values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.attacks.job.jobs import FOR_EACH, run_job, train
from tests.attacks.users import VICTIM, needs_root

import rankscope
from rankscope.process import identity
from rankscope_exporter.ranks.run_directory import RunDirectory

IN_EACH_DIRECTORY = f"""
{FOR_EACH}
def live(directory):
    os.environ["RANKSCOPE_RUN_DIR"] = directory
    step()
    step()
    print("trained", flush=True)

for_each(os.environ["CASES"].split(":"), live)
"""
NONSENSE = ["none", "-1", "1.5", "9" * 5000, "../../x", "\x1b[2J", "\udcff", "٣"]


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    if warned := getattr(sys.modules.get("rankscope.process.environment"), "_warned", None):
        warned.clear()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def labels(run_dir: Path) -> dict[str, str]:
    """Return the labels of the only rank that the exporter shows."""
    scan = RunDirectory([run_dir]).scan()
    assert not scan.skipped
    (rank,) = scan.ranks
    return rank.snapshot.info


@pytest.mark.usefixtures("guest")
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb\x1b[2J\x9b\u202e", "a?b?[2J??"),
        ("\udcff\udc80", "??"),
        ("x" * 130_000, "x" * 128),
        ("ü" * 128, "ü" * 128),
    ],
)
def test_a_run_has_a_printable_name_whatever_the_variable_holds(
    run_dir: Path, name: str, shown: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN", name)
    expected = train()
    rankscope.instrument()
    assert train() == expected
    assert labels(run_dir)["run"] == shown
    assert len(caplog.messages) == (name != shown)
    assert all(message.startswith("rankscope: RANKSCOPE_RUN ") and message.isprintable() for message in caplog.messages)
    assert len(caplog.text) < 400


@pytest.mark.usefixtures("guest")
@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", NONSENSE, ids=range(len(NONSENSE)))
def test_a_rank_with_an_invalid_number_is_shown_and_one_warning_names_the_variable(
    run_dir: Path, variable: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN", "job")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    monkeypatch.setenv(variable, value)
    expected = train()
    rankscope.instrument()
    assert train() == expected
    shown = labels(run_dir)
    assert [shown[name] for name in ("rank", "world_size", "local_rank", "uuid")] == ["0", "1", "0", "GPU-aa"]
    (message,) = caplog.messages
    assert message.startswith(f"rankscope: {variable} is not a number")
    assert message.isprintable()
    assert len(message) < 200


def test_a_long_name_of_a_slurm_job_does_not_displace_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKSCOPE_RUN", raising=False)
    monkeypatch.setenv("SLURM_JOB_NAME", "x" * 200)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert identity.run_name().endswith("x-77")
    assert len(identity.run_name()) == identity.RUN_NAME_LIMIT


@pytest.mark.usefixtures("guest")
@pytest.mark.parametrize("devices", ["GPU-" + "x" * 100_000, "GPU-a\nb", "GPU-\udcff"])
def test_an_invalid_gpu_is_not_named(run_dir: Path, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    rankscope.instrument()
    train()
    assert labels(run_dir)["uuid"] == ""


def a_file(path: Path) -> Path:
    path.touch()
    return path


def a_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def a_name_too_long(path: Path) -> Path:
    return path.with_name("x" * 5000)


def a_thousand_nested_directories(path: Path) -> Path:
    return Path(f"{path}{'/x' * 1500}")


def a_name_that_clears_the_screen(path: Path) -> Path:
    return a_file(path.with_name("\x1b[2J\n")) / "x"


def a_name_that_is_not_utf8(path: Path) -> Path:
    return a_file(path.with_name("\udcff")) / "x"


def a_link_to_nothing(path: Path) -> Path:
    path.symlink_to(path.with_name("nothing"))
    return path


@pytest.mark.usefixtures("guest")
@pytest.mark.parametrize(
    "what",
    [
        a_file,
        a_pipe,
        a_name_too_long,
        a_thousand_nested_directories,
        a_name_that_clears_the_screen,
        a_name_that_is_not_utf8,
        a_link_to_nothing,
    ],
)
def test_an_unusable_run_directory_causes_one_warning_that_names_the_variable(
    run_dir: Path, what: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(what(run_dir / "named")))
    expected = train()
    rankscope.instrument()
    assert train() == expected
    (message,) = caplog.messages
    assert message.startswith("rankscope: cannot record this rank; training continues: RANKSCOPE_RUN_DIR: ")
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.usefixtures("guest")
def test_a_run_directory_with_a_name_that_is_not_utf8_is_used(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = run_dir / "\udcff\n"
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(named))
    monkeypatch.setenv("RANKSCOPE_QUIET", "0")
    rankscope.instrument()
    train()
    assert labels(named)
    assert caplog.messages == []


@needs_root
def test_a_run_directory_without_permission_causes_one_warning_that_names_the_variable(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    closed = run_dir / "closed"
    closed.mkdir(0o700)
    done = run_job(IN_EACH_DIRECTORY, run_dir, VICTIM, CASES=f"{closed}:{closed}/below:{run_dir}")
    assert (done.returncode, done.stdout) == (0, "trained\n" * 3)
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all("training continues: RANKSCOPE_RUN_DIR: [Errno 13]" in line for line in lines)


@needs_root
def test_a_run_directory_that_may_not_be_listed_gets_the_record(run_dir: Path) -> None:
    run_dir.chmod(0o1733)  # so that users do not see each other's runs
    done = run_job("step()", run_dir, VICTIM)
    assert (done.returncode, done.stderr) == (0, "")
    assert labels(run_dir)["run"] == "job"


def test_a_job_with_only_invalid_variables_trains_and_is_shown(run_dir: Path) -> None:
    nonsense = b"\xff\n\x1b[2J" + b"x" * 1000
    variables = ("RANKSCOPE_RUN", "RANKSCOPE_QUIET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    environment: dict[str, str | bytes] = {**dict.fromkeys(variables, nonsense), "RANKSCOPE": "1"}
    done = run_job("step(); step(); print('trained')", run_dir, 0, **environment)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert all(line.isprintable() for line in done.stderr.splitlines())
    warned = [line.split()[1] for line in done.stderr.splitlines() if " is " in line]
    assert sorted(warned) == ["LOCAL_RANK", "RANK", "RANKSCOPE_RUN", "WORLD_SIZE"]
    assert labels(run_dir)["run"].startswith("???[2Jxxx")
