"""The user's labels of ranks: one series per rank, and none from a record that no hook writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testing.records import publish

from rankscope.record.labels import MOST_LABELS, OWN_NAMES, VALUE_LIMIT
from rankscope_exporter.gpu.collector import GPU_LABELS
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.metric import RANK_LABELS
from rankscope_exporter.ranks.run_directory import RunDirectory

NAME = "rankscope_rank_labels_info"


def labels_on_the_page(run_dir: Path) -> list[dict[str, str]]:
    families = Ranks().poll(RunDirectory([run_dir]).scan())
    found = [sample for family in families if family.name == NAME for sample in family.samples]
    assert all(sample.value == 1 for sample in found)
    return [{name: value for name, value in sample.labels.items() if name != "owner"} for sample in found]


def test_each_rank_has_one_series_with_its_own_labels(run_dir: Path) -> None:
    records = [
        publish(run_dir, "a", rank="0", labels={"team": "nlp", "project": 'say "hi"'}),
        publish(run_dir, "b", rank="1", labels={"k8s_pod": "train-1"}),
        publish(run_dir, "c", rank="2"),
    ]
    assert sorted(labels_on_the_page(run_dir), key=lambda one: one["rank"]) == [
        {"run": "r", "rank": "0", "team": "nlp", "project": 'say "hi"'},
        {"run": "r", "rank": "1", "k8s_pod": "train-1"},
    ]
    assert len(records) == 3


@pytest.mark.parametrize(
    "labels",
    [
        {"rank": "3"},
        {"__name__": "up"},
        {'x"} 1\nup{a': "b"},
        {"team": "a\nb"},
        {"team": ""},
        {"team": 7},
        {"team": "x" * (VALUE_LIMIT + 1)},
        {f"name_{number}": "x" for number in range(MOST_LABELS + 1)},
        ["team"],
        "team=nlp",
        None,
    ],
)
def test_a_record_with_labels_that_no_hook_writes_is_refused(run_dir: Path, labels: Any) -> None:
    record = publish(run_dir, labels=labels)
    scan = RunDirectory([run_dir]).scan()
    assert (scan.ranks, scan.skipped["foreign"]) == ((), 1)
    assert record


def test_users_cannot_use_names_of_rank_or_gpu_labels() -> None:
    assert {*RANK_LABELS, *LABELS, *GPU_LABELS, "user"} <= OWN_NAMES
