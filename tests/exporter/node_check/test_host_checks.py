"""The checks of the node: shared memory, limits, clock, disk and ports."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.sysfs import interface, port, write

from rankscope_exporter.node_check.host_checks import Host, check_host, read_host
from rankscope_exporter.node_check.result import Result

MIB, GIB = 2**20, 2**30
HEALTHY = Host(64 * GIB, 1024, -1, is_synchronized=True, disk=("/tmp", 50 * GIB, 1000))


def host(**values: object) -> Host:
    return Host(**{**vars(HEALTHY), **values})  # type: ignore[arg-type]


def found(one: Host, ranks: int = 8, workers: int | None = None) -> dict[str, Result]:
    """Return the results that are neither ok nor not run."""
    return {r.check: r for r in check_host(one, ranks, workers) if r.outcome not in ("ok", "not_run")}


@pytest.mark.parametrize(
    ("one", "job", "expected"),
    [
        (HEALTHY, {}, {}),
        (Host(), {}, {}),
        (host(shared_memory=64 * MIB), {}, {"shared_memory": "failed"}),  # Docker's default
        (host(shared_memory=64 * MIB), {"ranks": 1}, {}),
        (host(shared_memory=64 * MIB), {"ranks": 1, "workers": 16}, {"shared_memory": "failed"}),
        (host(shared_memory=900 * MIB), {}, {"shared_memory": "warning"}),
        (host(descriptors=256), {}, {"file_descriptors": "failed"}),
        (host(descriptors=-1), {}, {}),
        (host(descriptors=256, is_prolog=True), {}, {}),  # the job has limits of its own
        (host(is_synchronized=False), {}, {"clock_synchronization": "warning"}),
        (host(disk=("/scratch", MIB, 9)), {}, {"temporary_files": "failed"}),
        (host(disk=("/scratch", 512 * MIB, 9)), {}, {"temporary_files": "warning"}),
        (host(disk=("/scratch", GIB, 0)), {}, {"temporary_files": "failed"}),
    ],
)
def test_what_a_job_lacks_fails_or_warns_and_what_is_unknown_does_not(
    one: Host, job: dict[str, int], expected: dict[str, str]
) -> None:
    assert {check: result.outcome for check, result in found(one, **job).items()} == expected


def test_little_locked_memory_warns_only_with_an_adapter(tmp_path: Path) -> None:
    assert found(host(locked=65536)) == {}
    port(tmp_path, "mlx5_0")
    adapters = read_host({}, tmp_path).adapters
    assert set(found(host(locked=65536, adapters=adapters))) == {"locked_memory"}
    assert found(host(locked=-1, adapters=adapters)) == {}


def outcomes_of(root: Path) -> list[tuple[str, str]]:
    """Return outcome and text of the ports that are neither ok nor not run."""
    one = read_host({}, root)
    results = check_host(host(adapters=one.adapters, interfaces=one.interfaces), 8, None)
    wrong = [r for r in results if r.check == "ports" and r.outcome not in ("ok", "not_run")]
    return [(result.outcome, result.measured) for result in wrong]


def test_an_adapter_that_alone_is_down_fails(tmp_path: Path) -> None:
    for number in range(7):
        port(tmp_path, f"mlx5_{number}")
    assert outcomes_of(tmp_path) == []
    port(tmp_path, "mlx5_7", state="1: DOWN")
    assert outcomes_of(tmp_path) == [("failed", "mlx5_7 is down")]


def test_of_several_that_are_down_those_fail_that_had_a_link(tmp_path: Path) -> None:
    for number in range(6):
        port(tmp_path, f"mlx5_{number}")
    port(tmp_path, "mlx5_6", state="1: DOWN", downs=1)
    port(tmp_path, "mlx5_7", state="1: DOWN")
    assert outcomes_of(tmp_path) == [("failed", "mlx5_6 is down"), ("warning", "mlx5_7 is down")]


def test_an_adapter_that_is_slower_than_the_others_warns(tmp_path: Path) -> None:
    for number in range(7):
        port(tmp_path, f"mlx5_{number}")
    port(tmp_path, "mlx5_7", rate="100 Gb/sec (1X NDR)")
    assert outcomes_of(tmp_path) == [("warning", "mlx5_7 runs at 100 Gb/s")]


def test_a_port_without_a_cable_next_to_one_with_a_cable_is_no_fault(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN")
    assert outcomes_of(tmp_path) == []


def ethernet(root: Path, name: str, state: str, flags: str = "0x1003", links: int = 0) -> None:
    interface(root, name, operstate=state)
    directory = root / "class/net" / name
    files = {"flags": flags, "carrier_up_count": links, "carrier_down_count": links + 1}
    for file, text in {**files, "device/vendor": "0x1ae0", "device/device": "0x0042"}.items():
        write(directory / file, text)


def test_an_interface_that_had_a_link_fails_without_it(tmp_path: Path) -> None:
    for number in range(4):
        ethernet(tmp_path, f"eth{number}", "up", links=1)
    ethernet(tmp_path, "eth4", "down", flags="0x1002")  # an administrator has not enabled it
    assert outcomes_of(tmp_path) == []
    ethernet(tmp_path, "eth4", "down")  # without a cable
    assert outcomes_of(tmp_path) == []
    ethernet(tmp_path, "eth4", "down", links=1)
    assert outcomes_of(tmp_path) == [("failed", "eth4 is down")]


def test_this_node_is_read(tmp_path: Path) -> None:
    one = read_host({"TMPDIR": str(tmp_path)}, tmp_path)
    assert one.disk
    assert one.disk[0] == str(tmp_path)
    assert one.descriptors
    assert not one.is_prolog
    assert read_host({"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}, tmp_path).is_prolog
    assert read_host({"TMPDIR": "/nowhere"}, tmp_path, Path("/nowhere")).disk is None
