"""Flags in the style of Prometheus exporters; an invalid one is reported in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rankscope_exporter.config import Config, parse, parse_address

COLLECTORS = {"load": "busy time", "ranks": "training ranks"}


def parsed(*arguments: str, **environment: str) -> Config:
    return parse(COLLECTORS, arguments, environment)


def test_defaults_enable_every_collector() -> None:
    config = parsed()
    assert (config.host, config.port) == ("", 10417)
    assert config.collectors == ("load", "ranks")
    assert config.simulate is None
    assert (config.slurm_dir, config.kubelet_socket, config.procfs) == (None, None, Path("/proc"))


def test_allocation_flags_set_the_slurm_directory_the_kubelet_socket_and_procfs() -> None:
    config = parsed(
        "--collector.allocation.slurm-dir=/a", "--collector.allocation.kubelet-socket=/b", "--path.procfs=/c"
    )
    assert (config.slurm_dir, config.kubelet_socket, config.procfs) == (Path("/a"), Path("/b"), Path("/c"))


def test_rank_users_are_names_or_uids(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed().users is None
    assert parsed("--collector.ranks.users=root,1002").users == {0, 1002}
    for users in ("no-such-user", "root,", "1" * 5000):
        with pytest.raises(SystemExit, match="2"):
            parsed(f"--collector.ranks.users={users}")
        assert "--collector.ranks.users: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "No such file or directory"), ("file", "Not a directory"), ("", "is not writable")],
)
def test_a_state_directory_that_cannot_be_used_is_refused_with_the_reason(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert parsed(f"--state-dir={tmp_path}").state_dir == tmp_path
    monkeypatch.setattr("os.access", lambda *_: False)  # also for root, who may write everywhere
    with pytest.raises(SystemExit, match="2"):
        parsed(f"--state-dir={tmp_path / name}")
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_runs_have_an_owner_by_default() -> None:
    assert parsed().has_owner
    assert not parsed("--collector.ranks.owner=none").has_owner


def test_a_collector_can_be_disabled() -> None:
    assert parsed("--no-collector.load").collectors == ("ranks",)


def test_a_costly_collector_is_off_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(COLLECTORS, [], {}, off={"load"}).collectors == ("ranks",)
    assert parse(COLLECTORS, ["--collector.load"], {}, off={"load"}).collectors == ("load", "ranks")
    with pytest.raises(SystemExit):
        parse(COLLECTORS, ["--help"], {}, off={"load"})
    assert "busy time; off by default" in capsys.readouterr().out


def test_dcgm_metrics_are_optional_and_need_the_gpu_collector(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"gpu": "what each GPU is"}
    assert not parse(known, [], {}).dcgm
    assert parse(known, ["--metrics.dcgm"], {}).dcgm
    with pytest.raises(SystemExit, match="2"):
        parse(known, ["--metrics.dcgm", "--no-collector.gpu"], {})
    assert "--metrics.dcgm: needs --collector.gpu" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--analyze.ca-file=ca.pem", "--analyze.basic-auth-file=password"])
def test_flags_of_the_analyzer_need_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--analyze=node-a", flag).analyze == ["node-a"]
    with pytest.raises(SystemExit, match="2"):
        parsed(flag)
    assert "need --analyze\n" in capsys.readouterr().err


def test_the_node_name_comes_from_the_flag_then_the_environment_then_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parsed("--node=a", RANKSCOPE_NODE="b").node == "a"
    assert parsed(RANKSCOPE_NODE=" b ").node == "b"
    assert parsed(RANKSCOPE_NODE=" ").node == parsed().node == socket.gethostname()
    with pytest.raises(SystemExit, match="2"):
        parsed("--node=a\nb")
    assert capsys.readouterr().err == "rankscope-exporter: --node: must be printable text of at most 200 characters\n"


def test_run_directories_come_from_flags_then_the_environment_then_the_defaults() -> None:
    environment = {"RANKSCOPE_RUN_DIR": "/c"}
    assert parsed("--run-dir=/a", "--run-dir=/b", **environment).run_dirs == (Path("/a"), Path("/b"))
    assert parsed(**environment).run_dirs == (Path("/c"),)
    assert parsed().run_dirs == (Path("/run/rankscope"), Path("/dev/shm/rankscope"))


@pytest.mark.parametrize(
    ("address", "host_and_port"),
    [
        (":9000", ("", 9000)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses_are_host_and_port(address: str, host_and_port: tuple[str, int]) -> None:
    assert parse_address(address) == host_and_port


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--web.listen-address=9000"], "--web.listen-address: '9000'"),
        (["--web.listen-address=:99999"], "--web.listen-address: ':99999'"),
        (["--log.level=loud"], "--log.level: invalid choice: 'loud'"),
        (["--no-collector.gpu"], "--no-collector.gpu"),
        (["--collector.ranks.owner=name"], "--collector.ranks.owner"),
        (["--run"], "--run"),
    ],
)
def test_an_invalid_flag_is_reported_in_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*arguments)
    message = capsys.readouterr().err
    assert caught.value.code == 2
    assert expected in message
    assert message.count("\n") == 1


def test_help_names_every_flag_and_collector(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    for part in (
        "--web.listen-address",
        "--run-dir",
        "--simulate",
        "--collector.allocation.slurm-dir",
        "--path.procfs",
        "--log.format",
        "--no-collector.ranks",
        "busy time",
    ):
        assert part in text
