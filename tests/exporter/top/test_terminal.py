"""`rankscope top` in a pseudo-terminal: what its screen says of each state of a node, in two sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import pytest
from testing.http_server import answers, http_server
from testing.judged_job import HUNG, JudgedJob
from testing.servers import free_port
from testing.simulated_job import lagging
from testing.terminal import Terminal
from testing.waiting import eventually

from rankscope.record.quantities import duration
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.gpus import GpuReport, GpusReport
from rankscope_exporter.report.runs import NodeReport, RunReport

SMALL, LARGE = (80, 24), (160, 50)
TOP = [sys.executable, "-m", "rankscope.cli.launch", "top"]
GPU = GpuReport(
    "0", "GPU-a", "H100", True, "working", "run r", 1, 60e9, 80e9, 650.0, 61.0, False, 1.0, True, 0.97, {}
)  # fmt: skip
MORE = re.compile(r"\.\.\. and (\d+) more (ranks?|GPUs?|nodes?|runs?)")


class State(NamedTuple):
    """The runs and GPUs of a node, and what its screen has to say, and must not."""

    runs: Sequence[RunReport]
    said: Sequence[str]
    unsaid: Sequence[str] = ()
    gpus: Sequence[GpuReport] = tuple(replace(GPU, index=str(index)) for index in range(4))


def healthy(run_dir: Path) -> State:
    return State([JudgedJob(run_dir).train(20)], ["No problem found.", "4 of 4 ranks, 45 ms per step", "89% useful"])


def straggler(run_dir: Path) -> State:
    run = JudgedJob(run_dir).trained(20).train(30, lagging("optimizer"))
    (finding,) = run.findings
    said = [
        f"WARNING for {duration(finding.age_seconds)}: {finding.sentence}",
        finding.advice,
        "26% <",
    ]
    return State([run], said, ["No problem", "lost to"])


def hang(run_dir: Path) -> State:
    job = JudgedJob(run_dir).trained(100)
    run = job.wait(310, HUNG)
    said = ["CRITICAL for 5.2 min: Run r hangs: Rank 2 (node-a) is stuck in data_wait", "no progress for 5.2 min"]
    return State([run], [*said, "collective_wait for 5.2 min"], ["No problem", "ms per step", "11%"])


def crash(run_dir: Path) -> State:
    job = JudgedJob(run_dir).trained(20)
    for _ in range(5):
        job.poll(job.now + 5, ended=[1])
    return State(
        [job.report()], [" s ago: Rank 1 (node-a) of run r was killed", "3 of 4 ranks"], ["No problem", "CRITICAL for"]
    )


def sick_gpu(run_dir: Path) -> State:
    slow = replace(GPU, index="2", throttled={"hw_thermal_slowdown": 1.0})
    gpus = [GPU, replace(GPU, index="1"), slow, replace(GPU, index="3", is_up=False)]
    said = ["GPU 2 is throttled: hw thermal slowdown.", "GPU 3 does not answer.", "3 of 4 GPUs answer", "lost"]
    return State([JudgedJob(run_dir).train(10)], said, ["No problem"], gpus)


def two_runs(run_dir: Path) -> State:
    slow = JudgedJob(run_dir, ranks=8, run="slow").trained(20).train(30, lagging("optimizer"))
    even = replace(slow, run="even", findings=[], pending=[])
    gpus = [replace(GPU, index=str(index)) for index in range(8)]
    return State([slow, even], ["slows down run slow", "Run even", "n, p next and previous run"], gpus=gpus)


def many_ranks(run_dir: Path) -> State:
    run = JudgedJob(run_dir, ranks=64).trained(10).train(10, lagging("optimizer", laggard=50))
    return State([run], ["Rank 50 (node-a) slows down run r", "64 of 64 ranks", "26% <"])


STATES = (healthy, straggler, hang, crash, sick_gpu, two_runs, many_ranks)


@contextmanager
def exporter(state: State) -> Iterator[str]:
    """Yield the URL of an exporter that answers with this state."""
    bodies = {
        "/api/v1/runs": as_json(NodeReport(1e9, state.runs)),
        "/api/v1/gpus": as_json(GpusReport(1e9, state.gpus)),
    }

    def answer(request: BaseHTTPRequestHandler) -> None:
        answers(bodies[request.path].encode())(request)

    with http_server(answer) as port:
        yield f"http://127.0.0.1:{port}"


def wait_for_screen(terminal: Terminal) -> None:
    """Wait until the whole screen is shown in the terminal's present size."""
    eventually(lambda: terminal.lines()[-1].startswith("q quit"))


def rows(lines: Sequence[str], header: str) -> list[str]:
    """Return the first words of the rows of each table whose header begins with these words."""
    found = []
    for number, line in enumerate(lines):
        for at in (one.start() for one in re.finditer(header, line)):
            for row in lines[number + 1 :]:
                first = re.match(r" {0,3}(\d+) ", row[at:])
                if not first:
                    break
                found.append(first[1])
    return found


def left_out(lines: Sequence[str], what: str) -> int:
    return sum(int(number) for number, name in MORE.findall("\n".join(lines)) if name.startswith(what))


def check_nothing_is_lost(terminal: Terminal, state: State) -> None:
    """Check that each rank, GPU and run is on the screen, or counted as left out, once the screen is drawn."""
    eventually(lambda: [*counted(terminal, state)] == [*counted(terminal, state, is_expected=True)], 10.0)
    assert not terminal.screen.has_scrolled


def counted(terminal: Terminal, state: State, *, is_expected: bool = False) -> Iterator[int]:
    """Yield the number of runs, ranks and GPUs that the screen shows or counts, or those that it has to."""
    lines = terminal.lines()
    shown = [run for run in state.runs if f"Run {run.run}, " in "\n".join(lines)]
    tables = sum(line.count("rank  GPU  now") for line in lines)
    if is_expected:
        yield from (len(state.runs), sum(len(run.ranks) for run in shown[:tables]), len(state.gpus))
        return
    yield len(shown) + left_out(lines, "run")
    yield len(rows(lines, "rank  GPU  now")) + left_out(lines, "rank")
    yield len(rows(lines, "GPU  state")) + left_out(lines, "GPU")


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_the_screen_says_what_is_wrong_in_both_sizes(run_dir: Path, make: Callable[[Path], State]) -> None:
    state = make(run_dir)
    with exporter(state) as url, Terminal(SMALL, [*TOP, "--url", url]) as terminal:
        for size in (SMALL, LARGE):
            terminal.resize(*size)
            wait_for_screen(terminal)
            assert [words for words in state.said if words not in terminal.text()] == []
            assert [words for words in state.unsaid if words in terminal.text()] == []
            check_nothing_is_lost(terminal, state)
        assert any(line[SMALL[0] :].strip() for line in terminal.lines()[5:])
        terminal.press("q")
        assert terminal.wait() == 0


def test_the_room_of_a_large_terminal_shows_the_last_minutes(run_dir: Path) -> None:
    with exporter(straggler(run_dir)) as url, Terminal(LARGE, [*TOP, "--url", url]) as terminal:
        lines = terminal.wait_for("q quit")
        (heads,) = [line for line in lines if "step time, last 60 s" in line]
        assert heads.index("largest lag as a part of the step, last 60 s") >= SMALL[0]
        assert any(line.startswith("115 ms ") and "26% " in line and line.endswith("█") for line in lines)


def test_a_key_shows_more_of_the_next_run(run_dir: Path) -> None:
    state = two_runs(run_dir)
    with exporter(state) as url, Terminal(SMALL, [*TOP, "--url", url]) as terminal:
        terminal.wait_for("q quit")
        terminal.wait_for("Run even, uid 0: no problem, 8 of 8 ranks")
        for keys in ("n", "p", "\x1b[B"):
            terminal.press(keys)
            terminal.wait_for("> Run slow" if keys == "p" else "> Run even")
            check_nothing_is_lost(terminal, state)
        assert len(rows(terminal.lines(), "rank  GPU  now")) > 2


def test_a_node_that_does_not_answer_is_named_and_never_green(run_dir: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with exporter(healthy(run_dir)) as url, Terminal(SMALL, [*TOP, "--url", url, gone]) as terminal:
        for size in (SMALL, LARGE):
            terminal.resize(*size)
            wait_for_screen(terminal)
            text = terminal.text()
            name = gone.removeprefix("http://")
            assert "1 of 2 nodes, 4 of 4 GPUs answer" in text
            assert f"No answer from {name}: cannot reach {gone}: Connection refused." in text
            assert re.search(rf"{name} +no answer for \d+ s", text)
            assert "Otherwise, no problem found." in text
            assert "No problem found." not in text


def test_no_color_without_a_terminal_or_with_no_color(run_dir: Path) -> None:
    with exporter(straggler(run_dir)) as url:
        for env, has_color in (({}, True), ({"NO_COLOR": "1"}, False)):
            with Terminal(SMALL, [*TOP, "--url", url], env) as terminal:
                terminal.wait_for("q quit")
                assert terminal.screen.has_color == has_color
        printed = subprocess.run([*TOP, "--url", url], capture_output=True, check=True).stdout
        assert b"\x1b" not in printed
        assert printed.isascii()


def test_several_nodes_are_one_line_of_json_with_those_that_do_not_answer(run_dir: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    with exporter(healthy(run_dir)) as url:
        command = [*TOP, "--json", "--url", url, f"http://{gone}"]
        found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert [*found["failures"]] == [gone]
    assert [run["run"] for run in found["runs"]] == ["r"]
