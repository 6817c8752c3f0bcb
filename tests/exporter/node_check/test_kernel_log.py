"""XIDs in the kernel's log: whose GPU, how serious, and by whom written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rankscope_exporter import kernel_messages
from rankscope_exporter.node_check.kernel_log import LoggedXid, check_log, normalize, read_xids
from rankscope_exporter.node_check.readings import Facts

Read = Callable[..., list[LoggedXid]]
OURS = Facts(1, "GPU-1", bus_id="00000000:3B:00.0")
OTHER = Facts(2, "GPU-2", bus_id="00000000:5E:00.0")


def record(code: int, bus: str = "0000:3b:00", age: float = 60.0) -> str:
    message = f"NVRM: Xid (PCI:{bus}): {code}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    return f"4,1234,{round((time.monotonic() - age) * 1e6)},-;{message}\n SUBSYSTEM=pci\n"


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads the XIDs in records of /dev/kmsg."""

    def read(*records: str) -> list[LoggedXid]:
        (tmp_path / "kmsg").write_text("".join(records))
        found = read_xids(tmp_path / "kmsg")
        assert found is not None
        return found

    return read


def outcomes(xids: Sequence[LoggedXid], ours: Facts = OURS) -> list[tuple[str, int | None]]:
    found = check_log(xids, [ours], [ours, OTHER])
    return [(result.outcome, result.gpu) for result in found]


def test_a_hardware_xid_fails_unless_the_driver_asks_for_no_action(read: Read) -> None:
    assert outcomes(read(record(79))) == [("failed", 1)]
    known = Facts(1, "GPU-1", bus_id=OURS.bus_id, recovery_action="none")
    assert outcomes(read(record(79)), ours=known) == [("warning", 1)]
    assert outcomes(read(record(94))) == [("warning", 1)]


def test_the_last_event_of_a_code_counts_with_its_age(read: Read) -> None:
    (result,) = check_log(read(record(48, age=90.0), record(48)), [OURS], [OURS])
    assert result.measured.startswith("XID 48 60 s ago")


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_an_xid_of_a_program_is_no_fault(read: Read, code: int) -> None:
    assert outcomes(read(record(code))) == [("ok", None)]


def test_an_xid_of_a_gpu_that_is_not_checked_is_not_shown(read: Read) -> None:
    assert outcomes(read(record(79, bus="0000:5e:00"))) == []


def test_an_xid_where_the_driver_shows_no_gpu_warns(read: Read) -> None:
    assert outcomes(read(record(79, bus="0000:d8:00"))) == [("warning", None)]


@pytest.mark.parametrize("text", ["", "rubbish", "4,1;NVRM: Xid (PCI:0000:3b:00): 79", "4,1,x,-;NVRM: Xid (PCI:1): 79"])
def test_a_record_of_another_form_is_skipped(read: Read, text: str) -> None:
    assert read(text) == []


def test_addresses_are_compared_regardless_of_how_they_are_written() -> None:
    assert normalize("00000000:3B:00.0") == normalize("0000:3b:00") == "0:3b:0"


def test_a_log_that_cannot_be_read_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_messages, "_syslog", lambda: None)
    assert read_xids(Path("/nowhere")) is None
    (result,) = check_log(None, [OURS], [OURS])
    assert result.outcome == "not_run"
