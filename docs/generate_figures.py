"""Write the figures in README.md and docs/security.md from the pages of measurements and the limits in the code.

`make generate` runs this. The keys of `readme()` and `security()` are texts of these documents, with `{}` for a figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rankscope.cli import py_spy, stacks
from rankscope.cli.explaining import fetching
from rankscope.cli.stack_text import FRAMES_LIMIT, THREADS_LIMIT
from rankscope_exporter.capture import stalls
from rankscope_exporter.capture.service import CPU_RATIO
from rankscope_exporter.diagnosis import judged
from rankscope_exporter.diagnosis.limits import CPU_SECONDS
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.hangs import flight_recorder, plain_pickle
from rankscope_exporter.ledger import owner_files
from rankscope_exporter.ranks import share
from rankscope_exporter.top.servers import SERVERS_LIMIT
from rankscope_exporter.web import limits

ROOT = Path(__file__).parents[1]
UNIT, ANALYZER_UNIT = (ROOT / f"deploy/node/rankscope-{name}.service" for name in ("exporter", "analyzer"))
FIGURE = r"(\d[\d.,]*(?: of \d[\d,]*)?)"
KIB, MIB, GIB = 2**10, 2**20, 2**30
SLOW = "faults that slow steps"
GAUNTLETS = ("gauntlet", "gauntlet_asynchronous", "gauntlet_2_ranks", "gauntlet_asynchronous_2_ranks")

Figures = Mapping[str, Sequence[str | float]]


def find(page: str, pattern: str) -> list[str]:
    """Return all matches in a page of measurements; ^ and $ are the ends of a line."""
    text = (ROOT / f"docs/measurements/{page}.md").read_text(encoding="utf-8")
    return re.findall(pattern, text, re.MULTILINE)


def cell(page: str, row: str, column: str | int) -> str:
    """Return a cell of the first row whose first cells match the pattern, in a table that has the column."""
    head, previous = [""], [""]
    for line in find(page, r"^\|(.*)\|$"):
        cells = [text.strip(" *`") for text in line.split("|")]
        if cells[0] == "---":
            head = previous
        elif (isinstance(column, int) or column in head) and re.match(rf"{row} \| ", " | ".join(cells)):
            return cells[column if isinstance(column, int) else head.index(column)]
        previous = cells
    raise ValueError(f"{page}.md has no row {row!r} with a column {column!r}")


def number(page: str, row: str, column: str | int, index: int = 0) -> float:
    """Return a number of a cell, without its sign."""
    return float(re.findall(r"\d+(?:\.\d+)?", cell(page, row, column))[index])


def readme() -> Figures:
    """Return the figures of README.md."""
    threshold = Thresholds()
    minutes = round(threshold.pace_known_after / 60)
    gloo, asynchronous = (set(find(page, r"^\| `([fg]\d+_\w+)` \|")) for page in GAUNTLETS[:2])
    right, wrong = (len(find("gpu_check", rf"\| {outcome} \|")) for outcome in ("ok", "differs"))

    def cost(training: str, step: float = 0.0) -> Sequence[float]:
        step = step or number("hook_overhead_in_process", training, "step (µs)")
        hook = number("hook_overhead_in_process", training, "hook (µs a step)")
        return step / 1e3, hook, 100 * hook / step

    def more(training: str) -> float:
        return number("hook_overhead", rf"{training} \| rankscope", "wall (µs a step)") / 1e3

    def found(row: str, *columns: int) -> Sequence[float]:
        return [number("time_to_find", row, column) for column in columns]

    def result(row: str) -> Sequence[str]:
        return [cell(page, row, 1) for page in GAUNTLETS]

    def seconds(index: int) -> Sequence[float]:
        return [number(page, "onset to notification of a fault.*", 1, index) for page in GAUNTLETS]

    return {
        "[{} ways to train]": [f"{len(find('ways', 'yes . yes'))} of {len(find('ways', '^. [a-z_]+[.]'))}"],
        "| one process | {} ms | +{} µs | {}% |": cost("alone"),
        "| DDP | {} ms | +{} µs | {}% |": cost("ddp"),
        "| FSDP2 | {} ms | +{} µs | {}% |": cost("fsdp2"),
        "called by the script | {} ms | +{} µs | {}% |": cost("by_hand"),
        "steps of 100 ms | 100 ms | +{} µs | {}% |": cost("ddp_100_ms", 1e5)[1:],
        "collectives add {} and {} ms": [more("fsdp2"), more("by_hand")],
        "one node ({} faults): median | {} s | {} s |": [
            len(find("time_to_find", r"^\| f\d+_(?!hang)")),
            *found(SLOW, 1, 5),
        ],
        "the same: 90th percentile | {} s | {} s |": found(SLOW, 2, 6),
        "after {} minutes of training, run on one node | {} s | {} s |": [minutes, *found("hangs", 1, 5)],
        "with an analyzer ({} faults): median | {} s | {} s |": [
            len(set(find("time_to_find_nodes", r"^\| (f\d+_(?!hang)\w+)"))),
            *(number("time_to_find_nodes", SLOW, column) for column in (1, 5)),
        ],
        "the same on two nodes: 90th percentile | {} s | {} s |": [
            number("time_to_find_nodes", SLOW, column) for column in (2, 6)
        ],
        "after {} times the run's": [int(threshold.stuck_pace)],
        "the longest ever: at least {} s.": [int(threshold.stuck_floor)],
        "less than {} minutes has no": [minutes],
        "after {} s, or after {} s if it is unknown": [2 * int(threshold.stuck_floor), int(threshold.stuck)],
        "up to {} minutes for {}%": [round(threshold.tiers[-1].seconds / 60), round(100 * threshold.loss)],
        "{} faults run over gloo": [f"{len(gloo)} of {len(gloo | asynchronous)}"],
        "gloo: {} faults | asynchronous device: {} faults": [len(gloo), len(asynchronous)],
        "place and cause | {} | {} | {} | {} |": result("faults notified.*"),
        "both named | {} | {} | {} | {} |": result("pairs of faults.*"),
        "90th percentile | {} s | {} s | {} s | {} s |": seconds(0),
        "hidden ranks) | {} s | {} s | {} s | {} s |": seconds(1),
        "without a notification | {} | {} | {} | {} |": result("runs of decoys.*"),
        "wrong alert | {} | {} | {} | {} |": result("runs with faults.*"),
        "[{} comparisons]": [f"{right} of {right + wrong}"],
    }


def security() -> Figures:
    """Return the figures of docs/security.md."""

    def failed(page: str) -> str:
        checks = find(page, r"\| (yes|\*\*NO\*\*) \|")
        return f"{len(checks) - checks.count('yes')} of {len(checks)}"

    def steps(page: str) -> Sequence[float]:
        longer = [number(page, f"{phase} - quiet", "ms a step") for phase in ("siege", "burn")]
        return [number(page, "quiet", "step (ms)"), *longer]

    chart = yaml.safe_load((ROOT / "deploy/helm/rankscope/values.yaml").read_text(encoding="utf-8"))
    node, sidecar = chart["scrapeLimits"], chart["podMonitor"]["sidecars"]["scrapeLimits"]
    page, owner = (ranks * share.ORDINARY_BYTES // MIB for ranks in (share.RANKS_LIMIT, share.OWNER_RANKS_LIMIT))
    return {
        "| bytes | {} MB | {} MB |": [int(one["bodySizeLimit"].removesuffix("MB")) for one in (node, sidecar)],
        "the ranks' {} MiB, or {} MiB of one user": [page, owner],
        "| series | {} | {} | {} bytes per series": [
            *(f"{one['sampleLimit']:,}" for one in (node, sidecar)),
            share.LINE,
        ],
        "and {}% of a core on average for all users": [round(100 * CPU_RATIO)],
        "have made no progress for {} s, and once": [round(stalls.LEAST_SECONDS)],
        "arrive within {} s": [int(limits.REQUEST_SECONDS)],
        "read within {} s": [int(limits.RESPONSE_SECONDS)],
        "closed after {} s": [limits.KEEP_ALIVE_SECONDS],
        "at most {} KiB and {} headers": [limits.REQUEST_BYTES // KIB, limits.HEADERS],
        "{} queues of {} by": [limits.ACCEPT_QUEUES, limits.BACKLOG],
        "are at most {} connections": [limits.CONNECTIONS],
        "more for {} ms": [round(1e3 * limits.ITERATION_SECONDS)],
        "{}% of a CPU (after a burst of {} ms)": [round(100 * limits.CPU_SHARE), round(1e3 * limits.CPU_BURST)],
        "these {} ms": [round(1e3 * limits.ITERATION_SECONDS)],
        "{} MiB together": [limits.PAGE_BYTES // MIB],
        "more than {}% of a CPU. Requests": [round(100 * limits.SLOW_PAGE_SHARE)],
        "one every {} ms for": [round(1e3 * limits.REQUEST_INTERVAL)],
        "exporter to {} MiB": re.findall(r"MemoryMax=(\d+)M", UNIT.read_text(encoding="utf-8")),
        "the analyzer to {} GiB": re.findall(r"MemoryMax=(\d+)G", ANALYZER_UNIT.read_text(encoding="utf-8")),
        "{} per address and {} in total": [limits.PASSWORD_CHECKS_PER_ADDRESS, limits.PASSWORD_CHECKS],
        "took at most {} ms ({} ms": [number("siege", phase, "P50") for phase in ("siege", "quiet")],
        "99 in a hundred at most {} ms, and {} ms": [
            number("siege", phase, "P99") for phase in ("siege", "siege of many users")
        ],
        "exporter took {} MB. {} checks failed": [
            number("siege", "the exporter within.*", "found"),
            failed("siege"),
        ],
        "steps of {} ms took {} ms more, and in the control {} ms": steps("siege"),
        "**{} checks failed**.": [failed("siege_tls")],
        "more than {} ms ({} ms": [number("siege_tls", phase, "P99") for phase in ("siege", "quiet")],
        "took {} MB, above": [number("siege_tls", "the exporter within.*", "found")],
        "Steps of {} ms took {} ms more, and in the control {} ms": steps("siege_tls"),
        "{} runs, {} s of CPU time per second, and {} MiB": [
            judged.RUNS_OF_ALL_OWNERS,
            CPU_SECONDS,
            judged.REMEMBERED_BYTES // MIB,
        ],
        "{} ordinary ranks ({} MiB)": [share.RANKS_LIMIT, share.RANKS_LIMIT * share.ORDINARY_BYTES // MIB],
        "more than {} KiB counts": [share.ORDINARY_BYTES // KIB],
        "with a pause of {} s to the next": [int(limits.STACKS_INTERVAL)],
        "one signal per rank in {} s": [int(limits.STACKS_INTERVAL)],
        "takes at most {} s, of which": [int(limits.STACKS_SECONDS)],
        "at most {} KiB of a rank and {} MiB in": [limits.STACKS_OF_RANK // KIB, limits.STACKS_BYTES // MIB],
        "reads at most {} MiB of each, and asks at most {} nodes": [fetching.BODY_LIMIT // MIB, SERVERS_LIMIT],
        "at most {} threads of {} calls": [THREADS_LIMIT, FRAMES_LIMIT],
        "after {} MiB, py-spy after {} s": [stacks.ANSWER_LIMIT // MIB, int(py_spy.WITHIN)],
        "at {} GiB of memory": [py_spy.MEMORY // GIB],
        "{} MiB per answer": [fetching.BODY_LIMIT // MIB],
        "reads at most {} MiB, {} values and {} ranks of a group": [
            flight_recorder.SIZE_LIMIT // MIB,
            f"{plain_pickle.OPERATIONS_LIMIT:,}",
            f"{flight_recorder.RANKS_LIMIT:,}",
        ],
        "at most {} MiB, of at most {} owners: {} MiB in all": [
            owner_files.OWNER_LIMIT // MIB,
            owner_files.OWNERS_LIMIT,
            math.ceil(owner_files.DIRECTORY_LIMIT / MIB),
        ],
        "eight times as much state for an owner, {} MiB in all": [
            math.ceil(owner_files.ANALYZER_DIRECTORY_LIMIT / MIB)
        ],
        "At most {} KiB per second": [2 * owner_files.BYTES_PER_SECOND // KIB],
    }


DOCUMENTS = {ROOT / "README.md": readme, ROOT / "docs/security.md": security}


def write_figures(text: str, figures: Figures) -> str:
    """Return the text with these figures. Raise ValueError if a key is not in the text exactly once."""
    for key, values in figures.items():
        pattern = FIGURE.join(r"\s+".join(map(re.escape, part.split(" "))) for part in key.split("{}"))
        found = [*re.finditer(pattern, text)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} texts like {key!r}")
        for (start, end), value in reversed([*zip(found[0].regs[1:], values, strict=True)]):
            text = text[:start] + _rounded(value) + text[end:]
    return text


def _rounded(value: str | float) -> str:
    """Return a measured value with two digits, or more before the decimal point; others as they are."""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 10.0 else f"{value:#.2g}"
    return str(value)


def main() -> None:
    """Write the documents."""
    for path, figures in DOCUMENTS.items():
        path.write_text(write_figures(path.read_text(encoding="utf-8"), figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
