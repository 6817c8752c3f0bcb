"""The screen of `rankscope top`: findings with advice, ranks with their time as bars, GPUs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from testing.families import family
from testing.judged_job import HUNG, JudgedJob
from testing.simulated_job import even, lagging

from rankscope.record.quantities import duration
from rankscope_exporter.report import describe
from rankscope_exporter.report.colors import PHASE_COLORS
from rankscope_exporter.report.gpus import GpuProblem, report_gpus
from rankscope_exporter.report.runs import NodeReport, report_of_look
from rankscope_exporter.report.values import Values
from rankscope_exporter.top.bars import BLOCK, LETTERS, OWN, bar, legend
from rankscope_exporter.top.trends import key_of
from rankscope_exporter.top.view import Screen, Shown, View

GPU = {"gpu": "0", "uuid": "GPU-a"}
PLAIN = Screen(80, has_color=False)


def shown(node: NodeReport, screen: Screen = PLAIN, error: str = "", values: Values | None = None) -> str:
    """Return the output on a terminal of that width."""
    out = io.StringIO()
    console = Console(file=out, width=screen.width, color_system="truecolor" if screen.has_color else None)
    console.print(View(Shown(node, report_gpus(values or Values([]), None, 0.0), error), screen))
    return out.getvalue()


def words(text: str) -> str:
    """Return the text without line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize(("lag", "text"), [(-0.0, "0%"), (-0.2, "0%"), (0.26, "26%"), (None, "")])
def test_a_rank_that_waits_longer_than_others_has_no_lag(run_dir: Path, lag: float | None, text: str) -> None:
    run = JudgedJob(run_dir).train(12)
    assert describe.lag(run, replace(run.ranks[0], lag_ratio=lag)) == text


def test_the_legend_has_a_line_break_only_between_two_names() -> None:
    lines = legend([dict.fromkeys(LETTERS, 0.1)], 40, "<: late", has_color=True).plain.splitlines()
    assert max(map(len, lines)) <= 40
    assert all(line.startswith((BLOCK, "<")) and not line.endswith(BLOCK) for line in lines)


LOST = GpuProblem("gpu_lost", "", "critical", "0", "GPU-a", 0.0, 240.0, 0.0, "GPU 0 is lost on node-a", "", "Drain it.")


def test_a_critical_problem_of_a_gpu_is_above_a_warning_and_said_once(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    job.train(20, lagging("optimizer"))
    lost = Values([family("gpu_up", (GPU, 0))])
    text = words(shown(replace(report_of_look(job.look), gpu_problems=[LOST]), values=lost))
    assert "CRITICAL for 4 min: GPU 0 is lost on node-a Drain it. WARNING for" in text
    assert "does not answer" not in text
    text = words(shown(report_of_look(job.look), values=lost))  # without an exporter, nothing alerts
    assert "GPU 0 does not answer. WARNING for" in text


def test_a_throttled_gpu_that_a_finding_names_is_said_once(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    (finding,) = job.train(20, lagging("optimizer")).findings
    (gpu,) = report_gpus(Values([family("gpu_up", (GPU, 1))]), None, 0.0)
    gpu = replace(gpu, throttled={"hw_thermal_slowdown": 0.9})
    assert describe.other_defects([gpu], [], [finding]) == [gpu]
    assert describe.other_defects([gpu], [], [replace(finding, cause="throttled", uuid=gpu.uuid)]) == []


def test_a_healthy_node_has_no_problem(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12)
    text = shown(report_of_look(job.look))
    assert "No problem found.\n" in text
    assert "4 of 4 ranks" in text
    assert " <" not in text


@pytest.fixture
def two_runs(run_dir: Path) -> NodeReport:
    """Return a node with a run that is whole here, and with a part of a run of another name."""
    whole, part = (JudgedJob(run_dir, run=run, world_size=size) for run, size in (("whole", "4"), ("part", "8")))
    for _ in range(12):
        for one in (part, whole):
            one.job.run(22, even)
        whole.poll(whole.now)
    return report_of_look(whole.look)


def test_a_run_of_several_nodes_is_not_called_free_of_problems(two_runs: NodeReport) -> None:
    text = shown(two_runs, Screen(120, has_color=True))
    assert "Run part is not diagnosed here: only 4 of its 8 ranks are on this node." in text
    assert "Otherwise, no problem found." in text
    assert "No problem found" not in text
    assert "Run part, uid 0\x1b[0m\x1b[2m: 4 of 8 ranks here, " in text
    (part,) = [run for run in two_runs.runs if run.run == "part"]
    text = shown(replace(two_runs, runs=[part]))
    assert "roblem found" not in text


def test_a_run_that_is_whole_here_is_shown_as_before(two_runs: NodeReport) -> None:
    (whole,) = [run for run in two_runs.runs if run.run == "whole"]
    text = shown(replace(two_runs, runs=[whole]))
    assert "No problem found.\n" in text
    assert "4 of 4 ranks, " in text
    assert "diagnosed" not in text


def test_an_ended_part_of_a_run_of_several_nodes_is_not_called_free_of_problems(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8").trained(12)
    job.poll(job.now + 1, ended=range(4))
    text = words(shown(report_of_look(job.look)))
    assert "No problem found" not in text
    assert "Run r is not diagnosed here: only 4 of its 8 ranks are on this node. Ranks 0-3 were killed. An" in text


def test_a_finding_has_a_sentence_and_advice_and_its_rank_is_marked(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    (finding,) = job.train(20, lagging("optimizer")).findings
    text = shown(report_of_look(job.look))
    assert finding.sentence in words(text)
    assert finding.advice in words(text)
    (marked,) = [line for line in text.splitlines() if line.endswith("<")]
    assert marked.split()[0] == "2"


def test_a_pending_candidate_is_shown_with_the_reason(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(60)
    job.wait(10, HUNG)
    text = words(shown(report_of_look(job.look)))
    assert "No problem found yet." in text
    assert (
        "Not yet an alert: Run r hangs: Rank 2 (node-a) is stuck in data_wait (it has not lasted long enough, " in text
    )


@pytest.mark.parametrize("width", [80, 79, 200])
def test_lines_fit_the_terminal_and_no_number_is_cut_off(run_dir: Path, width: int) -> None:
    job = JudgedJob(run_dir, ranks=4, run="a-run-" + "x" * 100).trained(10)
    job.train(20, lagging("optimizer"))
    gpu = [
        family("gpu_up", (GPU, 1)),
        family("gpu_state_info", ({**GPU, "state": "memory_held_by_dead"}, 1)),
        family("gpu_memory_used_bytes", (GPU, 79e9)),
        family("gpu_memory_total_bytes", (GPU, 80e9)),
        family("gpu_temperature_celsius", (GPU, 91)),
    ]
    text = shown(report_of_look(job.look), Screen(width, has_color=False), values=Values(gpu))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "91 C" in text


def test_without_color_only_text_is_written(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12, lagging("optimizer"))
    text = shown(report_of_look(job.look))
    assert "\x1b" not in text
    assert text.isascii()


def test_with_color_a_phase_has_its_color(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12)
    red, green, blue = bytes.fromhex(PHASE_COLORS["forward"].removeprefix("#"))
    assert f"\x1b[38;2;{red};{green};{blue}m█" in shown(report_of_look(job.look), Screen(80, has_color=True))


def test_a_name_is_neither_markup_nor_an_escape_sequence(run_dir: Path) -> None:
    job = JudgedJob(run_dir, run="[bold]:boom:").trained(3)
    node = report_of_look(job.look)
    assert "[bold]:boom:" in shown(node)
    hostile = replace(node.runs[0], run="\x1b[2J")
    assert "\x1b" not in shown(NodeReport(0.0, [hostile]))


def test_marked_ranks_are_shown_if_not_all_ranks_fit(run_dir: Path) -> None:
    job = JudgedJob(run_dir, ranks=8).trained(10)
    job.train(20, lagging("optimizer", laggard=6))
    text = shown(report_of_look(job.look), replace(PLAIN, height=14))
    assert "... and 5 more ranks: 2,3,4,5,7\n" in text
    ranks = [line.split()[0] for line in text.splitlines() if line[:4].strip().isdecimal()]
    assert ranks == ["0", "1", "6"]


@pytest.mark.parametrize("height", [*range(4, 40, 5), 100])
def test_the_screen_has_exactly_the_lines_of_the_terminal(run_dir: Path, height: int) -> None:
    job = JudgedJob(run_dir, ranks=8).trained(10)
    job.train(20, lagging("optimizer", laggard=6))
    assert len(shown(report_of_look(job.look), replace(PLAIN, height=height)).splitlines()) == height


def test_runs_that_do_not_fit_are_a_line_each_and_the_rest_is_counted(run_dir: Path) -> None:
    run = JudgedJob(run_dir).train(12)
    runs = [replace(run, run=f"run-{number}") for number in range(30)]
    text = shown(NodeReport(0.0, runs), replace(PLAIN, height=24))
    lines = text.count("Run run-")
    assert 5 < lines < 30
    assert f"... and {30 - lines} more runs\n" in text
    assert text.count("rank  GPU  now") == 1


@pytest.mark.parametrize("number", [0, 3, 29])
def test_a_chosen_run_is_shown_with_its_ranks_wherever_it_is(run_dir: Path, number: int) -> None:
    run = JudgedJob(run_dir).train(12)
    runs = [replace(run, run=f"run-{number}") for number in range(30)]
    text = shown(NodeReport(0.0, runs), replace(PLAIN, height=24, chosen=key_of(runs[number])))
    head = text.index(f"> Run run-{number}, uid 0: ")
    assert text.index("rank  GPU  now") > head
    assert not [line for line in text[head:].split("rank  GPU")[0].splitlines()[1:] if line.startswith("Run ")]


def test_problems_that_do_not_fit_are_counted(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    run = job.train(20, lagging("optimizer"))
    text = shown(NodeReport(0.0, [replace(run, findings=[*run.findings] * 20)]), replace(PLAIN, height=24))
    lines = text.count("WARNING for")
    assert 1 < lines < 20
    assert f"... and {20 - lines} more: rankscope top --once shows all\n" in text


@pytest.mark.parametrize(("before", "words"), [(0.0, "for at least "), (60.0, "for "), (None, "for ")])
def test_the_age_of_a_problem_that_was_there_at_once_is_a_lower_bound(
    run_dir: Path, before: float | None, words: str
) -> None:
    job = JudgedJob(run_dir).trained(10)
    (finding,) = job.train(20, lagging("optimizer")).findings
    watched_since = None if before is None else finding.since - before
    text = shown(report_of_look(job.look), replace(PLAIN, watched_since=watched_since))
    assert f"WARNING {words}{duration(finding.age_seconds)}: " in text


def test_the_worst_problem_of_all_runs_is_first(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    run = job.train(20, lagging("optimizer"))
    (finding,) = run.findings
    hung = replace(finding, severity="critical", sentence="It hangs")
    text = shown(NodeReport(0.0, [run, replace(run, run="hung", findings=[hung])]))
    assert text.index("It hangs") < text.index(finding.sentence[:20])


def test_unreadable_ranks_are_reported_as_an_error() -> None:
    text = shown(NodeReport(0.0, ()), error="the run directories have not been read for 5 s")
    assert "No data about the ranks" in text
    assert "No problem" not in text


def test_a_node_without_ranks_is_reported() -> None:
    assert "No rank records on this machine." in shown(NodeReport(0.0, ()))


@pytest.mark.parametrize("width", [1, 7, 24])
@pytest.mark.parametrize(
    "phases", [{"forward": 1.0}, {"forward": 0.3, "backward": 0.3, "mine": 0.4}, dict.fromkeys(LETTERS, 0.001)]
)
def test_a_bar_has_the_given_width_for_any_content(phases: dict[str, float], width: int) -> None:
    for has_color in (False, True):
        assert len(bar(phases, width, has_color=has_color)) == width


def test_a_bar_without_phases_is_empty() -> None:
    assert not bar({}, 24, has_color=True)


def test_a_bar_shows_each_phase_by_its_share_and_the_scripts_own_together() -> None:
    phases = {"forward": 0.5, "mine": 0.125, "collective_wait": 0.25, "yours": 0.125}
    assert bar(phases, 8, has_color=False).plain == "ffffww" + 2 * LETTERS[OWN]


def test_the_letters_of_a_bar_are_unique() -> None:
    assert len(set(LETTERS.values())) == len(LETTERS)
