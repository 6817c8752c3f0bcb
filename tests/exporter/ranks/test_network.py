"""The collector of network ports, with a sysfs of test files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from testing.sysfs import interface, port, write

from rankscope_exporter.diagnosis.ports import PortFault
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.rank import Scan

RATE = "400 Gb/sec (4X NDR)"


class Node:
    """A sysfs below `root`, and the collector with a clock that only `wait` advances."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        self.network = Network(root, lambda: self.now)

    def wait(self, seconds: float = 60.0) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the page's values after that time, by name and label values in the order of label names."""
        self.now += seconds
        return values(self.network.poll(Scan((), Counter())))


def values(families: list[Metric]) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for one in (sample for family in families for sample in family.samples):
        labels = tuple(one.labels[name] for name in sorted(one.labels))
        found.setdefault(one.name.removeprefix("rankscope_network_"), {})[labels] = one.value
    return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_node_without_adapters_has_no_series(node) -> None:
    assert node.wait() == {}
    assert node.network.fault is None


def test_an_infiniband_port_has_all_metrics(node) -> None:
    port(node.root, "mlx5_3", data=1_000, errors={"symbol_error": 4}, hardware={"local_ack_timeout_err": 2})
    assert node.wait() == {
        "port_up": {("mlx5_3",): 1.0},
        "port_rate_bytes_per_second": {("mlx5_3",): 50e9},
        "port_received_bytes_total": {("mlx5_3",): 4_000.0},
        "port_transmitted_bytes_total": {("mlx5_3",): 4_000.0},
        "port_link_downs_total": {("mlx5_3",): 0.0},
        "port_errors_total": {("symbol_error", "mlx5_3"): 4.0, ("local_ack_timeout_err", "mlx5_3"): 2.0},
    }


def test_an_adapter_with_two_ports_names_them(node) -> None:
    port(node.root, "mlx5_0", number=1)
    port(node.root, "mlx5_0", number=2, state="1: DOWN")
    assert node.wait()["port_up"] == {("mlx5_0/1",): 1.0, ("mlx5_0/2",): 0.0}


def test_an_adapter_without_the_usual_counters_shows_its_own(node) -> None:
    directory = port(node.root, "rdmap16s27", hardware={"rx_bytes": 70, "tx_bytes": 50, "retrans_pkts": 3})
    for counter in (directory / "counters").iterdir():
        counter.unlink()
    found = node.wait()
    assert found["port_received_bytes_total"] == {("rdmap16s27",): 70.0}
    assert found["port_transmitted_bytes_total"] == {("rdmap16s27",): 50.0}
    assert found["port_errors_total"] == {("retrans_pkts", "rdmap16s27"): 3.0}
    assert "port_link_downs_total" not in found


@pytest.mark.parametrize(
    ("received", "transmitted", "error"),
    [
        ("rx_bytes", "tx_bytes", "to_retransmits"),  # bnxt_re
        ("rx_bytes", "tx_bytes", "impaired_remote_conn_events"),  # efa
        ("rx_rdma_ucast_bytes", "tx_rdma_ucast_bytes", "tx_rdma_ack_timeout"),  # ionic
    ],
)
def test_the_counters_of_other_drivers_show_a_faulty_port(node, received, transmitted, error) -> None:
    def write_ports(data: int, errors: int) -> None:
        for number in range(4):
            own = {received: data, transmitted: data, error: errors if number == 2 else 0}
            for counter in (port(node.root, f"rdma{number}", hardware=own) / "counters").iterdir():
                counter.unlink()

    write_ports(7, 5)
    found = node.wait()
    assert found["port_received_bytes_total"]["rdma2",] == found["port_transmitted_bytes_total"]["rdma2",] == 7.0
    assert found["port_errors_total"][error, "rdma2"] == 5.0
    write_ports(10**12, 6005)
    node.wait()
    assert node.network.fault == PortFault("rdma2", "errors", 100.0)


@pytest.mark.parametrize("text", ["", "N/A (no PMA)", "-1", "12 34", "\udcff"])
def test_a_value_that_is_not_a_number_is_absent(node, text) -> None:
    directory = port(node.root, "mlx5_0")
    write(directory / "counters/port_rcv_data", text)
    write(directory / "rate", text)
    found = node.wait()
    assert "port_received_bytes_total" not in found
    assert "port_rate_bytes_per_second" not in found
    assert found["port_transmitted_bytes_total"] == {("mlx5_0",): 0.0}


def test_dropped_packets_of_an_interface_are_shown(node) -> None:
    interface(node.root, "eth0", rx_dropped=3, rx_missed_errors=4, tx_dropped=5)
    interface(node.root, "docker0", is_hardware=False)
    interface(node.root, "eth1", operstate="down")
    assert node.wait() == {"interface_dropped_packets_total": {("receive", "eth0"): 7.0, ("transmit", "eth0"): 5.0}}


def test_a_port_at_half_its_rate_is_the_fault(node) -> None:
    for number in range(4):
        port(node.root, f"mlx5_{number}")
    node.wait()
    for number in range(4):
        port(node.root, f"mlx5_{number}", data=10**12, rate="200 Gb/sec (2X NDR)" if number == 3 else RATE)
    node.wait()
    assert node.network.fault == PortFault("mlx5_3", "rate", 0.5)


def test_a_fault_is_cleared_a_minute_after_its_end(node) -> None:
    port(node.root, "mlx5_0")
    node.wait()
    port(node.root, "mlx5_0", state="1: DOWN", rate="2.5 Gb/sec (1X SDR)", downs=1)
    node.wait(5.0)
    assert node.network.fault == PortFault("mlx5_0", "down", 1.0)
    port(node.root, "mlx5_0", downs=1)
    node.wait(5.0)
    assert node.network.fault == PortFault("mlx5_0", "down", 1.0)
    node.wait(60.0)
    assert node.network.fault is None


def test_the_ports_are_not_read_at_each_poll(node) -> None:
    port(node.root, "mlx5_0")
    node.wait()
    port(node.root, "mlx5_0", data=1)
    assert node.wait(1.0)["port_received_bytes_total"] == {("mlx5_0",): 0.0}
    assert node.wait(4.0)["port_received_bytes_total"] == {("mlx5_0",): 4.0}


def test_an_adapter_that_is_removed_is_absent(node) -> None:
    directory = port(node.root, "mlx5_0")
    assert node.wait()
    directory.rename(node.root / "gone")
    assert node.wait() == {}
