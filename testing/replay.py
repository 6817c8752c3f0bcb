"""Replay recordings of the gauntlet in promtool at production speed: a recorded second is one scrape interval.

Counters grow at the recorded rate, a time ten seconds ago becomes 150 s ago, gauges keep their values, and absent
samples stay absent. The healthy part is repeated until the rules know the run's baseline, and the end of the recording
until the slowest rule has had its time. Before the onset and shortly before the end some scrapes fail.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any

from rankscope_exporter.simulation import simulated_uuid
from testing import promtool
from testing.promtool import PRODUCTION, Speed
from testing.recording import Recording, Values, is_counter, is_timestamp

REPEATED = 12  # scrapes at the end of a recording: the fault shows in every window
QUIET = 40  # scrapes before the onset: twice the window
FAULTY = 92  # scrapes after it: a low utilization must last for 15 minutes, and show in each of their windows
FAILED = 3  # scrapes in a row: as long as an exporter may take to restart (known_for)
AFTERWARDS = 3  # scrapes after the failed ones at the end
RARELY_READ = ("rankscope_gpu_nvlink_links_active", "rankscope_gpu_pcie_link_width")
READ_EVERY = 10  # scrapes of the recording; the exporter reads them every 10 s: at most two scrapes at other speeds
REPLAYED = 'alertstate="firing",alertname!="RankscopeManyAlerts"'
"""All alerts but the one about the number of the others: the recordings are runs of one owner at the same time."""
SLOW = {"RankscopeGpuMemoryHeldIdle": 130, "RankscopeCheckpointOverdue": 990}  # 10 and 20 minutes; 4 hours


def tests_of(recordings: Iterable[Recording]) -> list[dict[str, Any]]:
    """Return a test for recordings of equal length. promtool prints each alert that any of them has."""
    return [_test(group, faulty) for faulty, group in _by_length(recordings).items()]


def timed(recordings: Iterable[Recording], speed: Speed) -> list[dict[str, Any]]:
    """Return the same at any speed, without failed scrapes. promtool prints when each alert first fired, in seconds."""
    return [_timed(group, faulty, speed) for faulty, group in _by_length(recordings).items()]


def onset() -> int:
    """Return when the first scrape of `timed` that can show a fault is, in seconds: the same at any speed."""
    return QUIET * PRODUCTION.interval


def _by_length(recordings: Iterable[Recording]) -> dict[int, list[Recording]]:
    by_length: dict[int, list[Recording]] = defaultdict(list)
    for recording in recordings:
        by_length[SLOW.get(recording.expected.get("alertname", ""), FAULTY)].append(recording)
    return by_length


def _timed(recordings: list[Recording], faulty: int, speed: Speed) -> dict[str, Any]:
    quiet, faulty = (scrapes * PRODUCTION.interval // speed.interval for scrapes in (QUIET, faulty))
    last, every = (quiet + faulty - 1) * speed.interval, f"{speed.interval}s"
    first = f"min_over_time(timestamp(ALERTS{{{REPLAYED}}})[{last}s:{every}])"
    return {
        "interval": every,
        "input_series": [
            *({"series": f'up{{instance="{one.case}"}}', "values": f"1x{quiet + faulty}"} for one in recordings),
            *(line for one in recordings for line in series(one, faulty, speed, quiet)),
        ],
        "promql_expr_test": [{"expr": first, "eval_time": f"{last}s", "exp_samples": []}],
    }


def with_device_clock(recording: Recording) -> Recording:
    """Return the run as if its phases were measured on a device, in some steps, and its host ran ahead."""
    found = {name: dict(places) for name, places in recording.series.items()}
    host: dict[str, Values] = {}
    for name, places in recording.series.items():
        is_phase = promtool.is_measured_on_device(name)
        if is_phase:
            found[name.replace("phase_seconds", "device_seconds")] = found.pop(name)
            for place, values in places.items():
                host[place] = [_sum(*pair) for pair in zip(host.get(place, [0.0] * len(values)), values, strict=True)]
        if is_phase or name.startswith(promtool.MEASURED_TOO):
            measured = {place: [_part(value) for value in values] for place, values in places.items()}
            found[name.replace("phase_seconds", "device_seconds")] = measured
    if host:
        found['rankscope_rank_phase_seconds_total{phase="other"}'] = host
        found["rankscope_rank_device_steps_total{}"] = found["rankscope_rank_steps_total{}"]
    return replace(recording, series=found)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None else one + (other or 0.0)


def _part(value: float | None) -> float | None:
    return None if value is None else value * promtool.MEASURED


def _test(recordings: list[Recording], faulty: int) -> dict[str, Any]:
    last = QUIET + faulty - 1
    first_failed = last + 1 - AFTERWARDS - FAILED
    failed = {first + later for first in (QUIET // 2, first_failed) for later in range(FAILED)}
    answers = " ".join("0" if scrape in failed else "1" for scrape in range(last + 1))
    return {
        "interval": f"{PRODUCTION.interval}s",
        "input_series": [
            *({"series": f'up{{instance="{one.case}"}}', "values": answers} for one in recordings),
            *(_interrupted(line, failed) for one in recordings for line in series(one, faulty)),
        ],
        "promql_expr_test": [
            _question("before", 0, QUIET - 1),
            _question("after", QUIET, last),
            *(_question(str(scrape - first_failed), scrape, scrape) for scrape in range(first_failed - 1, last + 1)),
        ],
    }


def _interrupted(line: dict[str, str], failed: set[int]) -> dict[str, str]:
    """Mark the samples of failed scrapes as stale, as Prometheus does."""
    values = enumerate(line["values"].split(" "))
    return {**line, "values": " ".join("stale" if scrape in failed else value for scrape, value in values)}


def _question(when: str, first: int, last: int) -> dict[str, Any]:
    """Ask for all alerts from one scrape to another, with a label that says when."""
    fired = f"max_over_time(ALERTS{{{REPLAYED}}}[{(last - first) * PRODUCTION.interval + 1}s])"
    expression = f'label_replace({fired}, "when", "{when}", "", "")'
    return {"expr": expression, "eval_time": f"{last * PRODUCTION.interval}s", "exp_samples": []}


def series(
    recording: Recording, faulty: int, speed: Speed = PRODUCTION, quiet: int = QUIET
) -> Iterator[dict[str, str]]:
    """Yield promtool's input for one recording, with labels that no other recording in the test has."""
    order = _order(recording, faulty, quiet)
    for name, places in recording.series.items():
        for place, values in places.items():
            if name.startswith(RARELY_READ):
                later = values[recording.healthy :]
                values = [*values[: recording.healthy], *later[READ_EVERY:], *later[-READ_EVERY:]]
            samples = _notation(_replayed(name, values, order, speed.interval))
            yield {"series": _placed(name, place, recording.case), "values": " ".join(samples)}


def _order(recording: Recording, faulty: int, quiet: int) -> list[int]:
    """Return the number of the recorded scrape for each replayed one."""
    healthy, rest = range(1, recording.healthy), range(recording.healthy, recording.scrapes)
    before = islice(cycle(reversed(healthy)), quiet)
    after = islice(chain(rest, cycle(rest[-REPEATED:])), faulty)
    return [*reversed(list(before)), *after]


def _replayed(name: str, values: Values, order: list[int], interval: int) -> Iterator[float | None]:
    """Yield the replayed values of a series that was recorded at one scrape a second."""
    known, last = _known(values), None
    for scrape, like in enumerate(order):
        value, before = values[like], known[like - 1]
        if value is None:
            yield None
            continue
        if is_counter(name):
            if last is not None and before is not None and value >= before:
                last += interval * (value - before)
            else:  # a new process
                last = interval * value
        elif not is_timestamp(name):
            last = value
        elif last is None or value != before:
            last = interval * (scrape - like + value)
        yield last


def _notation(values: Iterable[float | None]) -> Iterator[str]:
    """Yield promtool's notation. A series that ends is marked as stale at once, as Prometheus does."""
    before = None
    for value in values:
        yield f"{value:.10g}" if value is not None else "_" if before is None else "stale"
        before = value


def _known(values: Values) -> Values:
    """Return the values, with the last known value where the series is absent."""
    known: Values = []
    for value in values:
        known.append(known[-1] if value is None and known else value)
    return known


def _placed(name: str, place: str, case: str) -> str:
    """Return the series with the labels that the recording leaves out; its run and node are named after the case."""
    metric, _, labels = name.rstrip("}").partition("{")
    belongs = {"job": "rankscope", "instance": case}
    if metric.startswith("rankscope_rank_"):
        belongs |= {"run": case, "rank": place}
    if metric.startswith("rankscope_gpu_"):
        belongs |= {"gpu": place, "uuid": f"{simulated_uuid(int(place))}/{case}"}
    if metric in ("rankscope_rank_info", "rankscope_gpu_info"):
        belongs |= {"node": case}
    pairs = [f'{label}="{value}"' for label, value in belongs.items()]
    pairs += [re.sub(r'(uuid="[^"]+)', rf"\1/{case}", labels)] if labels else []
    return f"{metric}{{{','.join(pairs)}}}"
