"""The run that `rankscope explain` explains: one of several, in one of several clusters, or one that has ended."""

from __future__ import annotations

import re

import pytest
from tests.trainer_hooks.cli.explaining import HEALTHY, LAGGING, OF_RANK_2, RAW, WITHOUT_ALERTS, XID, Explain

EXIT = 'rankscope_rank_exit_timestamp_seconds{run="train",rank="0"} 1795283699\n'


def in_cluster(name: str, series: str) -> str:
    return re.sub(r"(?m)^(\w\S*?){", rf'\1{{cluster="{name}",', series)


def of_owner(uid: str, series: str) -> str:
    return re.sub(r"(?m)^(\w\S*?){(?=[^}]*run=)", rf'\1{{owner="{uid}",', series)


SICK = LAGGING + XID % ("2", OF_RANK_2)
MOMENTS = {
    "healthy": HEALTHY,
    "sick": SICK,
    "two runs": HEALTHY + LAGGING.replace('run="train"', 'run="other \\"run\\"\x1b[2J"'),
    "without rules": RAW,
    "without ranks": 'rankscope_exporter_build_info{instance="a",job="gpus"} 1\n',
    "ended": RAW + "\ngpu:rankscope_busy:ratio 0",
    "nothing": "",
    "ended with a time": RAW + "\ngpu:rankscope_busy:ratio 0\n" + EXIT,
    "ended with an alert": RAW + "\n" + EXIT + "".join(re.findall(r"(?m)^ALERTS.*\n", LAGGING)),
    "one of two runs lives": HEALTHY + RAW.replace('run="train"', 'run="old"'),
    "two clusters": in_cluster("healthy", HEALTHY) + in_cluster("sick", SICK),
    "one of two clusters loses little": in_cluster("a", HEALTHY) + in_cluster("b", WITHOUT_ALERTS),
    "two owners": of_owner("1000", HEALTHY) + of_owner("1001", LAGGING),
    "a cluster and none": HEALTHY + in_cluster("sick", LAGGING),
    "one of two clusters has rules": in_cluster("a", RAW) + "\n" + in_cluster("b", HEALTHY),
    "another run in each of two clusters": in_cluster("a", HEALTHY)
    + in_cluster("b", LAGGING.replace('run="train"', 'run="other"')),
}


def test_several_runs_are_listed_and_one_can_be_chosen(explain_at: Explain) -> None:
    run = r"\(4 ranks\)"
    listed = rf'has 2 runs; choose one with --run: other "run"\\x1b\[2J {run}, train {run}$'
    assert re.search(listed, explain_at.error("two runs"))
    assert explain_at.lines("two runs", "--run", "train")


def test_the_name_of_a_run_is_quoted_for_prometheus_and_harmless_in_a_terminal(explain_at: Explain) -> None:
    text = explain_at.text("two runs", "--run", 'other "run"\x1b[2J')
    assert "RankscopeRankZeroLagging" in text
    assert "\x1b" not in text


def test_runs_of_one_name_in_two_clusters_are_listed_and_one_is_chosen_by_its_cluster(explain_at: Explain) -> None:
    runs = "train in cluster healthy (4 ranks), train in cluster sick (4 ranks)"
    listed = explain_at.error("two clusters", "--run", "train")
    assert listed.endswith(f"has 2 runs; choose one with --cluster: {runs}")
    assert explain_at.lines("two clusters", "--cluster", "sick")


def test_runs_of_one_name_of_two_users_are_listed_and_one_is_chosen_by_its_owner(explain_at: Explain) -> None:
    runs = "train (owner 1000, 4 ranks), train (owner 1001, 4 ranks)"
    listed = explain_at.error("two owners", "--run", "train")
    assert listed.endswith(f"has 2 runs; choose one with --owner: {runs}")
    for owner, alert in (("1000", None), ("1001", "RankscopeRankZeroLagging")):
        answer = explain_at.answer("two owners", "--owner", owner)
        assert (answer["owner"], answer["alert"]) == (owner, alert)
    assert explain_at.error("two owners", "--owner", "1").endswith("has no run of owner 1; it has: train, train")


def test_each_cluster_has_its_own_ranks_alerts_and_figures(explain_at: Explain) -> None:
    names = ("run", "cluster", "alert", "gpu")
    expected = {"healthy": ["train", "healthy", None, None], "sick": ["train", "sick", "RankscopeGpuXid", "2"]}
    for cluster, values in expected.items():
        answer = explain_at.answer("two clusters", "--run", "train", "--cluster", cluster)
        assert [answer[name] for name in names] == values
        assert answer["evidence"] == explain_at.answer(cluster)["evidence"]
    assert [other["alertname"] for other in answer["others"]] == ["RankscopeRankZeroLagging"]


def test_the_text_names_the_cluster(explain_at: Explain) -> None:
    healthy = explain_at.lines("two clusters", "--cluster", "healthy")
    assert healthy[0].startswith("train in cluster healthy: 4 ranks on 1 node, ")
    assert healthy[-1] == "No alert: no loss is large enough."
    assert "RankscopeGpuXid, host vm, GPU 2" in explain_at.text("two clusters", "--cluster", "sick")


def test_a_loss_in_another_cluster_is_not_shown(explain_at: Explain) -> None:
    assert "No alert yet" not in explain_at.text("one of two clusters loses little", "--cluster", "a")
    assert "No alert yet: rank 0" in explain_at.text("one of two clusters loses little", "--cluster", "b")


def test_a_run_without_a_cluster_differs_from_one_with_a_cluster(explain_at: Explain) -> None:
    runs = "train (4 ranks), train in cluster sick (4 ranks)"
    assert explain_at.error("a cluster and none").endswith(f"choose one with --cluster: {runs}")
    answer = explain_at.answer("a cluster and none", "--cluster", "")
    assert [answer["cluster"], answer["alert"]] == [None, None]
    assert explain_at.answer("a cluster and none", "--cluster", "sick")["rank"] == "0"


def test_a_cluster_is_only_needed_if_it_decides_which_run(explain_at: Explain) -> None:
    elsewhere = "another run in each of two clusters"
    assert explain_at.text(elsewhere, "--run", "train").startswith("train in cluster a: 4 ranks")
    assert "choose one with --run and --cluster: other in cluster b" in explain_at.error(elsewhere)


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
        (
            "one of two clusters has rules",
            ["--cluster", "a"],
            "has run train in cluster a, but Rankscope's rules are not loaded there (rule_files)",
        ),
        ("healthy", ["--run", "trian"], "has no run trian; it has: train"),
        ("without rules", [], "has run train, but Rankscope's rules are not loaded there (rule_files)"),
        ("without ranks", [], "had no run then: it scraped Rankscope exporters (1), but none showed a rank"),
        ("nothing", [], "had no run then and scraped no Rankscope exporter"),
    ],
)
def test_it_names_the_reason_if_there_is_nothing_to_explain(
    explain_at: Explain, moment: str, flags: list[str], error: str
) -> None:
    assert explain_at.error(moment, *flags).endswith(error)


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
    assert explain_now.error(moment).endswith(error)


def test_a_run_that_ended_without_a_fault_is_no_error(explain_at: Explain) -> None:
    first, second, *_ = explain_at.lines("ended")
    assert first.startswith("train: no live rank, ")
    assert second.startswith("No alert, and no figures")


def test_for_an_ended_run_it_says_which_time_to_ask_for(explain_at: Explain) -> None:
    when = "See the time before that with --at 1795283669."
    assert explain_at.text("ended with a time").endswith(f"its ranks have ended. {when}")
    outlived = explain_at.text("ended with an alert")
    assert "RankscopeRankZeroLagging" in outlived
    assert outlived.endswith(f"Its ranks have ended. {when}")


def test_the_only_live_run_of_several_is_explained(explain_at: Explain) -> None:
    assert explain_at.text("one of two runs lives").startswith("train: 4 ranks")
