"""`rankscope report --url`: the queries to a Prometheus, and the report from its answers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from testing import servers

from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus
from rankscope_exporter.job_report import queries
from rankscope_exporter.job_report.job import NoJobError

BEGAN, ENDED = 1_000_000.0, 1_003_600.0
GPU = {"uuid": "GPU-a", "gpu": "0"}


def one(value: float, **labels: str) -> list[Sample]:
    return [Sample("", labels, value)]


def ranks(**labels: str) -> list[Sample]:
    return [
        Sample("", {"rank": rank, "node": "node-a", "uuid": "GPU-a", "user": "alice", **labels}, 1.0) for rank in "01"
    ]


ANSWERS: dict[str, Sequence[Sample]] = {
    r"last_over_time\(rankscope_gpu_allocation_info": one(
        1.0, run="train", owner="1000", slurm_job_name="large", slurm_account="physics", slurm_partition="gpu"
    ),
    r"group by \(run, owner\)": one(1.0, run="train", owner="1000"),
    r"last_over_time\(rankscope_rank_info": ranks(),
    r"min_over_time\(rankscope_rank_start": one(BEGAN),
    r"max_over_time\(rankscope_rank_exit": one(ENDED),
    r"last_progress": one(ENDED - 1.0),
    r"rankscope_rank_up": [],
    r"rankscope_run_gpu_seconds": [
        *one(4000.0, cause="none", node="node-a"),
        *one(3000.0, cause="data", node="node-a"),
        *one(200.0, cause="startup", node="node-a"),
    ],
    r"rate\(rankscope_gpu_busy": one(0.5, **GPU),
    r"increase\(rankscope_gpu_energy": one(3.6e6, **GPU),
}


class Server:
    """A Prometheus that answers a query by the first pattern that it contains, and other queries with no samples."""

    url = "http://prometheus"

    def __init__(self, answers: Mapping[str, Sequence[Sample]]) -> None:
        self._answers = answers
        self.asked: list[tuple[float | None, str]] = []

    def at(self, moment: float | None) -> Prometheus:
        asked = self.asked

        class Moment:
            url = self.url

            @staticmethod
            def query(expression: str, *_needed: str) -> list[Sample]:
                asked.append((moment, expression))
                return next((list(found) for part, found in self._answers.items() if re.search(part, expression)), [])

        return cast(Prometheus, Moment())


@pytest.fixture
def server() -> Callable[..., Server]:
    return lambda **changes: Server({**changes, **ANSWERS})


def test_the_causes_are_those_of_the_exporters_account(server) -> None:
    job = queries.job(server().at, "train", None, None)
    assert job.causes == {"none": 4000.0, "data": 3000.0, "startup": 200.0}
    assert (job.user, job.ranks, job.nodes) == ("alice", 2, ["node-a"])
    assert [(gpu.busy_ratio, gpu.joules) for gpu in job.gpus] == [(0.5, 3.6e6)]


def test_captures_of_all_nodes_are_listed_the_oldest_first(server) -> None:
    captures = [*one(200.0, node="b", path="/c/2"), *one(100.0, node="a", path="/c/1")]
    job = queries.job(server(rankscope_run_capture_timestamp_seconds=captures).at, "train", None, None)
    assert job.captures == ["a:/c/1", "b:/c/2"]


def test_the_time_without_an_account_is_unknown(server) -> None:
    job = queries.job(Server({**ANSWERS, r"rankscope_run_gpu_seconds": []}).at, "train", None, None)
    assert job.causes == {"unknown": 2 * (ENDED - BEGAN)}


def test_a_slurm_job_is_found_by_its_allocated_gpus(server) -> None:
    asked = server()
    job = queries.job(asked.at, None, "4711", "1000")
    assert job.slurm == {"job_id": "4711", "job_name": "large", "account": "physics", "partition": "gpu"}
    assert 'slurm_job_id=~"(.*,)?4711(,.*)?"' in asked.asked[0][1]
    assert 'owner=~"1000|"' in asked.asked[1][1]


def holding(run: str, owner: str = "1000", job: str = "4711") -> Sample:
    return Sample("", {"run": run, "owner": owner, "slurm_job_id": job, "slurm_job_name": "large"}, 1.0)


KNOWN = r"group by \(run, owner\)"
HELD = r"last_over_time\(rankscope_gpu_allocation_info"


def answers_about(held: Sequence[Sample], runs: Sequence[str], owner: str = "1000") -> dict[str, Sequence[Sample]]:
    return {KNOWN: [Sample("", {"run": run, "owner": owner}, 1.0) for run in runs], HELD: held}


@pytest.mark.parametrize(
    ("held", "runs"),
    [
        ([holding("eval,train")], ["eval", "train"]),
        ([holding("train"), holding("eval,train")], ["eval", "train"]),
        ([holding("train"), holding("other,train", "1000,1001", "4711,4712")], ["train"]),
        ([holding("bs=32,lr=0.1,train")], ["bs=32,lr=0.1", "train"]),
        ([holding("train", "1000,1001", "4711,4712")], ["train"]),
    ],
    ids=["always together", "at times", "with another job at times", "commas in a name", "no rank of the other job"],
)
def test_runs_that_share_a_gpu_are_all_in_the_report(server, held: list[Sample], runs: list[str]) -> None:
    asked = Server({**ANSWERS, **answers_about(held, ["bs=32,lr=0.1", "eval", "train"])})
    assert sorted(queries.job(asked.at, None, "4711", None).runs) == runs
    pattern = re.search(r'group by .*run=~"([^"]*)"', asked.asked[1][1])
    assert pattern
    assert all(re.fullmatch(pattern[1].replace("\\\\", "\\"), run) for run in runs)


def test_runs_that_may_belong_to_other_jobs_have_to_be_named(server) -> None:
    held = [holding("eval,train", job="4711,4712")]
    with pytest.raises(NoJobError, match=r"other jobs use the GPUs of Slurm job 4711, too; .* --run: eval, train"):
        queries.job(Server({**ANSWERS, **answers_about(held, ["eval", "train"])}).at, None, "4711", None)
    named = Server({**ANSWERS, **answers_about(held, ["train"])})
    assert queries.job(named.at, "train", "4711", None).runs == ["train"]
    assert 'run="train"' in named.asked[1][1]


def test_a_run_that_has_just_started_does_not_hide_the_jobs_other_runs(server) -> None:
    held = [holding("train"), holding("eval")]
    fresh: dict[str, Sequence[Sample]] = {
        r'min_over_time\(rankscope_rank_start.*run="eval"': one(ENDED),
        r'exit_timestamp.*run="eval"|last_progress.*run="eval"': [],
    }
    asked = Server({**fresh, **ANSWERS, **answers_about(held, ["eval", "train"])})
    assert queries.job(asked.at, None, "4711", None).runs == ["train"]
    alone = Server({**fresh, **ANSWERS, **answers_about(held[1:], ["eval"])})
    with pytest.raises(NoJobError, match="run eval has just started"):
        queries.job(alone.at, None, "4711", None)


def test_resources_are_queried_at_the_end_of_the_job(server) -> None:
    asked = server()
    queries.job(asked.at, "train", None, None)
    assert {moment for moment, expression in asked.asked if "busy" in expression} == {ENDED}


@pytest.mark.parametrize(("present", "seconds"), [(900.0, 4500.0), (None, 3600.0)], ids=["hangs", "has ended"])
def test_a_run_counts_until_now_while_a_rank_is_present(server, present: float | None, seconds: float) -> None:
    up = [] if present is None else one(ENDED + present)
    ratios = [*one(0.75, cause="none"), *one(0.25, cause="data")]
    now = {
        r"rankscope_rank_up": up,
        r"timestamp\(rankscope_run_gpu_seconds": one(10.0),
        r"rankscope_run_lost_ratio": ratios,
    }
    job = queries.job(Server({**now, **ANSWERS, **now}).at, "train", None, None)
    assert job.seconds == seconds
    assert job.causes["data"] == (3000.0 if present is None else 3000.0 + 0.25 * 2 * 10)


def test_an_unknown_job_is_an_error() -> None:
    with pytest.raises(NoJobError, match="has no data of this job"):
        queries.job(Server({}).at, "train", None, None)


@pytest.mark.parametrize("number", ['1"} or up{x="', ".*", "1|2"])
def test_a_job_number_is_quoted_in_the_query(number: str) -> None:
    asked = Server({})
    with pytest.raises(NoJobError):
        queries.job(asked.at, None, number, None)
    ((_, expression),) = asked.asked
    literal = re.search(r'slurm_job_id=~"((?:[^"\\]|\\.)*)"', expression)
    assert literal
    pattern = literal[1].replace("\\\\", "\\").replace('\\"', '"')
    assert re.fullmatch(pattern, number)
    assert not re.fullmatch(pattern, "4711")


def test_gpu_time_is_summed_by_the_jobs_labels() -> None:
    spent = [
        Sample("", {"run": "a", "owner": "1", "cause": "none"}, 100.0),
        Sample("", {"run": "b", "owner": "1", "cause": "none"}, 10.0),
        Sample("", {"run": "b", "owner": "2", "cause": "data"}, 5.0),
    ]
    held = [Sample("", {"run": run, "owner": "1", "slurm_account": "physics"}, 1.0) for run in "ab"]
    found = queries.groups(Server({"sum by": spent, "group by": held}).at(None), "account", 7.0)
    assert found == {"physics": {"none": 110.0}, "": {"data": 5.0}}


def test_only_the_last_run_with_a_name_is_reported(server) -> None:
    asked = server(**{r"time\(\) - max_over_time": one(4000.0)})
    queries.job(asked.at, "train", None, None)
    windows = {
        window for _, expression in asked.asked for window in re.findall(r"_rank_\w+{[^}]*}\[(\w+)\]", expression)
    }
    assert windows == {"30d", "10m", "4060s", "3601s"}, "to find the run and its start, about its life, until its end"


@pytest.mark.parametrize(
    ("starts", "up", "age"),
    [
        ("100x159", "1x159", 2300),
        ("100x40 stale _x79 1700x38", "1x40 stale _x79 1x38", 700),
        ("100x40 700x118", "1x159", 2300),
        ("100x40 stale _x79 100x38", "1x40 stale _x79 1x38", 2300),
        ("100x20 400x20 stale _x79 400x38", "1x41 stale _x79 1x38", 2300),
        ("100x40 _x119", "1x40 0x40 stale _x78", 2300),
    ],
    ids=["one run", "again", "restarted rank", "outage", "outage after a restart", "ended"],
)
def test_a_run_starts_when_its_first_rank_appears(tmp_path: Path, starts: str, up: str, age: int) -> None:
    labels = 'run="train",owner="1",rank="0"'
    expression = queries.SECONDS_SINCE_START.format('run="train",owner="1"').replace(queries.LOOK_BACK, "1h")
    check_in_prometheus(
        tmp_path,
        {
            f"rankscope_rank_start_timestamp_seconds{{{labels}}}": f"_x7 {starts}",
            f"rankscope_rank_up{{{labels}}}": f"_x7 {up}",
        },
        expression,
        {"{}": age},
    )


def check_in_prometheus(
    tmp_path: Path, series: Mapping[str, str], expression: str, values: Mapping[str, float]
) -> None:
    """Check what a Prometheus answers after 40 minutes in which it has scraped these series each 15 s."""
    document = {
        "rule_files": [],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": text} for name, text in series.items()],
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": "40m",
                        "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(document))
    command = [servers.program("promtool"), "test", "rules", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("useful", "unknown", "spent"),
    [
        ("_x60 0+30x99", "_x60 0x99", (2970, 0)),
        ("600+30x160", "0x160", (3600, 0)),
        ("_x50 0+30x40 1200x39 stale 60+30x20", "_x50 0x100", (1860, 0)),
        ("_x50 0+30x40 stale _x40 3000+30x20", "_x50 0x40 stale _x40 0x20", (3600, 0)),
        ("_x50 0+30x50 2500+30x49", "_x50 0+20x50 30+2x49", (3970, 128)),
    ],
    ids=["one run", "began before", "again", "outage", "divided later"],
)
def test_gpu_time_is_what_the_accounts_gain(
    tmp_path: Path, useful: str, unknown: str, spent: tuple[float, float]
) -> None:
    expression = f"sum by (cause) (sum_over_time(({queries._spent(30)})[1790s:30s]))"
    labels = 'rankscope_run_gpu_seconds{{run="r",owner="1",node="{}",cause="{}",instance="{}"}}'.format
    series = {
        labels("a", "none", "a:1"): useful,
        labels("a", "unknown", "a:1"): unknown,
        labels("a", "none", "a:2"): useful,
        labels("", "none", "analyzer"): useful,
    }
    check_in_prometheus(tmp_path, series, expression, {'{cause="none"}': spent[0], '{cause="unknown"}': spent[1]})


def test_gpu_time_of_runs_that_share_a_gpu_belongs_to_their_one_user() -> None:
    spent = [Sample("", {"run": run, "owner": "1", "cause": "none"}, 10.0) for run in ("a", "b", "c", "d,e")]
    held = [
        Sample("", {"run": run, "owner": owner, "user": user}, 1.0)
        for run, owner, user in [
            ("a,b", "1,2", "alice,bob"),
            ("b", "1", "alice"),
            ("c,d,e", "1", "alice"),
        ]
    ]
    found = queries.groups(Server({"sum by": spent, "group by": held}).at(None), "user", 7.0)
    assert found == {"": {"none": 10.0}, "alice": {"none": 30.0}}


def test_without_runs_there_are_no_groups() -> None:
    with pytest.raises(NoJobError, match="has no run of a Rankscope exporter in the last 7 days"):
        queries.groups(Server({}).at(None), "user", 7.0)


PEAK = [Sample("rankscope_finding_peak_ratio", {}, 0.3)]


SENTENCE = "Rank 1 slows down run train by 30%: extra work outside the model"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(str(round(BEGAN + 60)), [(BEGAN + 60, ENDED - 600, SENTENCE)])]
    + [(value, []) for value in ("NaN", "-5", "9" * 4000, "1e9", "")],
)
def test_a_finding_is_reported_unless_its_time_is_one_that_no_exporter_sends(value: str, expected: list[Any]) -> None:
    labels = {"kind": "straggler", "cause": "other", "severity": "warning", "rank": "1", "value": value}
    judged = {r"peak_ratio": PEAK, r"timestamp\(count_values": [Sample("", labels, ENDED - 600)]}
    found = queries.job(Server({**ANSWERS, **judged}).at, "train", None, None).findings
    assert [(one.begin, one.end, one.sentence) for one in found] == expected
