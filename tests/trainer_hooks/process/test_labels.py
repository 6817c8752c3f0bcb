"""RANKSCOPE_LABELS: valid labels of a rank, and the warning about invalid ones."""

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
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("invalid", "reason"),
    [
        ("nlp", "not NAME=VALUE"),
        ("=nlp", "the name is not valid in Prometheus"),
        ("my-team=nlp", "the name is not valid in Prometheus"),
        ("7team=nlp", "the name is not valid in Prometheus"),
        ("__name__=up", "the name is not valid in Prometheus"),
        ("tëam=nlp", "the name is not valid in Prometheus"),
        (f"{'t' * 41}=nlp", "has more than 40 characters"),
        ("rank=3", "rank is a reserved label"),
        ("job=nlp", "job is a reserved label"),
        ("instance=nlp", "instance is a reserved label"),
        ("kept=twice", "kept is a duplicate"),
        (f"team={'x' * (VALUE_LIMIT + 1)}", "the value is not printable text of 1 to 128 characters"),
        ("team=a\nb", "the value is not printable text of 1 to 128 characters"),
        ("team=\x1b[2J", "the value is not printable text of 1 to 128 characters"),
    ],
)
def test_an_invalid_label_is_logged_and_the_others_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, invalid: str, reason: str
) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", f"kept=yes,{invalid},too=yes")
    for _ in range(2):
        assert environment.labels("RANKSCOPE_LABELS") == {"kept": "yes", "too": "yes"}
    (line,) = caplog.messages
    assert line.startswith("rankscope: RANKSCOPE_LABELS has invalid labels, ignoring them: ")
    assert reason in line
    assert line.isprintable()


def test_excess_labels_are_omitted_and_the_line_stays_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", as_list(MANY) + "," + ",".join(f"more_{n}={'x' * 99}" for n in range(500)))
    assert environment.labels("RANKSCOPE_LABELS") == MANY
    (line,) = caplog.messages
    assert line.count("a rank has at most 10") == 3
    assert line.endswith(" and 497 more")


@pytest.mark.usefixtures("hook_fails_loudly")
@pytest.mark.parametrize(("text", "labels"), [("team=nlp,rank=3", {"team": "nlp"}), ("", None)])
def test_the_record_has_the_labels(monkeypatch: pytest.MonkeyPatch, text: str, labels: dict[str, str] | None) -> None:
    monkeypatch.setenv("RANKSCOPE_LABELS", text)
    rankscope.instrument()
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert snapshot().info.get("labels") == labels
    assert snapshot().info["rank"] == "0"
