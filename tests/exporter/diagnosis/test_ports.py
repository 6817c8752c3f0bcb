"""Faults of a node's network ports, and healthy ports that only look faulty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rankscope_exporter.diagnosis.ports import PortFault, PortReading, find_fault

FAST, SLOW = 50e9, 25e9
SECONDS = 60.0
IDLE = PortReading(kind="CX7 InfiniBand", is_up=True, rate=FAST, received=0.0, transmitted=0.0, link_downs=0.0)
BUSY = replace(IDLE, received=4e12, transmitted=4e12)
NAMES = [f"mlx5_{number}" for number in range(4)]
UP = frozenset(NAMES)


def fault(**changed: Any) -> PortFault | None:
    """Return the fault if all ports are busy, and `mlx5_3` has these values after the window."""
    now = dict.fromkeys(NAMES, BUSY) | {"mlx5_3": replace(BUSY, **changed)}
    return find_fault(dict.fromkeys(NAMES, IDLE), now, SECONDS, UP)


def test_healthy_ports_have_no_fault() -> None:
    assert fault() is None


def test_a_port_with_half_the_rate_of_its_peers_is_faulty() -> None:
    assert fault(rate=SLOW) == ("mlx5_3", "rate", 0.5)


def test_a_storage_adapter_may_be_slower() -> None:
    assert fault(rate=SLOW, received=1e11, transmitted=1e11) is None


def test_an_adapter_of_another_board_may_be_slower() -> None:
    assert fault(rate=SLOW, kind="CX6 Ethernet") is None


def test_the_slower_of_two_ports_is_faulty() -> None:
    now = {"mlx5_0": BUSY, "mlx5_1": replace(BUSY, rate=SLOW)}
    assert find_fault(dict.fromkeys(now, IDLE), now, SECONDS) == ("mlx5_1", "rate", 0.5)


def test_a_single_port_has_no_peers() -> None:
    now = {"mlx5_0": replace(BUSY, rate=SLOW)}
    assert find_fault({"mlx5_0": IDLE}, now, SECONDS) is None


def test_idle_ports_are_not_compared() -> None:
    now = dict.fromkeys(NAMES, IDLE) | {"mlx5_3": replace(IDLE, rate=SLOW)}
    assert find_fault(dict.fromkeys(NAMES, IDLE), now, SECONDS, UP) is None


def test_a_link_that_went_down_is_a_fault() -> None:
    assert fault(link_downs=3.0) == ("mlx5_3", "down", 3.0)


def test_a_port_that_is_down_is_a_fault() -> None:
    assert fault(is_up=False) == ("mlx5_3", "down", 1.0)


def test_a_port_that_was_never_up_is_not_in_use() -> None:
    now = dict.fromkeys(NAMES, BUSY) | {"mlx5_3": replace(IDLE, is_up=False, rate=SLOW)}
    assert find_fault(dict.fromkeys(NAMES, IDLE), now, SECONDS, UP - {"mlx5_3"}) is None


@pytest.mark.parametrize("error", ["symbol_error", "local_ack_timeout_err"])
def test_errors_that_its_peers_do_not_have_are_a_fault(error) -> None:
    assert fault(errors={error: 1200.0}) is None, "unknown at the start of the window"
    before = dict.fromkeys(NAMES, replace(IDLE, errors={error: 5000.0}))
    now = dict.fromkeys(NAMES, replace(BUSY, errors={error: 5030.0}))
    assert find_fault(before, now, SECONDS, UP) is None
    now["mlx5_3"] = replace(BUSY, errors={error: 6200.0})
    assert find_fault(before, now, SECONDS, UP) == ("mlx5_3", "errors", 20.0)


def test_errors_that_all_ports_have_are_not_a_fault() -> None:
    before = dict.fromkeys(NAMES, replace(IDLE, errors={"symbol_error": 0.0}))
    now = dict.fromkeys(NAMES, replace(BUSY, errors={"symbol_error": 6000.0}))
    assert find_fault(before, now, SECONDS, UP) is None


def test_out_of_order_packets_are_not_errors() -> None:
    before = dict.fromkeys(NAMES, replace(IDLE, errors={"out_of_sequence": 0.0}))
    now = dict.fromkeys(NAMES, BUSY) | {"mlx5_3": replace(BUSY, errors={"out_of_sequence": 1e9})}
    assert find_fault(before, now, SECONDS, UP) is None


def dropped(direction: str, packets: float, of: float) -> PortFault | None:
    before = PortReading(received=0.0, transmitted=0.0, drops={direction: 7.0})
    now = PortReading(received=of - packets, transmitted=of - packets, drops={direction: 7.0 + packets})
    return find_fault({"eth0": before}, {"eth0": now}, SECONDS)


@pytest.mark.parametrize("direction", ["receive", "transmit"])
def test_dropped_packets_are_a_fault(direction) -> None:
    assert dropped(direction, 5e4, of=5e6) == ("eth0", "drops", 0.01)
    assert dropped(direction, 5e2, of=5e6) is None, "one in ten thousand"
    assert dropped(direction, 60.0, of=600.0) is None, "one per second, of unknown protocols"


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    now = dict.fromkeys(NAMES, replace(BUSY, link_downs=2.0))
    before = dict.fromkeys(NAMES, replace(IDLE, link_downs=9.0, received=9e18))
    assert find_fault(before, now, SECONDS, UP) == ("mlx5_0", "down", 2.0)


def test_a_new_port_is_not_judged() -> None:
    assert find_fault({}, {"mlx5_0": replace(BUSY, link_downs=9.0)}, SECONDS) is None
