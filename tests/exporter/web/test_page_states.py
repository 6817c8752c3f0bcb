"""The status page says what is wrong in each state of a node, and nothing false if a fact is missing."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from testing import page_states
from testing.page_states import STATES, Families, State, render, state

from rankscope.record.quantities import percent
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.web.status_assets import COLORS

SAID: Mapping[str, list[str]] = {
    "healthy": ["No problem found in 1 run, 4 ranks, 4 GPUs."],
    "straggler": ["Warning: Rank 2 (node-a) slows down run r by 26%: a slow optimizer step"],
    "hang": ["Critical: Run r hangs: Rank 2 (node-a) is stuck in data_wait"],
    "crash": ["Critical: Rank 1 (node-a) of run r was killed"],
    "xid 79": [
        "Critical: GPU 1 is lost on node-a",
        "Critical: XID 79 on GPU 1 of node-a: a fault of hardware or firmware",
    ],
    "xid 48": ["Critical: XID 48 on GPU 1 of node-a: a fault of hardware or firmware"],
    "culprit": ["Warning: GPU 1 on node-a was the culprit in 4 runs within a week"],
    "held memory": ["Warning: GPU 2 on node-a is idle, but 20 GiB of its memory is allocated"],
    "unused": ["Warning: GPU 3 on node-a is allocated, but no process uses it"],
    "idle": ["Warning: GPU 1 on node-a has been idle for 20 min, though rank 1 of run r owns it"],
    "two runs": ["Warning: Rank 2 (node-a) slows down run second by 26%: a slow optimizer step"],
    "no run": ["No problem found in 4 GPUs."],
}
TITLES = {"healthy": "No problem", "no run": "No problem", "xid 79": "2 problems"}
WORSE = {"hang", "crash", "xid 79", "xid 48"}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], State]:
    """Return a function that returns a state, which all tests share."""
    return cache(lambda name: state(name, tmp_path_factory.mktemp("ranks")))


@pytest.fixture
def known(states: Callable[[str], State], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> State:
    found = states(request.param)
    monkeypatch.setattr(found.reporter, "complete", lambda node: node)
    return found


def text(part: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", part)).split())


def said(page: str) -> list[str]:
    """Return the sentences of the verdict."""
    verdict = page.partition('<section class="verdict')[2].partition("</section>")[0]
    found = re.findall(r'<(p|span) class="said">(.*?)</\1>', re.sub(r"</?b[^>]*>", "", verdict))
    return [text(part) for _, part in found]


def body(page: str) -> str:
    """Return all text of the page."""
    return text(page.partition("<main>")[2].partition("<nav")[0])


@pytest.mark.parametrize("known", SAID, indirect=True)
def test_the_verdict_names_the_problem_of_the_state_and_no_other(known: State, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["known"]
    page = render(known)
    assert said(page) == SAID[name]
    title = TITLES.get(name, "1 problem")
    assert f"<title>{title} · node-a · Rankscope exporter</title>" in page
    kind = "good" if title == "No problem" else "bad" if name in WORSE else "warn"
    assert f'class="verdict {kind}"' in page
    assert "`" not in body(page)


@pytest.mark.parametrize("known", SAID, indirect=True)
def test_the_page_and_the_api_say_the_same(known: State) -> None:
    page, node = render(known), known.reporter.report()
    problems = [*(one for run in node.runs for one in run.findings), *node.gpu_problems]
    sentences = [one.partition(": ")[2] for one in said(page) if not one.startswith("No problem")]
    assert sorted(sentences) == sorted(one.sentence for one in problems)
    assert all(" ".join(one.advice.replace("`", "").split()) in body(page) for one in problems)


@pytest.mark.parametrize("known", ["straggler"], indirect=True)
def test_the_row_of_a_straggler_has_the_number_of_its_finding(known: State) -> None:
    report = known.reporter.report()
    (run,) = report.runs
    ranks = [replace(rank, lag_ratio=rank.lag_ratio and 0.5 * rank.lag_ratio) for rank in run.ranks]
    known.reporter.complete = lambda node: replace(node, runs=[replace(run, ranks=ranks)])
    page = body(render(known))
    assert f"{percent(run.findings[0].ratio)}, late" in page
    assert "lost: " not in page


@pytest.mark.parametrize("known", ["straggler"], indirect=True)
def test_each_row_of_several_late_ranks_has_its_own_number(known: State) -> None:
    (run,) = known.reporter.report().runs
    lags = {1: 0.31, 2: 0.22}
    ranks = [replace(rank, lag_ratio=lags.get(rank.rank, 0.0)) for rank in run.ranks]
    findings = [replace(run.findings[0], rank=None, ranks=(1, 2))]
    known.reporter.complete = lambda node: replace(node, runs=[replace(run, ranks=ranks, findings=findings)])
    page = body(render(known))
    assert page.count(", late") == 2
    assert "31%, late" in page
    assert "22%, late" in page


@pytest.mark.parametrize("known", ["crash"], indirect=True)
def test_a_crash_was_some_time_ago(known: State) -> None:
    assert re.search(r'class="age">\d+ s ago<', render(known))


@pytest.mark.parametrize("known", ["hang"], indirect=True)
def test_a_hang_shows_no_wait_and_no_lag_from_before_it(known: State) -> None:
    page = body(render(known))
    assert "no progress for 5.2 min" in page
    assert page.count("no progress") == 1
    assert "waits and lags are unknown" in page
    assert "11%" not in page


@pytest.mark.parametrize("known", ["held memory"], indirect=True)
def test_a_gpu_with_held_memory_is_marked_and_not_called_working(known: State) -> None:
    page = render(known)
    (row,) = re.findall(r"<tr[^>]*><td[^>]*>2</td>(?:(?!</tr>).)*GiB|<tr[^>]*><td[^>]*>2</td>.*?process no work", page)
    assert row.startswith('<tr class="warn">')
    assert "20 GiB of 80 GiB is allocated on the GPU (GPU-2), which has 1 process" in body(page)
    assert "First run nvidia-smi on node-a" in body(page)
    assert "docs/runbooks/RankscopeGpuMemoryHeldIdle.md" in page


def test_a_gpu_without_a_kernel_for_some_seconds_is_not_called_working(run_dir: Path) -> None:
    families = page_states.changed(0, last_busy_timestamp_seconds=page_states.NOW - 45.0)
    page = render(State(families, page_states.no_run(run_dir)))
    assert ">no work for 45 s</td>" in page
    assert page.count('good">working</td>') == page_states.GPUS - 1


def test_what_will_alert_if_it_lasts_is_shown_as_such(run_dir: Path) -> None:
    families = page_states.without_rank(2, "process_no_work", page_states.NOW - 300.0)
    families["gpu_memory_unused_since_timestamp_seconds"] = [
        (page_states.gpu(2, since="allocation"), page_states.NOW - 300.0)
    ]
    page = render(State(families, page_states.no_run(run_dir)))
    assert said(page) == ["No problem found yet in 4 GPUs."]
    assert "Not yet an alert: GPU 2 on node-a is idle, but 48 GiB of its memory is allocated" in body(page)
    assert "(it has not lasted long enough, 5 min more)" in body(page)


def test_memory_of_a_dead_process_is_shown_once(run_dir: Path) -> None:
    families = page_states.held()
    families["gpu_state_info"] = page_states.without_rank(2, "memory_held_by_dead", page_states.NOW)["gpu_state_info"]
    assert said(render(State(families, page_states.no_run(run_dir)))) == SAID["held memory"]
    families["gpu_memory_unused_since_timestamp_seconds"] = [
        (page_states.gpu(2, since="kernel"), page_states.NOW - 300.0)
    ]
    page = render(State(families, page_states.no_run(run_dir)))
    assert said(page) == ["No problem found yet in 4 GPUs."]
    assert "its memory is allocated (it has not lasted long enough, 5 min more)" in body(page)


def test_a_node_without_a_run_says_how_to_start_one(run_dir: Path) -> None:
    page = render(state("no run", run_dir))
    assert "with <code>rankscope run -- torchrun train.py</code>." in page


@pytest.mark.parametrize("known", ["healthy"], indirect=True)
def test_the_charts_show_the_last_minutes_of_gpus_and_runs(known: State, run_dir: Path) -> None:
    page = render(known)
    assert page.count('aria-label="busy 80% to 80% in the last 10 min"') == page_states.GPUS
    assert "Steps per second, last 10 min now 22, highest 22" in body(page)
    assert "<polyline" not in render(state("no run", run_dir))


OPTIONAL = {"much of its memory": "20 GiB of its memory", "has been idle, though": "has been idle for 20 min, though"}
GONE = ("No problem found", "Critical: 1 GPU is lost on node-a")
"""What is said without the metric that shows a problem; of a GPU without `gpu_up`, the alert says the second, too."""


def evidence(page: str) -> list[str]:
    return [text(part) for part in re.findall(r'<span class="evidence">(.*?)</span>', page)]


def is_part(said: str, everything: str) -> bool:
    """Return whether the words of a text are in another one, in the same order."""
    words: Iterator[str] = iter(re.findall(r"[\w-]+", everything))
    return all(word in words for word in re.findall(r"[\w-]+", said))


@pytest.mark.parametrize("missing", sorted({family for families, _ in STATES.values() for family in families()}))
@pytest.mark.parametrize("known", ["xid 79", "held memory", "unused", "idle", "healthy"], indirect=True)
def test_nothing_false_is_said_without_a_metric(known: State, missing: str, request: pytest.FixtureRequest) -> None:
    everything = render(known)
    families: Families = {name: samples for name, samples in known.families.items() if name != missing}
    page = render(known._replace(families=families))
    for sentence in said(page):
        full = next((sentence.replace(*pair) for pair in OPTIONAL.items() if pair[0] in sentence), sentence)
        assert full in said(everything) or sentence.startswith(GONE)
    for words in evidence(page) if missing != "gpu_up" else ():
        assert any(is_part(words.replace("Much is", "is"), full) for full in evidence(everything))
    assert not re.search(r"None|nan|\{|\}|\[|\]", body(page))


@pytest.mark.parametrize("field", [one.name for one in fields(RankReport) if "None" in str(one.type)])
@pytest.mark.parametrize("known", ["straggler", "hang", "crash"], indirect=True)
def test_nothing_false_is_said_without_a_fact_about_the_ranks(known: State, field: str) -> None:
    everything = said(render(known))
    node = known.reporter.report()
    empty: Mapping[str, Any] = {field: None}
    ranks = [replace(run, ranks=[replace(rank, **empty) for rank in run.ranks]) for run in node.runs]
    known.reporter.complete = lambda node: replace(node, runs=ranks)
    page = render(known)
    assert said(page) == everything
    assert not re.search(r"None|nan", body(page))


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("behind", ["page", "warn-row", "bad-row"])
@pytest.mark.parametrize("color", ["text", "dim", "link", "good", "warn", "bad"])
def test_each_color_of_text_has_the_contrast_of_wcag_aa(color: str, behind: str, scheme: int) -> None:
    light, dark = sorted((luminance(COLORS[name][scheme]) for name in (color, behind)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5
