"""The status page says the same about GPUs as the alerts: at each moment of the rules' own tests, in the same words."""

from __future__ import annotations

import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from deploy.prometheus.shipped import RULES
from testing.families import family

from rankscope_exporter.diagnosis.words import ALERTS, GPUS
from rankscope_exporter.report.gpu_problems import GpuWatch
from rankscope_exporter.report.gpus import GpuProblem
from rankscope_exporter.report.values import Values

HERE = Path(__file__).parent
NAMES = [ALERTS[kind] for kind in GPUS]
STEP, LOOKBACK = 15.0, 300.0
KEPT = 180.0
"""Seconds for which the rules may bridge a gap after the page has ended: `keep_firing_for`, and ranges of a minute."""
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
STALE = object()
OVER = re.compile("works again|a process starts")
"""Cases in which the fault ends, while its alert lasts for some minutes more."""


class Series(NamedTuple):
    name: str
    labels: Mapping[str, str]
    samples: Sequence[object]
    interval: float

    def at(self, seconds: float) -> float | None:
        """Return the newest sample that a query at that time sees."""
        last = min(int(seconds / self.interval), len(self.samples) - 1)
        oldest = max(last - int(LOOKBACK / self.interval) + 1, 0)
        for number in range(last, oldest - 1, -1):
            sample = self.samples[number]
            is_seen = seconds - number * self.interval < LOOKBACK
            if sample is not None and is_seen:
                return None if sample is STALE else float(str(sample))
        return None


def seconds_of(text: str) -> float:
    return sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


def samples(text: str) -> Iterator[object]:
    """Yield the samples of promtool's notation, such as `0+15x40 stale _x3`."""
    for item in text.split():
        value, _, times = item.partition("x")
        if value == "stale":
            yield STALE
        elif value == "_":
            yield from [None] * int(times or 1)
        else:
            start, step = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?", value).groups()  # type: ignore[union-attr]
            yield from (float(start) + float(step or 0) * number for number in range(int(times or 0) + 1))


class Case(NamedTuple):
    name: str
    document: Mapping[str, Any]

    def series(self) -> list[Series]:
        interval = seconds_of(self.document["interval"])
        found = []
        for one in self.document["input_series"]:
            name, _, labels = one["series"].partition("{")
            found.append(
                Series(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), [*samples(one["values"])], interval)
            )
        return found


CASES = [
    Case(f"{alert}: {test['name']}", test)
    for alert in NAMES
    for test in yaml.safe_load((HERE / f"{alert}.test.yml").read_text())["tests"]
]


def runs(series: Sequence[Series], at: float) -> list[Any]:
    """Return the runs as in a report. A node's report has only the ranks that are on it; here it has all."""
    ranks: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    findings = defaultdict(list)
    for one in series:
        run, rank, value = (one.labels.get("run", ""), one.labels.get("owner", "")), one.labels.get("rank"), one.at(at)
        if not one.name.startswith("rankscope_rank_") or rank is None:
            if one.name == "rankscope_finding_ratio" and value is not None:
                findings[run].append(SimpleNamespace(kind=one.labels["kind"]))
                ranks[run]
            continue
        known = ranks[run][rank]
        known.setdefault("uuid", one.labels.get("uuid", ""))
        if one.name == "rankscope_rank_info" and value is None:
            known.update(ended="finished", ended_seconds=10.0)
        elif one.name == "rankscope_rank_phase_since_timestamp_seconds" and value is not None:
            known.update(phase=one.labels["phase"], phase_seconds=at - value)
        elif one.name == "rankscope_rank_last_progress_timestamp_seconds" and value is not None:
            known.update(stalled_seconds=at - value)
    usual = {"ended": None, "ended_seconds": None, "phase": None, "phase_seconds": None, "stalled_seconds": None}
    return [
        SimpleNamespace(
            run=run,
            owner=owner,
            findings=findings[run, owner],
            ranks=[
                SimpleNamespace(rank=int(number), **{**usual, **known, "is_alive": "ended" not in known})
                for number, known in of_run.items()
            ],
        )
        for (run, owner), of_run in ranks.items()
    ]


@cache
def page_of(number: int) -> Page:
    return Page(CASES[number])


class Page:
    """The GPUs on the status pages of all exporters during a test."""

    def __init__(self, case: Case) -> None:
        self.series = case.series()
        self.instances = sorted({one.labels.get("instance", "") for one in self.series})
        end = max(one.interval * len(one.samples) for one in self.series)
        self.times = [STEP * number for number in range(int(end / STEP))]
        self.shown = {
            (instance, at): problems for instance in self.instances for at, problems in self._watched(instance)
        }

    def clock(self, instance: str, at: float) -> float | None:
        """Return the exporter's clock; None while it does not answer."""
        own = (one for one in self.series if one.labels.get("instance", "") == instance)
        return next((one.at(at) for one in own if one.name == "rankscope_exporter_time_seconds"), at)

    def _watched(self, instance: str) -> Iterator[tuple[float, Sequence[GpuProblem]]]:
        own = [one for one in self.series if one.labels.get("instance", "") == instance]
        node = next((one.labels["node"] for one in own if one.labels.get("node")), instance)
        now = {"at": 0.0}
        watch = GpuWatch(lambda: values(own, now["at"]), node, lambda: self.clock(instance, now["at"]) or now["at"])
        for at in self.times:
            now["at"] = at
            found = watch.check(lambda: runs(self.series, now["at"]))
            yield at, [one for one in found if not one.remaining_seconds]


def values(series: Sequence[Series], at: float) -> Values:
    by_name: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for one in series:
        if (value := one.at(at)) is not None:
            by_name[one.name.removeprefix("rankscope_")].append((one.labels, value))
    names = {name: sorted({label for labels, _ in found for label in labels}) for name, found in by_name.items()}
    return Values(
        family(name, *(({label: labels.get(label, "") for label in names[name]}, value) for labels, value in found))
        for name, found in by_name.items()
    )


def key(one: GpuProblem) -> tuple[str, str, str]:
    xid = re.match(r"XID (\d+)", one.sentence)
    return ALERTS[one.kind], one.gpu, xid[1] if xid else ""


def expectations(page: Page) -> Iterator[dict[str, Any]]:
    """Yield what promtool has to find: each alert while the page shows it, and none while it has not for a while."""
    keys = {(instance, *key(one)) for (instance, _), found in page.shown.items() for one in found}
    training = {one.labels.get("instance") for one in page.series if one.labels.get("workload")}
    for instance, alert, gpu, xid in keys | {(name, alert, "", "") for name in page.instances for alert in NAMES}:
        last, since = -KEPT, math.inf
        for at in page.times:
            known = [key(one) if gpu else (ALERTS[one.kind], "", "") for one in page.shown[instance, at]]
            is_shown = (alert, gpu, xid) in known
            last = at if is_shown else last
            is_ended = at - last >= KEPT and instance not in training
            clock = page.clock(instance, at)
            if clock is None:
                continue
            since = min(since, clock) if is_shown else math.inf
            if is_ended or clock > since:  # at the limit itself, a rule with `>` does not alert yet
                labels = f'alertname="{alert}",alertstate="firing",instance="{instance}"'
                labels += f',gpu="{gpu}",xid="{xid}"' if gpu else ""
                yield {
                    "expr": f"count(ALERTS{{{labels}}}) > bool 0 or vector(0)",
                    "eval_time": f"{at:.0f}s",
                    "exp_samples": [{"labels": "{}", "value": int(is_shown)}],
                }


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
def test_the_page_shows_a_gpus_problem_exactly_while_the_rules_alert(number: int, tmp_path: Path) -> None:
    case, expected = CASES[number], [*expectations(page_of(number))]
    test = {name: case.document[name] for name in ("interval", "input_series")} | {"promql_expr_test": expected}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]


def test_every_alert_about_a_gpu_has_words_for_the_page() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    of_gpus = {
        rule["labels"]["kind"]: rule["alert"] for rule in rules if "gpu_" in rule.get("labels", {}).get("kind", "")
    }
    assert of_gpus == {kind: ALERTS[kind] for kind in GPUS}


def test_the_rules_own_tests_show_every_problem_on_the_page() -> None:
    shown = {
        (one.kind, one.cause)
        for number in range(len(CASES))
        for found in page_of(number).shown.values()
        for one in found
    }
    assert {kind for kind, _ in shown} == {*GPUS}
    assert {(kind, cause) for kind, of in GPUS.items() for cause in of["summary"] if cause} <= shown


def plain(text: str) -> str:
    """Return a text without numbers, units and names in parentheses, which the page and the alert write differently."""
    text = re.sub(r" \([^)]*\)", "", " ".join(text.split()))
    return re.sub(r"\d+m \d+s|\d[\d.]*(?: ?(?:[KMGT]i?B|min|s|m|h|d)\b)?", "N", text)


def test_the_page_has_the_words_of_the_alerts() -> None:
    compared = 0
    for number, case in enumerate(CASES):
        page = page_of(number)
        for test in case.document.get("alert_rule_test", ()):
            for alert in test["exp_alerts"]:
                labels, texts = alert["exp_labels"], alert["exp_annotations"]
                found = page.shown[labels["instance"], seconds_of(test["eval_time"])]
                wanted = (test["alertname"], labels.get("gpu", ""), labels.get("xid", ""))
                matching = [one for one in found if key(one) == wanted]
                if not matching and OVER.search(case.name):
                    continue  # the alert lasts for a few minutes longer than the fault
                (one,) = matching
                assert plain(one.sentence) == plain(texts["summary"])
                described = plain(texts["description"]).replace(" No rank was on it in the last hour.", "")
                assert plain(f"{one.evidence} {one.advice}") == described
                assert one.severity == labels["severity"]
                compared += 1
    assert compared
