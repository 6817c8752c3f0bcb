"""The attack: records, saved states and answers of a Prometheus with values that no program writes.

They go through `rankscope report`, `rankscope hang` and `rankscope stacks`, which must end with 0 or 2 and print valid
JSON if asked for it.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from testing.judged_job import JudgedJob
from testing.simulated_job import lagging
from tests.exporter.job_report.test_queries import ANSWERS
from tests.exporter.ranks.test_fuzz import made
from validation.fuzz.explain import values

from rankscope.cli import rank_stacks, show_stacks
from rankscope.cli.explaining.answers import MalformedError, Sample, samples
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope.record import reader
from rankscope.record.layout import FIELDS, INDEX
from rankscope_exporter.hangs.command import show as hang
from rankscope_exporter.job_report import page, saved, slurm
from rankscope_exporter.job_report.command import ReportRequest, show
from rankscope_exporter.job_report.page import Prices
from rankscope_exporter.ranks.checks import LABELS

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 0.5, math.nan, math.inf, -math.inf, 1e308, 1e18, -1e18, 10**30, 10**400, "NaN", "9" * 500),
    *("", "x", "\x1b[2J", "\ud800", "²", "gloo", [], {}, [[]], ["0-1", 3], {"a": 1}, {"job_id": 3}),
    {"job_id": "x" * 300},
)
NUMBERS = ("NaN", "1e400", "-1", "0", "1e18", "-1e18", "0.5", "1e-300", "1700000000")
TEXTS = (*(odd for odd in ODD if isinstance(odd, str)), "9" * 4000, "x" * 4096, "straggler", "hang", "a,b")
INFO = (*LABELS, "phases", "groups", "group_descriptions", "pairwise", "slurm", "labels", "clocks", "boot_id", "stacks")
SLOTS = (0.0, 1.0, 3.5, 5.0, 1e9, 1.7e9, 1e18, 1e30, 1e59)
INPUTS = 300
FINDING = {"kind": "straggler", "cause": "other", "rank": "0", "group": "0-1", "node": "n", "value": "1000100"}
PROMETHEUS: Mapping[str, Sequence[Sample]] = {
    "count_values": [Sample("", {**FINDING, "severity": "warning"}, 1_003_000.0)],
    "rankscope_finding_": [Sample("rankscope_finding_peak_ratio", {"name": "lag"}, 0.4)],
    "rankscope_run_gpu_seconds": [Sample("", {"cause": cause, "node": "n"}, 50.0) for cause in ("none", "data")],
    **ANSWERS,
}


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_show", lambda _: "")


def replace_some(text: str, choose: random.Random) -> str:
    """Return a JSON document with up to two values replaced."""
    document = json.loads(text)
    for _ in range(choose.randint(0, 2)):
        holder, key = choose.choice([*values(document)])
        holder[key] = json.loads(json.dumps(choose.choice(ODD)))
    return json.dumps(document)


def check(run: Callable[[], int], capsys: pytest.CaptureFixture[str], *, is_json: bool = False) -> int:
    """Return the exit status of a command; check it and what the command prints."""
    status = run()
    out, err = capsys.readouterr()
    assert status in (0, 2)
    assert (status == 2) == (err != "")
    assert all(line.isprintable() for line in (out + err).splitlines())
    if is_json and not status:
        json.loads(out, parse_constant=pytest.fail)
    return status


def fuzz_state(run_dir: Path, state_dir: Path, capsys: pytest.CaptureFixture[str]) -> Counter[int]:
    job = JudgedJob(run_dir, state_dir=state_dir, slurm={"job_id": "4711"}).trained(40)
    job.train(40, lagging("optimizer"))
    job.poll(job.now, ended=range(4))
    texts = {path: path.read_text().splitlines() for path in state_dir.iterdir()}
    choose, outcome = random.Random(3), Counter[int]()
    for number in range(INPUTS):
        for path, lines in texts.items():
            path.write_text("\n".join(replace_some(line, choose) for line in lines))
        is_json = number % 2 == 0
        request = ReportRequest(state_dir=state_dir, is_json=is_json, prices=Prices(2.0, 0.3))
        outcome[check(lambda request=request: show(request), capsys, is_json=is_json)] += 1  # type: ignore[misc]
    return outcome


def test_no_saved_state_or_journal_breaks_the_report(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = fuzz_state(run_dir, tmp_path, capsys)
    assert min(outcome[0], outcome[2]) > INPUTS / 20


def test_the_fuzzer_detects_a_missing_check(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_number", float)
    with pytest.raises((ValueError, OverflowError, pytest.fail.Exception)):
        fuzz_state(run_dir, tmp_path, capsys)


@pytest.mark.parametrize("name", ["state-0.jsonl", "journal-0.jsonl"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"9" * 5000, b"NaN", b"\xff" * 5000, b'{"version":1,"accounts":3}']
)
def test_a_saved_file_of_other_content_is_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    assert check(lambda: show(ReportRequest(state_dir=tmp_path)), capsys) == 2


@pytest.mark.parametrize("name", ["state-0.jsonl", "journal-0.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "link"])
def test_a_saved_file_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    assert check(lambda: show(ReportRequest(state_dir=tmp_path)), capsys) == 2


def test_no_record_breaks_a_command(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, outcome = random.Random(3), Counter[str]()
    monkeypatch.setattr(reader, "is_running", lambda *_: True)
    monkeypatch.setattr(rank_stacks, "stacks", lambda *_, **__: "")
    commands: dict[str, Callable[[], int]] = {
        "hang": lambda: hang(None, None, [run_dir]),
        "stacks": lambda: show_stacks.show(None, None, run_dir, sys.stdout),
        "report": lambda: show(ReportRequest(run_dir=run_dir)),
    }
    for number in range(INPUTS):
        holder = None if number % 4 == 0 else os.getpid()
        monkeypatch.setattr(reader, "lock_holder", lambda _, holder=holder: holder)
        for rank in range(3):
            info: dict[str, Any] = {"rank": str(rank), "groups": ["0-2", "0-1"], "world_size": "3", "group": "0-2"}
            info |= {choose.choice(INFO): choose.choice(ODD) for _ in range(choose.randint(0, 2))}
            fields = [choose.choice([*FIELDS]) for _ in range(choose.randint(0, 4))]
            slots = {INDEX[name] + choose.randrange(FIELDS[name]): choose.choice(SLOTS) for name in fields}
            slots.pop(INDEX["info_place"], None)
            (run_dir / f"r.{rank}.rank").write_bytes(made(info, {INDEX["group_collectives"]: 5.0, **slots}))
        outcome.update(name for name, run in commands.items() if check(run, capsys) == 0)
    assert min(outcome[name] for name in commands) > INPUTS / 4


def damaged(found: Sequence[Sample], choose: random.Random) -> list[Sample]:
    """Return an answer of a Prometheus with some values and labels replaced."""
    result: list[dict[str, Any]] = [
        {"metric": {**one.labels, "__name__": one.name}, "value": [0, repr(one.value)]} for one in found
    ]
    for series in result:
        if choose.random() < 0.15:
            series["value"][1] = choose.choice(NUMBERS)
        if choose.random() < 0.15:
            series["metric"][choose.choice([*series["metric"], "cause", "rank"])] = choose.choice(TEXTS)
    return samples({"result": choose.choices((result, []), (9, 1))[0]})


def test_no_answer_of_a_prometheus_breaks_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    choose, outcome = random.Random(3), Counter[int]()

    class DamagedPrometheus:
        url = "http://prometheus"

        def query(self, expression: str, *needed: str) -> list[Sample]:
            found = next((found for part, found in PROMETHEUS.items() if re.search(part, expression)), ())
            try:
                answer = damaged(found, choose)
            except MalformedError as error:
                raise PrometheusError("malformed") from error
            if any(name not in sample.labels for sample in answer for name in needed):
                raise PrometheusError("malformed")
            return answer

    for number in range(INPUTS):
        is_json = number % 2 == 0
        request = ReportRequest("train", url="http://prometheus", is_json=is_json, prices=Prices(2.0, 0.3))
        run = lambda request=request: show(request, lambda *_: cast(Prometheus, DamagedPrometheus()))  # noqa: E731
        outcome[check(run, capsys, is_json=is_json)] += 1
    assert min(outcome[0], outcome[2]) > INPUTS / 20


@pytest.mark.parametrize("unix", [-1e18, -1.0, 1e18, 2.0**200])
def test_a_time_outside_the_calendar_is_shown_as_its_begin_or_end(unix: float) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", page._moment(unix))
