"""`rankscope history`: the GPUs, ports and nodes to which something has happened, the worst first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli import launch
from rankscope_exporter.job_report.node_history import show, troubles
from rankscope_exporter.ledger import parts
from rankscope_exporter.ledger.parts import DAY, Day, Incident, Part

NOW = 1_764_000_000.0


def incident(days_ago: float, evidence: str = "throttled", run: str = "", owner: str = "1000", **more: str) -> Incident:
    began = NOW - days_ago * DAY - 600.0
    named = {"kind": "straggler", "cause": "throttled", "rank": "3", **more}
    run = run or f"run-{days_ago}"
    return Incident(
        run, owner, "", int(began), **named, node="node-a", gpu="3", began=began, ended=began + 600.0,
        gpu_seconds=3600.0, evidence=evidence,
    )  # fmt: skip


SICK = Part(
    "node-a", "3", "GPU-3",
    incidents=(incident(20.0), incident(2.0), incident(1.0), incident(0.5)),
    days=(Day(NOW - 20 * DAY, {"xid 31": 1.0}), Day(NOW - DAY, {"xid 79": 2.0, "throttled": 5400.0, "ecc": 1.0})),
)  # fmt: skip
SCRIPT = Part("node-a", "0", "GPU-0", incidents=(incident(1.0, "", "digits", cause="data_wait", rank="0"),))
PORT = Part("node-a", port="mlx5_3", days=(Day(NOW - DAY, {"port errors": 90.0}),))
QUIET = Part("node-a", "7", "GPU-7", incidents=(incident(30.0),))


def save(directory: Path, *found: Part) -> Path:
    (directory / parts.FILE).write_bytes(parts.text_of(found, NOW, 1 << 20))
    return directory


@pytest.fixture
def saved(state_dir: Path) -> Path:
    return save(state_dir, SCRIPT, PORT, QUIET, SICK)


def printed(directory: Path, capsys: pytest.CaptureFixture[str], days: float = 7.0) -> str:
    assert show(directory, days, is_json=False, now=NOW) == 0
    return capsys.readouterr().out


def test_the_worst_gpu_comes_first_with_what_happened_when_in_which_run(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(saved, capsys)
    assert text.index("GPU-3") < text.index("GPU-0")
    assert "node-a GPU 3 (GPU-3): culprit in 3 runs, 3 GPU-hours lost" in text
    assert "  uncorrected memory errors: 1, throttled for 90 min, XID 79: 2 events\n" in text
    words = "straggler (throttled) in run run-0.5 of uid 1000, rank 3, 1 GPU-hours lost; counts: throttled"
    assert words in " ".join(text.split())
    assert "run-20.0" not in text
    assert "XID 31" not in text
    assert "GPU-7" not in text


def test_a_script_is_listed_and_not_blamed_on_the_gpu(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(saved, capsys).split())
    assert "node-a GPU 0 (GPU-0): not a culprit" in text
    assert "straggler (data_wait) in run digits of uid 1000, rank 0, 1 GPU-hours lost; does not count" in text


def test_ports_are_listed_by_name(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "node-a port mlx5_3: not a culprit\n  errors for 90 s" in printed(saved, capsys)


def test_the_last_month_has_more(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(saved, capsys, 33.0)
    assert "culprit in 4 runs" in text
    assert "GPU-7" in text


def test_json_has_all_and_is_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(saved, 7.0, is_json=True, now=NOW) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [part["culprit_runs"] for part in found["parts"]] == [3, 0, 0]
    first = found["parts"][0]
    assert (first["node"], first["gpu"], first["uuid"], first["lost_gpu_seconds"]) == ("node-a", "3", "GPU-3", 10800.0)
    assert first["incidents"][0]["run"] == "run-0.5"
    assert first["incidents"][0]["ended"] == NOW - 0.5 * DAY
    assert first["events"] == {"xid 79": 2.0, "throttled": 5400.0, "ecc": 1.0}


def test_long_lists_are_cut_with_a_hint(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = [
        Part("node-a", str(index), f"GPU-{index}", incidents=tuple(incident(0.1 * n) for n in range(12)))
        for index in range(30)
    ]
    text = printed(save(state_dir, *many), capsys)
    assert text.count("  and 4 more; --json has all") == 20
    assert text.endswith("and 10 more; --json has all\n")


def test_names_that_users_choose_do_not_change_the_screen(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("node-a", "3", "GPU-3", incidents=(incident(1.0, run="\x1b[2Jrun\nGPU 7: culprit"),))
    text = printed(save(state_dir, part), capsys)
    assert "\x1b" not in text
    assert "\nGPU 7" not in text


def test_a_node_without_trouble_says_so(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state_dir / "journal-1000.jsonl").touch()
    assert printed(state_dir, capsys) == "Nothing happened to the GPUs, ports and nodes in the last 7 days.\n"


@pytest.mark.parametrize("damage", [b"\0" * 1000, b"{}\n", b'{"version":0,"at":1,"part":{}}\n'])
def test_a_damaged_file_is_not_a_node_without_trouble(
    state_dir: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    (state_dir / parts.FILE).write_bytes(damage)
    assert show(state_dir, 7.0, is_json=True) == 2
    assert "no entry can be read" in capsys.readouterr().err
    (state_dir / parts.FILE).write_bytes(b"")
    assert show(state_dir, 7.0, is_json=True) == 0


@pytest.mark.parametrize(("days", "path"), [(7.0, "missing"), (7.0, "."), (0.0, "."), (float("nan"), "."), (-1.0, ".")])
def test_what_is_missing_is_named(state_dir: Path, capsys: pytest.CaptureFixture[str], days: float, path: str) -> None:
    assert show(state_dir / path, days, is_json=False) == 2
    error = capsys.readouterr().err
    assert error.startswith("rankscope history: ")
    assert ("--days" in error) == (days != 7.0)
    assert "--url" not in error
    assert ("give the --state-dir" in error) == (days == 7.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_learns_why_it_cannot_be_read(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved.chmod(0o700)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(show(saved, 7.0, is_json=False))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "Permission denied" in capfd.readouterr().err


def test_the_command_line_has_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        launch.main(["history", "--state-dir", str(saved), "--days", "36500", "--json"])
    assert exited.value.code == 0
    assert len(json.loads(capsys.readouterr().out)["parts"]) == 4


def test_it_needs_no_package_of_the_exporter(saved: Path) -> None:
    """The command runs where only `rankscope` is installed."""
    blocked = ("pynvml", "prometheus_client", "pydantic", "fastapi", "rich")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from rankscope.cli.launch import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "history", "--state-dir", saved], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_events_of_the_day_in_which_the_time_begins_count() -> None:
    part = Part("n", "0", "GPU-0", days=(Day(NOW - 7.5 * DAY, {"xid 79": 1.0}),))
    assert [dict(one.events) for one in troubles([part], NOW - 7 * DAY)] == [{"xid 79": 1.0}]
