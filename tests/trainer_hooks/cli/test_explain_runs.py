"""The run that `rankscope explain` explains: one of several, in one of several clusters, or one that has ended."""

from __future__ import annotations

import re

import pytest
from testing.http_server import answers
from tests.trainer_hooks.cli.explaining import (
    HANGING,
    HEALTHY,
    LAGGING,
    NOTHING,
    OF_RANK_2,
    XID,
    Explain,
    Server,
    alert,
    complaint,
    finding,
    ranks,
    series,
)

EXIT = series("rankscope_rank_exit_timestamp_seconds", 1795283699, rank="0")
EXPORTER = series("rankscope_exporter_build_info", 1, run="")


def in_cluster(name: str, series: str) -> str:
    return re.sub(r"(?m)^(\w\S*?){", rf'\1{{cluster="{name}",', series)


def of_owner(uid: str, series: str) -> str:
    return re.sub(r"(?m)^(\w\S*?){(?=[^}]*run=)", rf'\1{{owner="{uid}",', series)


def of_run(name: str, series: str) -> str:
    return series.replace('run="train"', f'run="{name}"')


SICK = LAGGING + XID
WAITS = finding(
    "Run slow waits for data 8% of the time, on every rank: loader workers wait", 0.08, kind="data", rank=""
)
IDLE = of_run("idle", HEALTHY) + alert("RankscopeGpuAllocatedIdle", run="idle", rank="2", gpu="2", uuid=OF_RANK_2)
ENDED = ranks(up=0) + EXIT
MOMENTS = {
    "healthy": HEALTHY,
    "sick": SICK,
    "five runs": HEALTHY + of_run("hung", HANGING) + of_run("slow", LAGGING + WAITS) + of_run("new", ranks()) + IDLE,
    "a slow run and another": of_run("other", HEALTHY) + LAGGING,
    "two runs": HEALTHY + LAGGING.replace('run="train"', 'run="other \\"run\\"\x1b[2J"'),
    "without ranks": EXPORTER,
    "nothing": "",
    "ended": ENDED,
    "ended with a finding": ENDED + LAGGING.replace("rankscope_rank_up", "rankscope_rank_down"),
    "one of two runs lives": HEALTHY + ranks(up=0).replace('run="train"', 'run="old"'),
    "two clusters": in_cluster("healthy", HEALTHY) + in_cluster("sick", SICK),
    "two owners": of_owner("1000", HEALTHY) + of_owner("1001", LAGGING),
    "a cluster and none": HEALTHY + in_cluster("sick", LAGGING),
    "another run in each of two clusters": in_cluster("a", HEALTHY)
    + in_cluster("b", LAGGING.replace('run="train"', 'run="other"')),
}


def test_each_of_several_runs_has_a_line_and_the_worst_is_first(explain_at: Explain) -> None:
    head, *lines = explain_at.lines("five runs")
    assert head.startswith("5 runs, the worst first (--run explains one), ")
    assert lines == [
        "hung, 4 ranks: CRITICAL for 90 s: Run train hangs: Rank 1 (vm, GPU 1) is stuck in data_wait",
        "slow, 4 ranks: WARNING for 12 min: Rank 2 (vm, GPU 2) slows down run train by 28%: its GPU is ...",
        "idle, 4 ranks: FIRING alert RankscopeGpuAllocatedIdle: rank 2, instance vm:10417, gpu 2",
        "new, 4 ranks: not diagnosed",
        "train, 4 ranks: no problem found, 88% of its GPU time in the last seconds is useful",
    ]


def test_the_line_of_a_run_has_its_name_once_and_the_ratio(explain_at: Explain) -> None:
    _, slow, _ = explain_at.lines("a slow run and another")
    assert slow == "train, 4 ranks: WARNING for 12 min: Rank 2 (vm, GPU 2) slows down the run by 28%: its GPU is ..."


def test_an_option_that_needs_one_run_says_how_to_choose_it(explain_at: Explain) -> None:
    run = r"\(4 ranks\)"
    listed = rf'has 2 runs; choose one with --run: other "run"\\x1b\[2J {run}, train {run}$'
    assert re.search(listed, explain_at.error("two runs", "--json"))
    assert explain_at.lines("two runs", "--run", "train")[0].startswith("train: 4 ranks")


def test_the_name_of_a_run_is_quoted_for_prometheus_and_harmless_in_a_terminal(explain_at: Explain) -> None:
    text = explain_at.text("two runs", "--run", 'other "run"\x1b[2J')
    assert "WARNING for 12 min: " in text
    assert "\x1b" not in text


def test_runs_of_one_name_in_two_clusters_are_listed_and_one_is_chosen_by_its_cluster(explain_at: Explain) -> None:
    head, sick, healthy = explain_at.lines("two clusters", "--run", "train")
    assert head.startswith("2 runs, the worst first (--cluster explains one), ")
    assert sick.startswith("train in cluster sick, 4 ranks: WARNING for 12 min: ")
    assert healthy.startswith("train in cluster healthy, 4 ranks: no problem found")
    runs = "train in cluster healthy (4 ranks), train in cluster sick (4 ranks)"
    listed = explain_at.error("two clusters", "--run", "train", "--json")
    assert listed.endswith(f"has 2 runs; choose one with --cluster: {runs}")
    assert explain_at.lines("two clusters", "--cluster", "sick")


def test_runs_of_one_name_of_two_users_are_listed_and_one_is_chosen_by_its_owner(explain_at: Explain) -> None:
    runs = "train (owner 1000, 4 ranks), train (owner 1001, 4 ranks)"
    listed = explain_at.error("two owners", "--run", "train", "--json")
    assert listed.endswith(f"has 2 runs; choose one with --owner: {runs}")
    head, slow, healthy = explain_at.lines("two owners")
    assert "(--owner explains one)" in head
    assert slow.startswith("train of owner 1001, 4 ranks: WARNING for 12 min: ")
    assert healthy.startswith("train of owner 1000, 4 ranks: no problem found")
    for owner, findings in (("1000", 0), ("1001", 1)):
        answer = explain_at.answer("two owners", "--owner", owner)
        assert (answer["owner"], len(answer["findings"])) == (owner, findings)
    assert explain_at.error("two owners", "--owner", "1").endswith("has no run of owner 1; it has: train, train")


def test_each_cluster_has_its_own_ranks_findings_alerts_and_figures(explain_at: Explain) -> None:
    for cluster, alerts in {"healthy": [], "sick": [OF_RANK_2]}.items():
        answer = explain_at.answer("two clusters", "--run", "train", "--cluster", cluster)
        alone = explain_at.answer(cluster)
        assert [alert["uuid"] for alert in answer["alerts"]] == alerts
        assert answer["cluster"] == cluster
        assert len(answer["findings"]) == len(alone["findings"]) == len(alerts)
        assert all(answer[name] == alone[name] for name in ("ranks", "nodes", "lost", "lost_gpu_hours", "largest_lag"))


def test_the_text_names_the_cluster(explain_at: Explain) -> None:
    lines = explain_at.lines("two clusters", "--cluster", "healthy")
    assert lines[0].startswith("train in cluster healthy: 4 ranks on 1 node, ")


def test_a_run_without_a_cluster_differs_from_one_with_a_cluster(explain_at: Explain) -> None:
    runs = "train (4 ranks), train in cluster sick (4 ranks)"
    assert explain_at.error("a cluster and none", "--json").endswith(f"choose one with --cluster: {runs}")
    answer = explain_at.answer("a cluster and none", "--cluster", "")
    assert (answer["cluster"], answer["findings"]) == (None, [])
    assert explain_at.answer("a cluster and none", "--cluster", "sick")["findings"][0]["rank"] == "2"


def test_a_cluster_is_only_needed_if_it_decides_which_run(explain_at: Explain) -> None:
    elsewhere = "another run in each of two clusters"
    assert explain_at.text(elsewhere, "--run", "train").startswith("train in cluster a: 4 ranks")
    assert "choose one with --run and --cluster: other in cluster b" in explain_at.error(elsewhere, "--json")


@pytest.mark.parametrize(
    ("flags", "what"), [(["--cluster", "c"], "run in cluster c"), (["--run", "t", "--cluster", "sick"], "run t in")]
)
def test_an_unknown_cluster_is_an_error_that_lists_the_known_ones(
    explain_at: Explain, flags: list[str], what: str
) -> None:
    error = explain_at.error("two clusters", *flags)
    assert f" has no {what}" in error
    assert error.endswith("; it has: train in cluster healthy, train in cluster sick")


@pytest.mark.parametrize(
    ("moment", "flags", "error"),
    [
        ("healthy", ["--run", "trian"], "has no run trian; it has: train"),
        ("without ranks", [], "had no run then: it scraped Rankscope exporters (1), but none showed a rank"),
        ("nothing", [], "had no run then and scraped no Rankscope exporter"),
    ],
)
def test_it_names_the_reason_if_there_is_nothing_to_explain(
    explain_at: Explain, moment: str, flags: list[str], error: str
) -> None:
    assert explain_at.error(moment, *flags).endswith(error)


def test_for_now_it_names_where_to_look(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    url = f"http://{server.address}"
    assert (
        complaint(capsys, "--url", url) == f"{url} has no run and scrapes no Rankscope exporter: see its page /targets"
    )
    exporter = NOTHING.replace(b"[]", b'[{"metric":{"instance":"a"},"value":[0,"1"]}]')
    server.answer = lambda request: answers(exporter if "build_info" in request.path else NOTHING)(request)
    assert complaint(capsys, "--url", url).endswith("it scrapes Rankscope exporters (1), but none shows a rank")


def test_for_an_ended_run_it_says_which_time_to_ask_for(explain_at: Explain) -> None:
    when = "Its ranks have ended. See the time before that with --at 1795283669."
    first, second = explain_at.lines("ended")
    assert first.startswith("train: no live rank, ")
    assert second == when
    *_, advice, last = explain_at.lines("ended with a finding")
    assert (advice, last) == ("  Check its cooling and power.", when)


def test_the_only_live_run_of_several_is_explained(explain_at: Explain) -> None:
    assert explain_at.text("one of two runs lives").startswith("train: 4 ranks")
