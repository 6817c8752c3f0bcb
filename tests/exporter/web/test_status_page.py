"""The status page: problems, the state of each rank, and the GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample
from testing.families import family
from testing.judged_job import HUNG, JudgedJob
from testing.records import publish
from testing.simulated_job import lagging

from rankscope.record.layout import INDEX
from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.collectors.ranks import SKIP_REASONS, SKIPPED
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.web.status_page import render_status
from rankscope_exporter.web.status_runs import SHOWN, run_section

GPU = {"gpu": "0", "uuid": "GPU-a"}
LABELS = {"source": "slurm", "slurm_job_id": "4242", "slurm_job_name": "", "run": "digits", "rank": "10", "user": "eve"}


def top(page: str) -> str:
    """Return the text above the tables."""
    section = page.partition('<section class="verdict')[2].partition("</section>")[0]
    return re.sub(r"<[^>]*>", " ", section.partition(">")[2])


def row(page: str, rank: int) -> str:
    """Return the HTML of a rank's row."""
    (found,) = re.findall(rf"<tr[^>]*><td[^>]*>{rank}</td>.*?</tr>", page.partition("<h2>GPUs")[0])
    return str(found)


def gpus(**values: float) -> list[Metric]:
    """Return the metric families of one GPU that is up."""
    return [family("gpu_up", (GPU, 1)), *(family(f"gpu_{name}", (GPU, value)) for name, value in values.items())]


def test_a_healthy_run_has_no_problem(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12)
    page = render_status([], job.reporter())
    assert "No problem found " in top(page)
    assert "1 run, 4 ranks" in top(page)
    assert 'class="verdict good"' in page
    assert ", late" not in page


def test_a_straggler_is_shown_at_the_top_and_marked_in_its_run(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    run = job.train(20, lagging("optimizer"))
    page = render_status([], job.reporter())
    assert run.findings[0].sentence in top(page)
    assert run.findings[0].advice in top(page)
    assert "No problem found" not in page
    assert "%, late" in row(page, 2)
    assert row(page, 2).startswith('<tr class="bad">')
    assert row(page, 1).startswith("<tr>")
    assert "<title>1 problem · Rankscope exporter</title>" in page


def test_a_pending_finding_is_shown_below_no_problem_found_yet(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(60)
    job.wait(10, HUNG)
    page = render_status([], job.reporter())
    assert "No problem found yet" in top(page)
    assert 'class="verdict warn"' in page
    assert "Not yet an alert: Run r hangs: Rank 2 (node-a) is stuck in data_wait" in top(page)
    assert row(page, 2).startswith('<tr class="warn">')


def test_the_stuck_rank_of_a_hanging_run_is_red_and_those_that_wait_are_not(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(60)
    job.wait(310, HUNG)
    page = render_status([], job.reporter())
    assert "Run r hangs: Rank 2" in top(page)
    assert ['class="text bad">' in row(page, rank) for rank in range(4)] == [False, False, True, False]
    assert "data_wait for 5.2 min" in row(page, 2)


def test_of_a_large_run_the_marked_ranks_and_the_first_ones_are_shown(run_dir: Path) -> None:
    run = JudgedJob(run_dir).trained(10).train(20, lagging("optimizer"))
    late = SHOWN + 4
    ranks = [replace(run.ranks[0], rank=rank) for rank in range(SHOWN + 6)]
    page = run_section(replace(run, ranks=ranks, findings=[replace(run.findings[0], rank=late, ranks=(late,))]))
    assert "%, late" in row(page, late)
    assert row(page, SHOWN - 2)
    assert f'<td class="text">{SHOWN - 1}</td>' not in page
    assert "6 more ranks: see /api/v1/runs." in page


def test_a_column_without_any_text_is_left_out(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12)
    assert ">waits</th>" in render_status([], job.reporter())
    job.poll(job.now + 1, ended=range(4))
    page = render_status([], job.reporter())
    assert ">waits</th>" not in page
    assert ">steps</th>" in page


def test_an_ended_rank_is_shown_with_reason_and_time(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12)
    job.poll(job.now + 1, ended=[1])
    assert re.search(r">killed, \d+ s ago<", row(render_status([], job.reporter()), 1))


def test_a_run_that_is_not_diagnosed_here_is_shown_with_the_reason(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8").trained(12)
    page = render_status(gpus(), job.reporter())
    assert "Run r is not diagnosed here: only 4 of its 8 ranks are on this node." in top(page)
    assert "Otherwise, no problem found in 1 GPU." in top(page)
    assert "No problem found" not in page
    assert 'class="verdict unknown"' in page


def test_the_end_of_a_run_of_several_nodes_is_not_shown_as_good(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8").trained(12)
    job.poll(job.now + 1, ended=range(4))
    page = render_status(gpus(), job.reporter())
    assert "Ranks 0-3 were killed. " in top(page)
    assert 'class="verdict warn"' in page


def test_a_finding_of_another_run_is_shown_above_a_run_that_is_not_diagnosed(run_dir: Path) -> None:
    publish(run_dir, "s.0", {"started_monotonic": 900.0}, run="spans", rank="0", group="0-7", world_size="8")
    job = JudgedJob(run_dir)
    for _ in range(30):
        job.job.run(14, lagging("optimizer"))
        job.poll(job.now)
    page = top(render_status(gpus(), job.reporter()))
    assert page.index("slows down run r by") < page.index("Run spans is not diagnosed here")
    assert "roblem found" not in page


def test_the_analyzer_is_text_and_no_link(run_dir: Path) -> None:
    reporter = JudgedJob(run_dir, world_size="8").trained(2).reporter()
    reporter.analyzer.record_pull("analyzer-0:10418")
    page = render_status([], reporter)
    assert "Diagnosed by the analyzer at analyzer-0:10418." in top(page)
    assert page.count("analyzer-0") == 1


def test_ranks_are_sorted_by_number(run_dir: Path) -> None:
    job = JudgedJob(run_dir, ranks=11).trained(2)
    page = render_status([], job.reporter())
    assert re.findall(r"<tr[^>]*><td[^>]*>(\d+)</td>", page) == [str(rank) for rank in range(11)]


@pytest.mark.parametrize(
    ("steps", "passes", "marker", "shown"),
    [
        (7, 28, "optimizer", "7"),
        (0, 0, "", "0"),
        (0, 57, "", "0 in 57 backward passes"),
        (15, 115, "backward_pass", "15 (backward passes)"),
    ],
)
def test_steps_counted_by_backward_passes_are_labeled(
    run_dir: Path, steps: int, passes: int, marker: str, shown: str
) -> None:
    job = JudgedJob(run_dir, ranks=1, settings={"step_marker": marker})
    slots = job.job.ranks[0].writer.slots
    slots[INDEX["steps"]], slots[INDEX["micro_steps"]] = steps, passes
    job.poll(job.now + 1)
    assert f">{shown}</td>" in render_status([], job.reporter())


def test_unread_ranks_are_reported_instead_of_no_problem() -> None:
    page = render_status([], Reporter(lambda: None, lambda: None))
    assert "No data about the ranks: " in top(page)
    assert 'class="verdict bad"' in page
    assert "No problem found" not in page


def test_custom_phases_are_shown(run_dir: Path) -> None:
    job = JudgedJob(run_dir, phases=["<augment>"]).trained(
        12, lambda _step, _rank: {"forward": 0.03, "<augment>": 0.01}
    )
    page = render_status([], job.reporter())
    assert 'class="p-own"' in row(page, 0)
    assert "&lt;augment&gt; " in row(page, 0)


def test_texts_from_users_are_escaped(run_dir: Path) -> None:
    job = JudgedJob(run_dir, run="<img>", node="<b>").trained(10)
    job.train(20, lagging("optimizer"))
    page = render_status(gpus(), job.reporter())
    assert "run &lt;img&gt;" in page
    assert "(&lt;b&gt;" in page
    assert "<img" not in page
    assert "Simulated &lt;H100&gt;" in render_status(
        [*gpus(), family("gpu_info", ({**GPU, "name": "Simulated <H100>"}, 1))]
    )


def test_a_gpus_allocation_and_state_are_shown() -> None:
    state = [family("gpu_state_info", ({**GPU, "state": "process_no_work"}, 1))]
    page = render_status([*gpus(), *state, family("gpu_allocation_info", ({**GPU, **LABELS}, 1))])
    assert "job 4242, run digits, rank 10, user eve" in page
    assert "process no work" in page


@pytest.mark.parametrize(("busy_seconds", "text"), [(7.5, "30 s ago"), (0.0, "not in the last 30 s")])
def test_a_gpu_that_was_never_busy_is_shown_as_such(busy_seconds: float, text: str) -> None:
    values = gpus(busy_seconds_total=busy_seconds, last_busy_timestamp_seconds=70.0)
    assert f">{text}<" in render_status(values, now=100.0)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([family("gpu_up", (GPU, 0))], "GPU 0 does not answer."),
        (gpus(temperature_celsius=91.0, temperature_margin_celsius=1.0), "GPU 0 is hot: 91 °C."),
        (gpus(temperature_celsius=91.0, temperature_margin_celsius=9.0), ""),
        (
            [
                *gpus(temperature_celsius=91.0),
                family("gpu_temperature_threshold_celsius", ({**GPU, "threshold": "slowdown"}, 92)),
            ],
            "GPU 0 is hot: 91 °C.",
        ),
        (
            [
                *gpus(temperature_celsius=88.0),
                family("gpu_temperature_threshold_celsius", ({**GPU, "threshold": "slowdown"}, 92)),
            ],
            "",
        ),
        (
            [*gpus(), family("gpu_state_info", ({**GPU, "state": "memory_held_by_dead"}, 1))],
            "GPU 0 has memory that a dead process holds.",
        ),
        ([*gpus(), family("gpu_state_info", ({**GPU, "state": "working"}, 1))], ""),
        (
            [*gpus(), family("gpu_culprit_runs", ({**GPU, "node": "node-a"}, 3))],
            "GPU 0 was the culprit in 3 runs within a week.",
        ),
        ([*gpus(), family("gpu_culprit_runs", ({**GPU, "node": "node-a"}, 2))], ""),
    ],
)
def test_a_gpu_with_a_problem_is_shown_at_the_top(values: list[Metric], problem: str) -> None:
    page = render_status(values)
    assert (problem or "No problem found") in top(page)
    assert ('class="verdict warn"' in page) == bool(problem)


@pytest.mark.parametrize(
    ("reason", "seconds", "is_problem"),
    [("hw_thermal_slowdown", 0.5, True), ("hw_thermal_slowdown", 0.1, False), ("sw_power_cap", 0.9, False)],
)
def test_a_throttled_gpu_is_marked_unless_it_is_at_its_power_limit(
    run_dir: Path, reason: str, seconds: float, is_problem: bool
) -> None:
    def read(at: float) -> Mapping[str, RankGpu]:
        return {"GPU-a": RankGpu(GpuReading("0"), GpuCounters(0.75 * at, {reason: seconds * at}, None))}

    job = JudgedJob(run_dir, gpus=read).trained(12)
    page = render_status(gpus(), job.reporter())
    assert f"{reason.replace('_', ' ')} {seconds:.0%}" in page
    assert ">75%<" in page
    assert ("GPU 0 is throttled" in top(page)) == is_problem


def test_samples_are_made_once_and_only_of_families_that_are_shown() -> None:
    class Counted(GaugeMetricFamily):
        reads = 0

        @property
        def samples(self) -> list[Sample]:
            self.reads += 1
            return [Sample(self.name, {"gpu": str(gpu), "uuid": f"GPU-{gpu}"}, 1.0) for gpu in range(8)]

        @samples.setter
        def samples(self, _: list[Sample]) -> None:
            """Ignore the value, which Metric's constructor sets."""

    shown, other = Counted("rankscope_gpu_up", "Up."), Counted("rankscope_gpu_clock_hertz", "Clock.")
    assert ">7<" in render_status([shown, other])
    assert (shown.reads, other.reads) == (1, 0)


def test_skipped_files_are_counted_by_reason() -> None:
    page = render_status([SKIPPED.family({**dict.fromkeys(SKIP_REASONS, 0), "too_many_ranks": 3})])
    assert "Skipped files: over the limit of ranks (3).<" in page
    assert "Skipped files" not in render_status([])


def test_no_records_and_only_skipped_records_are_different_texts() -> None:
    nothing = SKIPPED.family(dict.fromkeys(SKIP_REASONS, 0))
    old = SKIPPED.family({**dict.fromkeys(SKIP_REASONS, 0), "version": 4})
    assert "No rank records on this machine." in render_status([nothing])
    page = render_status([old])
    assert "No rank to show." in page
    assert "Skipped files: another version of Rankscope (4)." in page


def test_a_missing_driver_and_missing_records_are_reported() -> None:
    page = render_status([])
    assert "NVIDIA driver not available" in page
    assert "No rank records on this machine." in page


def test_released_gpus_are_reported() -> None:
    page = render_status([GaugeMetricFamily("rankscope_exporter_gpus_released", "Released.", value=1)])
    assert "GPUs released" in page
    assert "NVIDIA driver" not in page


def test_the_page_reloads_without_javascript() -> None:
    assert re.search(r'<noscript><meta http-equiv="refresh" content="\d+"></noscript>', render_status([]))
