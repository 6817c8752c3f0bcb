"""The texts of alerts as promtool renders them: advice, and formats of numbers."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from deploy.prometheus import packaged_texts, render
from deploy.prometheus.shipped import HERE
from deploy.prometheus.thresholds import SPEEDS, Thresholds
from testing import promtool
from tests.rules.diagnosis_cases import laggard, late

CPU, READS = 'rankscope_rank_cpu_seconds_total{who="training"}', "rankscope_rank_read_bytes_total"
WAITS = "it waits for a disk, the network or another process."
COMPUTES = "it computes."
READS_MUCH = "MiB/s from storage."
OUTSIDE = {
    # The rank is in `other` for a third of the time.
    "waits and reads": ({CPU: 0.1, READS: 5e7}, {WAITS, READS_MUCH}),
    "waits and reads nothing": ({CPU: 0.1, READS: 0.0}, {WAITS}),
    "computes": ({CPU: 1.0}, {COMPUTES}),
    "computes in several threads": ({CPU: 3.0}, set()),
    "does some of both": ({CPU: 0.6}, set()),
    "is not visible": ({}, set()),
    "computes without a GPU": ({CPU: 1.0}, set()),
    "waits without a GPU": ({CPU: 0.1}, {WAITS}),
}


def outside(name: str) -> promtool.Case:
    """Return rank 2 with work outside the model and these figures of its process."""
    ranks = {rank: {**figures, CPU: 1.0} for rank, figures in late(2, "other").items()}
    ranks[2] = {**late(2, "other")[2], **OUTSIDE[name][0]}
    return promtool.Case(name, promtool.Fault(ranks), (laggard(2, "other"),))


@pytest.fixture(scope="module")
def descriptions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the descriptions by run."""
    speed = replace(promtool.PRODUCTION, quiet=30, faulty=40)
    test = promtool.all_of(map(outside, OUTSIDE), speed) | {"promql_expr_test": []}
    for one in test["input_series"]:
        if "without-a-GPU" in one["series"]:
            one["series"] = re.sub(r'uuid="[^"]*"', 'uuid=""', one["series"])
    complaint = promtool.complaint(test, speed, tmp_path_factory.mktemp("texts") / "test.yml")
    return {
        run: description.replace('\\"', '"')
        for run, description in re.findall(r'run="([^"]*)".*?description="((?:[^"\\]|\\.)*)"', complaint, re.DOTALL)
    }


@pytest.mark.parametrize("name", OUTSIDE)
def test_work_outside_the_model_is_distinguished_from_waiting(descriptions: dict[str, str], name: str) -> None:
    description = descriptions[name.replace(" ", "-")]
    assert {words for words in (WAITS, COMPUTES, READS_MUCH) if words in description} == OUTSIDE[name][1]


def test_its_advice_names_the_stacks_and_batches_outside_a_loader(descriptions: dict[str, str]) -> None:
    for description in descriptions.values():
        assert " First run `rankscope stacks --rank 2` on node-a to see where it is. " in description
        assert description.endswith('(`get_batch()`), wrap that in `rankscope.phase("data_wait")`.')


VALUES = {
    "percent": {0.9783333: "98%", 1.0: "100%", 0.06292: "6.3%", 0.0071: "0.71%", 0.0: "0%", 1.234: "120%"},
    "duration": {0.0123: "0.012 s", 99.4: "99 s", 127.4: "2.1 min", 5969.0: "99 min", 9000.0: "2.5 h", 9e5: "10 days"},
    "number": {0.00123: "0.0012", 3.456: "3.5", 99.7: "100", 1234.5: "1234"},
    "bytes": {5e7: "47 MiB", 21474836480.0: "20 GiB", 1.5e9: "1.3 GiB", 1048576.0: "1 MiB"},
    'count "rank" "ranks"': {1.0: "1 rank", 2.0: "2 ranks"},
}


@pytest.mark.parametrize(
    ("form", "number", "text"), [(form, number, text) for form, of in VALUES.items() for number, text in of.items()]
)
def test_numbers_in_texts_have_two_digits(tmp_path: Path, form: str, number: float, text: str) -> None:
    alert = f"- alert: RankscopeSome\n  expr: some\n  annotations:\n    summary: '{{{{ $value | {form} }}}}'\n"
    values = render.Values(Thresholds({}), {}, SPEEDS[0], ())
    rules = tmp_path / "rules.yml"
    rendered = textwrap.indent(render.render(alert, values, "some.yml"), "  ")
    rules.write_text(f"groups:\n- name: some\n  rules:\n{rendered}")
    test = {
        "interval": "15s",
        "input_series": [{"series": "some", "values": f"{number}x1"}],
        "alert_rule_test": [{"alertname": "RankscopeSome", "eval_time": "0s", "exp_alerts": []}],
    }
    assert f'summary="{text}"' in promtool.complaint(test, promtool.PRODUCTION, tmp_path / "test.yml", rules)


TEXTS = {
    **{path.name: path.read_text() for path in render.sources() if path.parent.name != "recording"},
    "causes.yml": (HERE / "causes.yml").read_text(),
    "alertmanager.yml": packaged_texts.ALERTMANAGER.read_text(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_have_no_other_formats_of_percentages_and_durations(name: str) -> None:
    texts = re.sub(r"(?m)^ *#.*$", "", TEXTS[name]).replace(r'reReplaceAll "\\s+"', "")
    assert not re.findall(r"humanize(?:Percentage|Duration|1024)?\b|%\.[1-9]f|%\.\d*[eg]| %(?!q)|\d%", texts)


def test_what_a_rank_spends_more_than_the_others_is_shown_only_if_it_is_more() -> None:
    (query,) = re.findall(r"printf `(rank:rankscope_phase_excess:ratio\{[^`]*)`", TEXTS["lagging.yml"])
    assert query.endswith("} > 0")
