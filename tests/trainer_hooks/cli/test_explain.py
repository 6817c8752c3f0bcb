"""`rankscope explain` on recorded faults of a job with four ranks, with a real Prometheus.

`explained/` has the fast rules' series at one moment each (Prometheus' /federate), and the alerts of /api/v1/rules.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from deploy.prometheus.fast import prometheus_config
from testing import servers
from testing.http_server import answers, http_server
from tests.trainer_hooks.cli.explaining import explain

from rankscope.cli.explaining.command import parse_moment

RECORDED = Path(__file__).parent / "explained"
HEALTHY, LAGGING, HANGING = (
    (RECORDED / f"{name}.txt").read_text() for name in ("healthy", "rank_zero_lags", "rank_hangs")
)
RAW = "\n".join(line for line in HEALTHY.splitlines() if line.startswith(("rankscope_rank_info", "up")))
OF_RANK_2 = "GPU-51300000-0000-4000-8000-000000000002"
XID = 'ALERTS{alertname="RankscopeGpuXid",alertstate="firing",severity="critical",gpu="%s",uuid="%s",xid="79"} 1\n'
FALLBACK = 'ALERTS{alertname="RankscopeCpuFallback",alertstate="firing",severity="critical",run="train",rank="%d"} 1\n'
CLOCK = 'group:rankscope_clock:info{run="train",group="%s",clock="%s"} 1\n'
MOMENTS = {
    "healthy": HEALTHY,
    "by the device": HEALTHY + CLOCK % ("0-3", "device"),
    "by both": HEALTHY + CLOCK % ("0-1", "device") + CLOCK % ("2-3", "host"),
    "lagging": LAGGING,
    "hanging": HANGING,
    "not yet firing": LAGGING.replace('alertstate="firing"', 'alertstate="pending"'),
    "two runs": HEALTHY + LAGGING.replace('run="train"', 'run="other \\"run\\"\x1b[2J"'),
    "xid": LAGGING + XID % ("2", OF_RANK_2) + XID % ("7", "GPU-of-another-run"),
    "many alerts": LAGGING + "".join(FALLBACK % rank for rank in range(5)),
    "without rules": RAW,
    "without ranks": 'rankscope_exporter_build_info{instance="a",job="gpus"} 1\n',
    "ended": RAW + "\ngpu:rankscope_busy:ratio 0",
    "nothing": "",
}
WITHOUT_ALERTS = "\n".join(line for line in LAGGING.splitlines() if not line.startswith("ALERTS")) + "\n"
PACE = 'run:rankscope_steps:rate{run="train"} %s\n'
EXIT = 'rankscope_rank_exit_timestamp_seconds{run="train",rank="0"} 1795283699\n'
PAUSE = """run:rankscope_stall:seconds{run="train"} 70
run:rankscope_pausing:seconds{run="train"} 64
run:rankscope_patience:seconds{run="train"} 150
"""
MOMENTS |= {
    "too short for an alert": WITHOUT_ALERTS + PACE % "9",
    "too few steps for an alert": WITHOUT_ALERTS + PACE % "0.001",
    "loaders are slow": HEALTHY + 'run:rankscope_loss:ratio{run="train",cause="data"} 0.12\n' + PACE % "9",
    "stands still": HEALTHY + PAUSE,
    "unnamed work": re.sub(r'(run:rankscope_lost:ratio{cause="other".*}) .*', r"\1 0.93", HEALTHY),
    "ended with a time": RAW + "\ngpu:rankscope_busy:ratio 0\n" + EXIT,
    "ended with an alert": RAW + "\n" + EXIT + "".join(re.findall(r"(?m)^ALERTS.*\n", LAGGING)),
    "one of two runs lives": HEALTHY + RAW.replace('run="train"', 'run="old"'),
}


def in_cluster(name: str, series: str) -> str:
    return re.sub(r"(?m)^(\w\S*?){", rf'\1{{cluster="{name}",', series)


def of_owner(uid: str, series: str) -> str:
    return re.sub(r"(?m)^(\w\S*?){(?=[^}]*run=)", rf'\1{{owner="{uid}",', series)


MOMENTS |= {
    "two clusters": in_cluster("healthy", HEALTHY) + in_cluster("sick", LAGGING + XID % ("2", OF_RANK_2)),
    "one of two clusters loses little": in_cluster("a", HEALTHY) + in_cluster("b", WITHOUT_ALERTS),
    "two owners": of_owner("1000", HEALTHY) + of_owner("1001", LAGGING),
    "a cluster and none": HEALTHY + in_cluster("sick", LAGGING),
    "one of two clusters has rules": in_cluster("a", RAW) + "\n" + in_cluster("b", HEALTHY),
    "another run in each of two clusters": in_cluster("a", HEALTHY)
    + in_cluster("b", LAGGING.replace('run="train"', 'run="other"')),
}
APART = 1200  # seconds; Prometheus looks back for 300

Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def moments() -> dict[str, int]:
    """Return the time of each moment in unix seconds."""
    first = int(time.time()) - len(MOMENTS) * APART
    return {name: first + n * APART for n, name in enumerate(MOMENTS)}


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the width of the terminal, which wraps lines."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, moments: dict[str, int]) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("prometheus")
    lines = [f"{line} {moments[name]}\n" for name, text in MOMENTS.items() for line in text.splitlines() if line]
    (directory / "series.txt").write_text("".join(lines) + "# EOF\n")
    backfill = [servers.program("promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    subprocess.run([*backfill, directory / "series.txt", directory / "prometheus-data"], check=True)
    server = servers.prometheus(directory, prometheus_config([]))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def explain_at(prometheus: str, moments: dict[str, int], capsys: pytest.CaptureFixture[str]) -> Explain:
    """Run `rankscope explain` for one of MOMENTS. Returns status, stdout and stderr."""
    return lambda moment, *flags: explain(capsys, "--url", prometheus, "--at", str(moments[moment]), *flags)


@pytest.fixture
def explain_now(prometheus: str, moments: dict[str, int], capsys: pytest.CaptureFixture[str]) -> Iterator[Explain]:
    """Run it as if the moment were now: only then Prometheus has the texts of the alerts."""
    moment = ""

    def then(request: BaseHTTPRequestHandler) -> None:
        path, _, question = request.path.partition("?")
        if path == "/api/v1/rules":
            body = (RECORDED / "rules.json").read_bytes()
        else:
            time = urllib.parse.urlencode({"time": moments[moment]})
            with urllib.request.urlopen(f"{prometheus}{path}?{question}&{time}", timeout=10) as answer:
                body = answer.read()
        answers(body)(request)

    def explain_at(then: str, *flags: str) -> tuple[int, str, str]:
        nonlocal moment
        moment = then
        return explain(capsys, "--url", f"http://127.0.0.1:{port}", *flags)

    with http_server(then) as port:
        yield explain_at


def test_json_has_rank_host_gpu_cause_and_share_in_one_line(explain_at: Explain) -> None:
    status, out, _ = explain_at("lagging", "--json")
    answer = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    named = {name: answer[name] for name in ("run", "rank", "host", "gpu", "cause", "alert", "firing")}
    alert = {"alert": "RankscopeRankZeroLagging", "firing": True}
    assert named == {"run": "train", "rank": "0", "host": "vm", "gpu": "0", "cause": "other", **alert}
    assert answer["share"] == pytest.approx(0.2565, abs=1e-4)


def test_the_evidence_is_the_recorded_series_that_were_compared(explain_at: Explain) -> None:
    evidence = json.loads(explain_at("lagging", "--json")[1])["evidence"]
    compared = evidence["compared"]
    assert compared["rank:rankscope_wait:ratio"] == pytest.approx(0.0653, abs=1e-4)
    assert compared["group:rankscope_wait:reference"] == pytest.approx(0.3218, abs=1e-4)
    assert compared['rank:rankscope_blame:ratio{phase="other"}'] == pytest.approx(0.2617, abs=1e-4)
    assert evidence["lost"]["straggler"] == max(v for cause, v in evidence["lost"].items() if cause != "none")


def test_the_text_is_some_ten_lines_with_the_words_of_the_notification(explain_now: Explain) -> None:
    status, out, _ = explain_now("lagging")
    lines = out.splitlines()
    assert status == 0
    assert re.match(r"train: 4 ranks on 1 node, 6\d% of the GPU time is useful compute, \d{4}-", lines[0])
    assert lines[2].split()[0] == "straggler"
    text = " ".join(" ".join(lines).split())
    assert "Rank 0 (vm, GPU 0) slows down run train by 26%: extra work outside the model" in text
    assert "Rank 0 waits 6.5% of the time in collectives" in text
    assert lines[-1].strip().endswith("/docs/runbooks/RankscopeRankZeroLagging.md")
    assert len(lines) <= 12


def test_a_past_alert_is_shown_with_what_was_compared(explain_at: Explain) -> None:
    out = " ".join(explain_at("lagging")[1].split())
    assert "WARNING: RankscopeRankZeroLagging, rank 0, host vm, GPU 0, cause other, 26% of the GPU time" in out
    assert "It waits 6.5% of the time in collectives, the other ranks of its group 32%: a lag of 26%." in out
    assert "/docs/runbooks/RankscopeRankZeroLagging.md" in out


def test_a_hang_inhibits_the_alerts_that_it_inhibits_in_alertmanager(explain_now: Explain) -> None:
    answer = json.loads(explain_now("hanging", "--json")[1])
    named = [answer[name] for name in ("alert", "rank", "gpu", "cause", "share", "severity")]
    assert named == ["RankscopeRankStuck", "2", "2", "other", 1.0, "critical"]
    assert answer["evidence"]["summary"] == "Run train hangs: Rank 2 (vm, GPU 2) is stuck in other"
    assert answer["others"] == []


def test_without_an_alert_it_shows_the_useful_compute(explain_at: Explain) -> None:
    status, out, _ = explain_at("healthy")
    assert status == 0
    lines = out.splitlines()
    assert "84% of the GPU time is useful compute" in lines[0]
    assert lines[-1] == "No alert: no loss is large enough."
    answer = json.loads(explain_at("healthy", "--json")[1])
    assert [answer[name] for name in ("alert", "rank", "cause", "share")] == [None] * 4
    assert answer["evidence"]["lost"]["none"] > 0.8


def test_it_shows_the_clock_by_which_the_ranks_are_judged(explain_at: Explain) -> None:
    assert "4 ranks on 1 node, compared by the devices' clock, 84%" in explain_at("by the device")[1].splitlines()[0]
    answer = {moment: json.loads(explain_at(moment, "--json")[1])["clock"] for moment in ("by the device", "by both")}
    assert answer == {"by the device": "device", "by both": "mixed"}
    assert json.loads(explain_at("healthy", "--json")[1])["clock"] is None


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (
            "too short for an alert",
            "rank 0 slows down the run by 26%: extra work outside the model, for 0 s; it alerts after 60 s.",
        ),
        (
            "too few steps for an alert",
            "rank 0 slows down the run by 26%: extra work outside the model, for 20 min.",
        ),
        (
            "loaders are slow",
            "12% of the GPU time, more than usual, is lost to data, for 0 s; it alerts after 2 min.",
        ),
        ("stands still", "no rank has made progress for 70 s; it alerts after 2.5 min."),
    ],
)
def test_a_loss_without_an_alert_yet_is_shown_with_how_long_it_must_last(
    explain_now: Explain, moment: str, text: str
) -> None:
    assert " ".join(explain_now(moment)[1].split()).endswith(f"No alert yet: {text}")


def test_json_has_the_loss_that_does_not_alert_yet(explain_now: Explain) -> None:
    answer = json.loads(explain_now("loaders are slow", "--json")[1])["not_yet"]
    assert answer == {"cause": "data", "rank": None, "share": 0.12, "lasts": 0.0, "alerts_after_seconds": 120.0}
    assert json.loads(explain_now("healthy", "--json")[1])["not_yet"] is None
    assert json.loads(explain_now("lagging", "--json")[1])["not_yet"] is None


def test_time_outside_all_phases_is_shown_with_how_to_name_it(explain_at: Explain) -> None:
    out = " ".join(explain_at("unnamed work")[1].split())
    assert "But 93% of the time is outside data loading" in out
    assert re.search(r"First run rankscope stacks --rank 0 .* \(get_batch\(\)\) in rankscope\.phase\(", out)
    assert "outside data loading" not in explain_at("healthy")[1]


def test_a_pending_alert_is_shown_as_not_notified_yet(explain_at: Explain) -> None:
    assert "PENDING, no notification yet: RankscopeRankZeroLagging" in explain_at("not yet firing")[1]
    assert json.loads(explain_at("not yet firing", "--json")[1])["firing"] is False


def test_an_alert_about_a_gpu_belongs_to_the_run_whose_rank_is_on_it(explain_at: Explain) -> None:
    answer = json.loads(explain_at("xid", "--json")[1])
    assert [answer[name] for name in ("alert", "gpu", "host", "cause")] == ["RankscopeGpuXid", "2", "vm", "xid 79"]
    assert [other["alertname"] for other in answer["others"]] == ["RankscopeRankZeroLagging"]


def test_three_other_alerts_have_a_line_each_and_the_rest_is_counted(explain_at: Explain) -> None:
    lines = explain_at("many alerts")[1].splitlines()
    assert any(line.startswith("CRITICAL: RankscopeCpuFallback, rank 0") for line in lines)
    assert lines[-4:] == [
        *(f"Also: RankscopeCpuFallback, rank {n}" for n in (1, 2, 3)),
        "And 2 more alerts: see --json.",
    ]
    assert len(json.loads(explain_at("many alerts", "--json")[1])["others"]) == 5


def test_several_runs_are_listed_and_one_can_be_chosen(explain_at: Explain) -> None:
    status, out, err = explain_at("two runs")
    assert (status, out) == (2, "")
    run = r"\(4 ranks\)"
    assert re.search(rf'has 2 runs; choose one with --run: other "run"\\x1b\[2J {run}, train {run}$', err)
    assert explain_at("two runs", "--run", "train")[0] == 0


def test_the_name_of_a_run_is_quoted_for_prometheus_and_harmless_in_a_terminal(explain_at: Explain) -> None:
    status, out, _ = explain_at("two runs", "--run", 'other "run"\x1b[2J')
    assert status == 0
    assert "RankscopeRankZeroLagging" in out
    assert "\x1b" not in out


def test_runs_of_one_name_in_two_clusters_are_listed_and_one_is_chosen_by_its_cluster(explain_at: Explain) -> None:
    status, out, err = explain_at("two clusters", "--run", "train")
    assert (status, out) == (2, "")
    runs = "train in cluster healthy (4 ranks), train in cluster sick (4 ranks)"
    assert err.endswith(f"has 2 runs; choose one with --cluster: {runs}\n")
    assert explain_at("two clusters", "--cluster", "sick")[0] == 0


def test_runs_of_one_name_of_two_users_are_listed_and_one_is_chosen_by_its_owner(explain_at: Explain) -> None:
    status, out, err = explain_at("two owners", "--run", "train")
    assert (status, out) == (2, "")
    runs = "train (owner 1000, 4 ranks), train (owner 1001, 4 ranks)"
    assert err.endswith(f"has 2 runs; choose one with --owner: {runs}\n")
    answer = {owner: json.loads(explain_at("two owners", "--owner", owner, "--json")[1]) for owner in ("1000", "1001")}
    assert {owner: (one["owner"], one["alert"]) for owner, one in answer.items()} == {
        "1000": ("1000", None),
        "1001": ("1001", "RankscopeRankZeroLagging"),
    }
    assert explain_at("two owners", "--owner", "1")[2].endswith("has no run of owner 1; it has: train, train\n")


def test_each_cluster_has_its_own_ranks_alerts_and_figures(explain_at: Explain) -> None:
    answer = {
        cluster: json.loads(explain_at("two clusters", "--run", "train", "--cluster", cluster, "--json")[1])
        for cluster in ("healthy", "sick")
    }
    names = ("run", "cluster", "alert", "gpu")
    assert [answer["healthy"][name] for name in names] == ["train", "healthy", None, None]
    assert [answer["sick"][name] for name in names] == ["train", "sick", "RankscopeGpuXid", "2"]
    assert [other["alertname"] for other in answer["sick"]["others"]] == ["RankscopeRankZeroLagging"]
    alone = {moment: json.loads(explain_at(moment, "--json")[1]) for moment in ("healthy", "xid")}
    for cluster, moment in (("healthy", "healthy"), ("sick", "xid")):
        assert answer[cluster]["evidence"] == alone[moment]["evidence"]


def test_the_text_names_the_cluster(explain_at: Explain) -> None:
    healthy = explain_at("two clusters", "--cluster", "healthy")[1].splitlines()
    assert healthy[0].startswith("train in cluster healthy: 4 ranks on 1 node, ")
    assert healthy[-1] == "No alert: no loss is large enough."
    assert "RankscopeGpuXid, host vm, GPU 2" in explain_at("two clusters", "--cluster", "sick")[1]


def test_a_loss_in_another_cluster_is_not_shown(explain_at: Explain) -> None:
    assert "No alert yet" not in explain_at("one of two clusters loses little", "--cluster", "a")[1]
    assert "No alert yet: rank 0" in explain_at("one of two clusters loses little", "--cluster", "b")[1]


def test_a_run_without_a_cluster_differs_from_one_with_a_cluster(explain_at: Explain) -> None:
    runs = "train (4 ranks), train in cluster sick (4 ranks)"
    assert explain_at("a cluster and none")[2].endswith(f"choose one with --cluster: {runs}\n")
    answer = json.loads(explain_at("a cluster and none", "--cluster", "", "--json")[1])
    assert [answer["cluster"], answer["alert"]] == [None, None]
    assert json.loads(explain_at("a cluster and none", "--cluster", "sick", "--json")[1])["rank"] == "0"


def test_a_cluster_is_only_needed_if_it_decides_which_run(explain_at: Explain) -> None:
    elsewhere = "another run in each of two clusters"
    assert explain_at(elsewhere, "--run", "train")[1].startswith("train in cluster a: 4 ranks")
    assert "choose one with --run and --cluster: other in cluster b" in explain_at(elsewhere)[2]


@pytest.mark.parametrize(
    ("flags", "what"), [(["--cluster", "c"], "run in cluster c"), (["--run", "t", "--cluster", "sick"], "run t in")]
)
def test_an_unknown_cluster_is_an_error_that_lists_the_known_ones(
    explain_at: Explain, flags: list[str], what: str
) -> None:
    status, out, err = explain_at("two clusters", *flags)
    assert (status, out) == (2, "")
    assert f" has no {what}" in err
    assert err.endswith("; it has: train in cluster healthy, train in cluster sick\n")


def test_rules_of_another_cluster_do_not_count(explain_at: Explain) -> None:
    missing = explain_at("one of two clusters has rules", "--cluster", "a")
    assert missing[0] == 2
    assert missing[2].endswith("has run train in cluster a, but Rankscope's rules are not loaded there (rule_files)\n")


def test_an_unknown_run_is_an_error_that_lists_the_known_ones(explain_at: Explain) -> None:
    status, _, err = explain_at("healthy", "--run", "trian")
    assert status == 2
    assert err.endswith("has no run trian; it has: train\n")


@pytest.mark.parametrize(
    ("moment", "error"),
    [
        ("without rules", "has run train, but Rankscope's rules are not loaded there (rule_files)"),
        ("without ranks", "had no run then: it scraped Rankscope exporters (1), but none showed a rank"),
        ("nothing", "had no run then and scraped no Rankscope exporter"),
    ],
)
def test_it_names_the_reason_if_there_is_nothing_to_explain(explain_at: Explain, moment: str, error: str) -> None:
    status, out, err = explain_at(moment)
    assert (status, out) == (2, "")
    assert err.endswith(f"{error}\n")


@pytest.mark.parametrize(
    ("moment", "error"),
    [
        (
            "without rules",
            "has run train, but Rankscope's rules have recorded nothing about it yet: they are evaluated each 15 s",
        ),
        ("without ranks", "has no run: it scrapes Rankscope exporters (1), but none shows a rank"),
        ("nothing", "has no run and scrapes no Rankscope exporter: see its page /targets"),
    ],
)
def test_for_now_it_names_where_to_look_or_that_it_is_too_early(explain_now: Explain, moment: str, error: str) -> None:
    status, out, err = explain_now(moment)
    assert (status, out) == (2, "")
    assert err.endswith(f"{error}\n")


def test_a_run_that_ended_without_a_fault_is_no_error(explain_at: Explain) -> None:
    status, out, _ = explain_at("ended")
    assert status == 0
    assert out.splitlines()[0].startswith("train: no live rank, ")
    assert out.splitlines()[1].startswith("No alert, and no figures")


def test_for_an_ended_run_it_says_which_time_to_ask_for(explain_at: Explain) -> None:
    assert explain_at("ended with a time")[1].endswith(
        "its ranks have ended. See the time before that with --at 1795283669.\n"
    )


def test_an_alert_that_outlives_its_run_says_which_time_to_ask_for(explain_at: Explain) -> None:
    status, out, _ = explain_at("ended with an alert")
    assert status == 0
    assert "RankscopeRankZeroLagging" in out
    assert out.endswith("Its ranks have ended. See the time before that with --at 1795283669.\n")


def test_the_only_live_run_of_several_is_explained(explain_at: Explain) -> None:
    status, out, _ = explain_at("one of two runs lives")
    assert status == 0
    assert out.startswith("train: 4 ranks")


def test_a_moment_in_the_future_is_refused(explain_at: Explain, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^--at 4102444800 is in the future$"):
        parse_moment("4102444800")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1795283699.5", 1795283699.5),
        ("2026-11-21T17:54:59Z", 1795283699),
        ("2026-11-21T18:54:59+01:00", 1795283699),
    ],
)
def test_a_moment_is_unix_seconds_or_an_iso_time(text: str, seconds: float) -> None:
    assert parse_moment(text) == seconds


def test_a_duration_is_that_long_ago() -> None:
    before = time.time()
    assert before - 1800 <= parse_moment("30m") <= time.time() - 1800
    assert parse_moment("2h") < parse_moment("1h")
