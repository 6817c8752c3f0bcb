"""RANKSCOPE_LABELS: what a user may call a rank, and what is said of the rest."""

from __future__ import annotations

import pytest
import torch
from testing.own_record import snapshot

import rankscope
from rankscope.process import environment
from rankscope.record.labels import MOST_LABELS, VALUE_LIMIT

MANY = {f"name_{number}": "value" for number in range(MOST_LABELS)}


def as_list(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_warned", set())


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("", {}),
        (" , ,", {}),
        ("team=nlp", {"team": "nlp"}),
        (" team = nlp , project=llama 3 ,", {"team": "nlp", "project": "llama 3"}),
        ("query=a=b", {"query": "a=b"}),
        ("k8s_namespace=ml,k8s_pod=train-0-x7k2p", {"k8s_namespace": "ml", "k8s_pod": "train-0-x7k2p"}),
        ("team=,project=llama", {"project": "llama"}),
        ("team=Übersetzung", {"team": "Übersetzung"}),
        (f"team={'x' * VALUE_LIMIT}", {"team": "x" * VALUE_LIMIT}),
        (as_list(MANY), MANY),
    ],
)
def test_labels_are_names_with_values(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, labels: dict[str, str]
) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", text)
    assert environment.labels("RANKSCOPE_LABELS") == labels
    assert not caplog.records


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("nlp", "no NAME=VALUE"),
        ("=nlp", "the name is no name of a Prometheus label"),
        ("my-team=nlp", "the name is no name of a Prometheus label"),
        ("7team=nlp", "the name is no name of a Prometheus label"),
        ("__name__=up", "the name is no name of a Prometheus label"),
        ("tëam=nlp", "the name is no name of a Prometheus label"),
        (f"{'t' * 41}=nlp", "has more than 40 characters"),
        ("rank=3", "rank is a label of Rankscope's own"),
        ("job=nlp", "job is a label of Rankscope's own"),
        ("instance=nlp", "instance is a label of Rankscope's own"),
        ("kept=twice", "kept is named twice"),
        (f"team={'x' * (VALUE_LIMIT + 1)}", "the value is no printable text of 1 to 128 characters"),
        ("team=a\nb", "the value is no printable text of 1 to 128 characters"),
        ("team=\x1b[2J", "the value is no printable text of 1 to 128 characters"),
    ],
)
def test_one_that_is_wrong_costs_a_line_and_no_other_label(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str, reason: str
) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", f"kept=yes,{wrong},too=yes")
    for _ in range(2):
        assert environment.labels("RANKSCOPE_LABELS") == {"kept": "yes", "too": "yes"}
    (line,) = caplog.messages
    assert line.startswith("rankscope: RANKSCOPE_LABELS has labels that are not used: ")
    assert reason in line
    assert line.isprintable()


def test_too_many_are_left_out_and_the_line_stays_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", as_list(MANY) + "," + ",".join(f"more_{n}={'x' * 99}" for n in range(500)))
    assert environment.labels("RANKSCOPE_LABELS") == MANY
    (line,) = caplog.messages
    assert line.count("a rank has at most 10") == 3
    assert line.endswith(" and 497 more")


@pytest.mark.usefixtures("hook_fails_loudly")
@pytest.mark.parametrize(("text", "labels"), [("team=nlp,rank=3", {"team": "nlp"}), ("", None)])
def test_the_record_of_a_rank_that_trains_has_them(
    monkeypatch: pytest.MonkeyPatch, text: str, labels: dict[str, str] | None
) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", text)
    rankscope.instrument()
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert snapshot().info.get("labels") == labels
    assert snapshot().info["rank"] == "0"
