"""The checks of the node: shared memory, limits, clock, disk and ports."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.sysfs import interface, port, write

from rankscope_exporter.node_check.host_checks import Host, check_host, read_host
from rankscope_exporter.node_check.result import Result

GIB = 2**30
HEALTHY = Host(64 * GIB, 1024, -1, is_synchronized=True, disk=("/tmp", 50 * GIB, 1000))


def host(**values: object) -> Host:
    return Host(**{**vars(HEALTHY), **values})  # type: ignore[arg-type]


def found(one: Host, ranks: int = 8, workers: int | None = None) -> dict[str, Result]:
    """Return the results that are neither ok nor not run."""
    return {r.check: r for r in check_host(one, ranks, workers) if r.outcome not in ("ok", "not_run")}


def test_a_healthy_node_has_no_result_that_is_wrong() -> None:
    assert found(HEALTHY) == {}


def test_what_is_unknown_fails_nothing() -> None:
    assert found(Host()) == {}


def test_shared_memory_must_do_for_ranks_and_workers() -> None:
    assert found(host(shared_memory=64 * 2**20))["shared_memory"].outcome == "failed"  # Docker's default
    assert found(host(shared_memory=64 * 2**20), ranks=1) == {}
    assert found(host(shared_memory=64 * 2**20), ranks=1, workers=16)["shared_memory"].outcome == "failed"
    assert found(host(shared_memory=900 * 2**20))["shared_memory"].outcome == "warning"


def test_few_descriptors_fail_and_the_default_does_not() -> None:
    assert found(host(descriptors=256))["file_descriptors"].outcome == "failed"
    assert found(host(descriptors=-1)) == {}
    assert found(host(descriptors=256, is_prolog=True)) == {}  # the job has limits of its own


def test_little_locked_memory_warns_only_with_an_adapter(tmp_path: Path) -> None:
    assert found(host(locked=65536)) == {}
    port(tmp_path, "mlx5_0")
    adapters = read_host({}, tmp_path).adapters
    assert set(found(host(locked=65536, adapters=adapters))) == {"locked_memory"}
    assert found(host(locked=-1, adapters=adapters)) == {}


def test_a_clock_that_is_not_synchronized_warns() -> None:
    assert found(host(is_synchronized=False))["clock_synchronization"].outcome == "warning"


@pytest.mark.parametrize(
    ("free", "inodes", "outcome"), [(2**20, 9, "failed"), (2**29, 9, "warning"), (2**40, 0, "failed")]
)
def test_a_full_disk_fails(free: int, inodes: int, outcome: str) -> None:
    assert found(host(disk=("/scratch", free, inodes)))["temporary_files"].outcome == outcome


def ports_of(root: Path) -> dict[str, Result]:
    one = read_host({}, root)
    return found(host(adapters=one.adapters, interfaces=one.interfaces))


def test_a_port_that_alone_is_down_or_slow_fails(tmp_path: Path) -> None:
    for number in range(7):
        port(tmp_path, f"mlx5_{number}")
    assert ports_of(tmp_path) == {}
    port(tmp_path, "mlx5_7", state="1: DOWN")
    assert ports_of(tmp_path)["ports"].measured == "mlx5_7 is down"
    port(tmp_path, "mlx5_7", rate="100 Gb/sec (1X NDR)")
    assert ports_of(tmp_path)["ports"].measured == "mlx5_7 runs at 100 Gb/s"


def test_a_port_without_a_cable_next_to_one_with_a_cable_is_no_fault(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN")
    assert ports_of(tmp_path) == {}


def ethernet(root: Path, name: str, state: str, flags: str = "0x1003") -> None:
    interface(root, name)
    directory = root / "class/net" / name
    write(directory / "operstate", state)
    write(directory / "flags", flags)
    (directory / "device").mkdir(exist_ok=True)
    write(directory / "device/vendor", "0x1ae0")
    write(directory / "device/device", "0x0042")


def test_an_enabled_interface_that_alone_has_no_link_fails(tmp_path: Path) -> None:
    for number in range(4):
        ethernet(tmp_path, f"eth{number}", "up")
    ethernet(tmp_path, "eth4", "down", flags="0x1002")  # an administrator has not enabled it
    assert ports_of(tmp_path) == {}
    ethernet(tmp_path, "eth4", "down")
    assert ports_of(tmp_path)["ports"].measured == "eth4 is down"


def test_this_node_is_read(tmp_path: Path) -> None:
    one = read_host({"TMPDIR": str(tmp_path)}, tmp_path)
    assert one.disk
    assert one.disk[0] == str(tmp_path)
    assert one.descriptors
    assert not one.is_prolog
    assert read_host({"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}, tmp_path).is_prolog
    assert read_host({"TMPDIR": "/nowhere"}, tmp_path, Path("/nowhere")).disk is None
