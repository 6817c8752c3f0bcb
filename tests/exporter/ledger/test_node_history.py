"""The history of a node's GPUs over weeks of runs: which GPU is often the culprit, and what never makes it one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.diagnosis.findings import Place
from rankscope_exporter.diagnosis.judged import Judged
from rankscope_exporter.diagnosis.ports import PortFault
from rankscope_exporter.diagnosis.readings import Counters, Ending, GpuCounters, GpuReading, RankReading
from rankscope_exporter.gpu.rank_gpus import GpuFaults, RankGpu
from rankscope_exporter.ledger import parts
from rankscope_exporter.ledger.account import Account
from rankscope_exporter.ledger.node_history import NodeHistory, Poll
from rankscope_exporter.ledger.owner_files import HISTORY_LIMIT, PARTS_LIMIT, OwnerFiles
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.recent import Moment

DAY = 86_400.0
NODE, OWNER, OTHER_OWNER = "node-a", "1000", "2000"
HOT, CAPPED = "hw_thermal_slowdown", "sw_power_cap"
NO_RANKS, NONE = Scan((), Counter()), Judged((), {})
THROTTLED, SLOW, LOADING = ("straggler", "throttled"), ("straggler", "backward"), ("straggler", "data_wait")


class Node:
    """A node with eight GPUs, and its clocks. Runs have all of them, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.uuids = [f"GPU-{index}" for index in range(8)]
        self.at, self.boot = 1000.0, 1.7e9
        self.throttled: Counter[tuple[str, str]] = Counter()
        self.faults: dict[str, GpuFaults] = {}
        self.reduced: set[str] = set()
        self.is_limit_lowered = False
        self.port_fault: PortFault | None = None
        self.runs = 0
        self.start()

    def start(self) -> None:
        """Start the exporter. One before it did not end by itself: it saves nothing more."""
        self.history = NodeHistory(OwnerFiles(self.directory), NODE)

    @property
    def unix(self) -> float:
        return self.boot + self.at

    def wait(self, seconds: float) -> None:
        self.at += seconds
        self.poll()

    def poll(self, *found: tuple[Account, Mapping[str, Any]], readings: Iterable[RankReading] = ()) -> None:
        gpus = {uuid: self._gpu(uuid) for uuid in self.uuids}
        by_run = {account.key: tuple(readings) for account, _ in found}
        look = Look(self.at, self.unix, NO_RANKS, by_run, NONE, {}, gpus, Moment(self.at, {}))
        faults = {uuid: GpuFaults(str(index)) for index, uuid in enumerate(self.uuids)} | self.faults
        self.history.update(Poll(look, found, gpus.keys() | faults.keys(), faults, self.port_fault))

    def _gpu(self, uuid: str) -> RankGpu:
        reading = GpuReading(
            str(self.uuids.index(uuid)),
            processes=1,
            is_link_reduced=uuid in self.reduced,
            is_power_limit_lowered=self.is_limit_lowered,
        )
        reasons = {reason: self.throttled[uuid, reason] for reason in (HOT, CAPPED)}
        return RankGpu(reading, GpuCounters(0.0, reasons))

    def account(self, name: str, owner: str = OWNER, began: float = 0.0) -> Account:
        """Return the account of a run that began then, by default now."""
        return Account(name, owner, began=began or self.unix, launched=began or self.unix)

    def found(
        self, finding: tuple[str, str], rank: int = 2, uuid: str = "", place: Mapping[str, Any] = {}
    ) -> dict[str, Any]:
        """Return an open finding about a rank, whose GPU by default has its number."""
        uuid = uuid or self.uuids[rank]
        named = Place(rank, "0-7", NODE, str(self.uuids.index(uuid)), uuid)._replace(**place)
        of_place = {**named._asdict(), "rank": named.rank_label}
        return {"kind": finding[0], "cause": finding[1], "begin": self.unix, "ratio": 0.3, **of_place}

    def run(
        self,
        finding: tuple[str, str],
        rank: int = 2,
        uuid: str = "",
        *,
        owner: str = OWNER,
        name: str = "",
        account: Account | None = None,
        hot: Iterable[tuple[str, str]] = (),
        seconds: int = 60,
        place: Mapping[str, Any] = {},
        readings: Sequence[RankReading] = (),
    ) -> None:
        """Run for a minute with this finding about a rank. `hot` has throttled GPUs, with their reasons."""
        self.runs += 1
        account = account or self.account(name or f"run-{self.runs}", owner)
        found = self.found(finding, rank, uuid, place)
        for _ in range(seconds // 5):
            self.at += 5.0
            for each in hot:
                self.throttled[each] += 4.0
            of_ranks = [self._reading(number, uuid if number == rank else "") for number in range(8)]
            self.poll((account, found), readings=readings or of_ranks)

    def _reading(self, rank: int, uuid: str = "") -> RankReading:
        uuid = uuid or self.uuids[rank]
        gpu = self._gpu(uuid)
        counters = Counters(gpu=gpu.counters)
        return RankReading(rank, self.at, 0.0, node=NODE, uuid=uuid, world_size=8, gpu=gpu.reading, counters=counters)

    @property
    def culprits(self) -> dict[str, int]:
        """The runs of the last week in which each GPU was the culprit, by index, without zeros."""
        self.wait(10.0)
        return {gpu: int(runs) for (gpu, _, _), runs in self.history.culprits.items() if runs}

    def saved(self) -> list[parts.Part]:
        self.history.save()
        return [*parts.read(self.directory)] if (self.directory / parts.FILE).exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def throttle(node: Node, rank: int = 2, reason: str = HOT, **options: Any) -> None:
    node.run(THROTTLED, rank, hot=[(node.uuids[rank], reason)], **options)


def test_a_gpu_that_is_throttled_in_three_runs_is_a_culprit_for_a_week(node: Node) -> None:
    for _ in range(3):
        throttle(node)
        node.wait(DAY)
    assert node.culprits == {"2": 3}
    node.wait(3 * DAY)
    assert node.culprits == {"2": 3}
    node.wait(1.5 * DAY)
    assert node.culprits == {"2": 2}
    node.wait(2 * DAY)
    assert node.culprits == {}
    assert {gpu for gpu, _, _ in node.history.culprits} == {*"01234567"}


def test_a_run_counts_once_however_often_it_has_the_finding(node: Node) -> None:
    account = node.account("long")
    for _ in range(4):
        node.throttled[node.uuids[2], HOT] += 3600.0
        node.wait(3600.0)
        throttle(node, account=account, seconds=30)
    assert node.culprits == {"2": 1}


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_more_work_for_one_rank_makes_no_gpu_a_culprit_whoever_runs_it(node: Node, rank: int) -> None:
    for user in range(6):
        node.run(SLOW, rank, owner=str(1000 + user))
    assert node.culprits == {}


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_a_crash_or_a_hang_does_not_blame_its_gpu_without_a_hardware_fault(node: Node, kind: str) -> None:
    for _ in range(4):
        node.run((kind, "killed"))
    assert node.culprits == {}


def test_a_gpu_at_its_default_power_limit_is_no_culprit(node: Node) -> None:
    for _ in range(3):
        throttle(node, 0, reason=CAPPED)
    assert node.culprits == {}
    node.is_limit_lowered = True
    node.wait(20.0)
    assert node.saved()[0].days == (), "what was at the default limit does not count later"
    for _ in range(3):
        throttle(node, 0, reason=CAPPED)
    assert node.culprits == {"0": 3}


def test_a_slow_gpu_is_a_culprit_if_it_is_slow_as_different_ranks(node: Node) -> None:
    for rank in (1, 4, 4, 5):
        node.run(SLOW, rank, uuid=node.uuids[4])
    assert node.culprits == {"4": 3}


def test_a_script_that_delays_any_rank_makes_no_gpu_a_culprit(node: Node) -> None:
    for rank in (1, 2, 3, 4, 5, 6):
        node.run(SLOW, rank)
        node.run(SLOW, rank, uuid=node.uuids[(rank + 3) % 8])
    assert node.culprits == {}


def test_a_slow_gpu_that_no_process_uses_is_no_culprit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = node._gpu
    monkeypatch.setattr(
        node, "_gpu", lambda uuid: of_gpu(uuid)._replace(reading=GpuReading(str(node.uuids.index(uuid)), processes=0))
    )
    for rank in (1, 4, 5):
        node.run(SLOW, rank, uuid=node.uuids[4])
    assert node.culprits == {}


def test_a_hardware_fault_of_the_gpu_makes_it_the_culprit_of_the_crash(node: Node) -> None:
    for count in (1, 2, 3):
        node.faults[node.uuids[5]] = GpuFaults("5", xids={79: count, 31: 10 * count})
        node.faults[node.uuids[6]] = GpuFaults("6", xids={31: count})
        node.run(("crash", "killed"), 5)
        node.run(("crash", "exception"), 6)
        node.wait(3600.0)
    assert node.culprits == {"5": 3}
    (part,) = (one for one in node.saved() if one.gpu == "5")
    assert part.days[0].events == {"xid 79": 3.0, "xid 31": 30.0}
    assert {one.evidence for one in part.incidents} == {"xid 79"}


def test_a_fault_that_is_over_explains_no_later_crash(node: Node) -> None:
    node.faults[node.uuids[5]] = GpuFaults("5", xids={79: 1}, uncorrected_errors=2.0)
    node.poll()
    node.wait(3600.0)
    for _ in range(3):
        node.run(("crash", "killed"), 5)
    assert node.culprits == {}


def test_memory_errors_and_lost_gpus_are_faults(node: Node) -> None:
    for count in (1, 2, 3):
        node.faults[node.uuids[1]] = GpuFaults("1", uncorrected_errors=float(count))
        node.poll()
        node.faults[node.uuids[1]] = GpuFaults("1", uncorrected_errors=float(count + 1))
        node.run(("crash", "exception"), 1)
        node.faults[node.uuids[3]] = GpuFaults("3", is_lost=True)
        for _ in range(20):
            node.wait(5.0)
        node.run(("hang", "collective_wait"), 3)
        node.faults[node.uuids[3]] = GpuFaults("3")
        node.wait(3600.0)
    assert node.culprits == {"1": 3, "3": 3}


def test_a_reduced_link_is_a_fault_unless_all_gpus_have_it(node: Node) -> None:
    node.reduced = {node.uuids[3]}
    for _ in range(3):
        node.run(("network", "link"), 3)
        node.run(("straggler", "h2d_copy"), 3, name=f"copies-{node.runs}")
    assert node.culprits == {"3": 6}
    node.reduced = {*node.uuids}
    node.wait(8 * DAY)
    for _ in range(3):
        node.run(("network", "link"), 0)
    assert node.culprits == {}


def test_a_port_has_its_own_history_and_makes_no_gpu_a_culprit(node: Node) -> None:
    node.port_fault = PortFault("mlx5_3", "errors", 50.0)
    for _ in range(3):
        node.run(("network", "link"), place={"rank": None, "gpu": "", "uuid": "", "port": "mlx5_3"})
    assert node.culprits == {}
    (port,) = (one for one in node.saved() if one.port)
    assert (port.node, port.port, len(port.incidents), port.uuid) == (NODE, "mlx5_3", 3, "")
    assert {one.evidence for one in port.incidents} == {"link"}
    assert port.days[0].events["port errors"] == pytest.approx(185.0, abs=10.0)


def test_a_node_that_is_throttled_as_a_whole_has_its_own_history(node: Node) -> None:
    others = Place(None, "0-15", NODE, ranks=(0, 1, 2), place=f"node {NODE}")
    node.run(THROTTLED, place=others._asdict())
    (part,) = (one for one in node.saved() if not (one.uuid or one.port))
    assert [one.cause for one in part.incidents] == ["throttled"]
    assert node.culprits == {}


@pytest.mark.parametrize(("reason", "runs"), [("finished", 2), ("killed", 1), ("sigterm", 1)])
def test_a_run_that_has_finished_and_starts_again_is_another_run(node: Node, reason: str, runs: int) -> None:
    account = Account("nightly", OWNER)
    for _ in range(2):
        began = node.at
        for second in range(60):
            node.at += 1.0
            node.throttled[node.uuids[2], HOT] += 1.0
            ending = Ending(reason, node.at) if second > 50 else None
            readings = [replace(node._reading(rank), began=began, ended=ending) for rank in range(8)]
            look = Look(node.at, node.unix, NO_RANKS, {account.key: readings}, NONE, {}, {}, Moment(node.at, {}))
            account.update(look, None)
            found = {**node.found(THROTTLED), "begin": 0.0}
            node.poll(*([(account, found)] if ending is None else []), readings=readings)
    assert node.culprits == {"2": runs}


def test_findings_about_several_throttled_gpus_count_against_each_of_them(node: Node) -> None:
    place = {"rank": None, "gpu": "", "uuid": "", "ranks": (2, 5)}
    for _ in range(3):
        node.run(THROTTLED, hot=[(node.uuids[2], HOT), (node.uuids[5], HOT)], place=place)
    assert node.culprits == {"2": 3, "5": 3}
    for _ in range(4):
        node.wait(10.0)
    throttle(node, 2, place=place)
    assert node.culprits == {"2": 4, "5": 3}, "the other one was not throttled this time"


def test_a_run_of_one_throttled_gpu_has_no_peer_and_blames_it(node: Node) -> None:
    for number in range(4):
        hot = [(node.uuids[4], HOT), (node.uuids[6], CAPPED)]
        reading = replace(node._reading(4 if number < 3 else 6), world_size=1)
        node.run(("throttling", ""), hot=hot, seconds=30, place=Place()._asdict(), readings=[reading])
    assert node.culprits == {"4": 3}


def test_throttling_of_all_gpus_is_the_nodes(node: Node) -> None:
    for uuid in node.uuids[1:]:
        node.throttled[uuid, HOT] += 1.0
    node.run(("throttling", ""), hot=[(uuid, HOT) for uuid in node.uuids[:2]], place=Place()._asdict())
    (part,) = (one for one in node.saved() if not (one.uuid or one.port))
    assert [(one.kind, one.evidence) for one in part.incidents] == [("throttling", "")], "most of them are not"
    assert node.culprits == {}


def test_a_restart_and_a_crash_of_the_exporter_lose_nothing(node: Node) -> None:
    throttle(node)
    throttle(node)
    node.history.save()
    node.start()
    throttle(node)
    node.start()
    assert node.culprits == {"2": 3}
    node.wait(6.5 * DAY)
    node.history.save()
    node.start()
    assert node.culprits == {"2": 3}
    node.wait(DAY)
    node.start()
    assert node.culprits == {}


def test_a_finding_that_is_open_during_a_restart_is_one_incident(node: Node) -> None:
    throttle(node, name="long")
    incidents = [one for part in node.saved() for one in part.incidents]
    assert [one.gpu_seconds for one in incidents] == [pytest.approx(0.3 * 7 * 60.0)]
    node.start()
    node.run(THROTTLED, account=node.account("long", began=float(incidents[0].start)), seconds=15)
    (again,) = (one for part in node.saved() for one in part.incidents)
    assert again.ended == node.unix
    assert again.evidence == "throttled"


def test_a_user_with_runs_without_end_displaces_no_history_of_others(node: Node) -> None:
    throttle(node, owner=OTHER_OWNER)
    throttle(node, owner=OTHER_OWNER)
    node.run(LOADING, owner=OTHER_OWNER, name="theirs")
    for number in range(3 * parts.INCIDENTS_LIMIT):
        node.run((["straggler", "hang", "crash"][number % 3], "data_wait"), owner=OWNER, seconds=5)
    for _ in range(2 * parts.INCIDENTS_LIMIT):
        throttle(node, owner=OWNER, seconds=20)
    (part,) = (one for one in node.saved() if one.gpu == "2")
    assert len(part.incidents) == parts.INCIDENTS_LIMIT
    assert sum(one.owner == OTHER_OWNER and one.is_blamed for one in part.incidents) == 2
    assert node.culprits["2"] == parts.INCIDENTS_LIMIT


def test_findings_of_one_user_do_not_displace_those_of_others(node: Node) -> None:
    node.run(LOADING, owner=OTHER_OWNER)
    for _ in range(2 * parts.INCIDENTS_LIMIT):
        node.run(LOADING, owner=OWNER, seconds=5)
    (part,) = node.saved()
    assert Counter(one.owner for one in part.incidents) == {OWNER: parts.INCIDENTS_LIMIT - 1, OTHER_OWNER: 1}


def test_evidence_that_comes_late_counts_in_a_full_history(node: Node) -> None:
    for number in range(parts.INCIDENTS_LIMIT + 1):
        throttle(node, owner=str(number), seconds=20)
    node.run(("crash", "killed"), 2, seconds=5, name="late", owner=OTHER_OWNER)
    assert OTHER_OWNER not in {one.owner for one in node.saved()[0].incidents}
    node.faults[node.uuids[2]] = GpuFaults("2", xids={79: 1})
    node.run(("crash", "killed"), 2, seconds=5, name="late", owner=OTHER_OWNER)
    assert OTHER_OWNER in {one.owner for one in node.saved()[0].incidents}


def test_the_file_is_bounded_whatever_users_and_drivers_do(node: Node) -> None:
    node.uuids = [f"GPU-{'f' * 32}-{index}" for index in range(16)]
    for number in range(10 * parts.INCIDENTS_LIMIT):
        name = f"{number}{chr(0x10000)}" * 100
        node.run(("straggler", name), number % 8, name=name, owner=f"{number}", seconds=5)
    for day in range(40):
        node.faults = {uuid: GpuFaults("0", xids=dict.fromkeys(range(99), day)) for uuid in node.uuids}
        node.wait(DAY)
    assert len(node.saved()) == len(node.uuids)
    assert (node.directory / parts.FILE).stat().st_size <= HISTORY_LIMIT
    node.uuids = [f"GPU-new-{index}" for index in range(2 * PARTS_LIMIT)]
    for uuid in node.uuids:
        node.faults = {uuid: GpuFaults("0", xids={31: 1})}
        node.poll()
    assert len(node.saved()) == PARTS_LIMIT


def test_a_rank_that_claims_a_gpu_of_no_driver_gets_no_history(node: Node) -> None:
    claimed = replace(node._reading(7), uuid="GPU-invented")
    node.run(SLOW, 7, place={"uuid": "GPU-invented"}, readings=[claimed])
    assert node.saved() == []


def test_a_replaced_gpu_has_no_past_and_a_moved_one_keeps_it(node: Node) -> None:
    for _ in range(3):
        throttle(node)
    sick = node.uuids[2]
    node.uuids[2] = "GPU-replacement"
    node.start()
    assert node.culprits == {}
    node.uuids[6], node.uuids[2] = sick, "GPU-6"
    assert node.culprits == {"6": 3}
    (part,) = (one for one in node.saved() if one.uuid == sick)
    assert {one.gpu for one in part.incidents} == {"2"}


@pytest.mark.parametrize("step", [-30 * DAY, -600.0, 600.0, 30 * DAY])
def test_setting_the_clock_neither_loses_nor_keeps_history(node: Node, step: float) -> None:
    for _ in range(3):
        throttle(node)
    node.boot += step
    assert node.culprits == {"2": 3}
    node.wait(6.5 * DAY)
    assert node.culprits == {"2": 3}
    node.wait(DAY)
    assert node.culprits == {}


@pytest.mark.parametrize("wrong", [-30 * 365 * DAY, 30 * 365 * DAY])
def test_a_node_that_boots_with_a_wrong_clock_keeps_its_history(node: Node, wrong: float) -> None:
    for _ in range(2):
        throttle(node)
    node.history.save()
    node.boot += wrong
    node.start()
    throttle(node)
    node.history.save()
    node.boot -= wrong
    assert node.culprits == {"2": 3}
    node.wait(8 * DAY)
    assert node.culprits == {}


def test_times_of_a_clock_that_was_ahead_and_is_right_after_a_restart_age(node: Node) -> None:
    node.boot += 365 * DAY
    for _ in range(3):
        throttle(node)
    node.history.save()
    node.boot -= 365 * DAY
    node.start()
    assert node.culprits == {"2": 3}
    for _ in range(3):
        node.wait(3600.0)
    node.wait(7 * DAY)
    assert node.culprits == {}


def test_history_is_kept_for_a_month_and_then_forgotten(node: Node) -> None:
    throttle(node)
    for _ in range(33):
        node.wait(DAY)
    assert [one.gpu for one in node.saved()] == ["2"]
    for _ in range(3):
        node.wait(DAY)
    assert node.saved() == []


def test_a_damaged_file_loses_only_its_damaged_lines(node: Node) -> None:
    throttle(node, 2)
    throttle(node, 3)
    node.history.save()
    path = node.directory / parts.FILE
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([b"{", first[:-30], b'{"version":1,"at":1,"part":7}', b"[]", second, b"\xff"]))
    node.start()
    assert len(node.culprits) == 1


def test_a_full_disk_is_logged_once_and_costs_no_history(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        throttle(node)
        throttle(node)
    assert [record.message for record in caplog.records if "history" in record.message] == [
        "cannot save the history of the GPUs error=[Errno 28] No space left on device"
    ]
    throttle(node)
    node.start()
    assert node.culprits == {"2": 3}


def test_without_a_state_directory_there_is_no_history() -> None:
    history = NodeHistory(None, NODE)
    look = Look(1.0, 2.0, NO_RANKS, {}, NONE, {}, {}, Moment(1.0, {}))
    history.update(Poll(look, (), ("GPU-0",), {"GPU-0": GpuFaults("0", xids={79: 1})}))
    history.save()
    assert history.culprits == {}
