"""Whether the slow rank and its phase are named: `python -m validation.stragglers` (some minutes).

30 ms a step are injected into one phase of one rank of four, for each phase and each rank, in each way to train. The
verdict is made from the four records as the rules make it from the series (deploy/prometheus/rules/recording), with the
rules' own thresholds. With `--device asynchronous` (testing/asynchronous_device) the host does not wait for other
ranks, as with CUDA and NCCL, and the device's clock judges.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from validation.straggler_job import FAULT_MS

REPOSITORY = Path(__file__).parents[1]
THRESHOLDS = REPOSITORY / "deploy" / "prometheus" / "thresholds.yml"
TRAININGS = {
    "gloo": ("ddp", "fsdp2", "by_hand"),
    "asynchronous": ("ddp", "fsdp2", "hsdp", "by_hand", "by_hand_in_a_stream", "tensor_and_data", "pipeline_and_data"),
}
"""By kind of device. In the last two all four ranks are one group: who waits least of all of them is named."""
PHASES = ("forward", "backward", "data_wait", "optimizer", "checkpoint", "other")
RANKS = 4
NOBODY: dict[str, str] = {}


class Limits(NamedTuple):
    """What the rules call a lag, and how much of it one phase has to explain."""

    lag: float
    cause_share: float


def limits() -> Limits:
    """The rules' own, for ranks that share few cores."""
    thresholds = yaml.safe_load(THRESHOLDS.read_text())
    return Limits(float(thresholds["loss_limit"]["fast"]), float(thresholds["cause_share"]["value"]))


def culprits(phases: dict[str, dict[str, float]], limits: Limits) -> dict[str, str]:
    """The cause by lagging rank, from seconds by rank and phase."""
    totals = {rank: sum(seconds.values()) for rank, seconds in phases.items()}
    ratios = {rank: {p: s / totals[rank] for p, s in seconds.items()} for rank, seconds in phases.items()}
    waits = {rank: ratio.pop("collective_wait", 0.0) for rank, ratio in ratios.items()}
    lags = {rank: statistics.median(waits.values()) - wait for rank, wait in waits.items()}
    return {rank: cause(rank, ratios, limits.cause_share * lag) for rank, lag in lags.items() if lag > limits.lag}


def cause(rank: str, ratios: dict[str, dict[str, float]], needed: float) -> str:
    """The phase in which the rank exceeds the mean of the others most, if by more than `needed`."""
    others = [ratio for other, ratio in ratios.items() if other != rank]
    excess = {
        phase: own - statistics.mean(ratio.get(phase, 0.0) for ratio in others) for phase, own in ratios[rank].items()
    }
    phase = max(excess, key=lambda phase: excess[phase])
    return phase if excess[phase] > needed else "unknown"


def all_cases(device: str) -> Iterator[str]:
    """Every fault in every training, and each training without one."""
    for training in TRAININGS[device]:
        yield f"{training}:nothing:0"
        yield from (f"{training}:{phase}:{rank}" for phase in PHASES for rank in range(RANKS))


def expected(case: str) -> dict[str, str]:
    """Who should be named, and for what."""
    _, phase, rank = case.split(":")
    return NOBODY if phase == "nothing" else {rank: phase}


def observe(cases: Sequence[str], steps: int, device: str = "gloo") -> list[dict[str, Any]]:
    """What the records say of each case. Raises CalledProcessError if the job fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"]
    command = [*launch, "validation.straggler_job", device, str(steps), *cases]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANKSCOPE_RUN_DIR": run_dir}
        job = subprocess.run(command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in job.stdout.splitlines()]


def judge(observed: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one case, beside what it should be."""
    named = culprits(observed["phases"], limits())
    return {**observed, "named": named, "is_right": named == expected(observed["case"])}


def report(results: list[dict[str, Any]], steps: int, device: str) -> str:
    """How many are right, by training and phase, and each that is wrong."""
    clock = "the device's, which is asynchronous as CUDA's" if device == "asynchronous" else "the host's, over gloo"
    rows = [f"| {training} | {' | '.join(share(results, training, phase) for phase in ('nothing', *PHASES))} |"
            for training in TRAININGS[device]]  # fmt: skip
    wrong = [
        f"- `{result['case']}`: named {result['named'] or 'nobody'}" for result in results if not result["is_right"]
    ]
    return "\n".join(
        [
            "# Is the slow rank named, and its phase?",
            "",
            f"{FAULT_MS:.0f} ms a step injected into one phase of one rank of {RANKS}, {steps} steps. The",
            f"clock that judges is {clock}.",
            "Right are the cases in which this rank alone is named, with this phase (`nothing`: in which nobody is).",
            "",
            f"| training | nothing | {' | '.join(PHASES)} |",
            f"|---|{'---|' * (len(PHASES) + 1)}",
            *rows,
            "",
            "Wrong:" if wrong else "None is wrong.",
            *wrong,
            "",
            "Made by `make stragglers`.",
            "",
        ]
    )


def share(results: list[dict[str, Any]], training: str, phase: str) -> str:
    """Right of all, as in `4/4`."""
    rights = [result["is_right"] for result in results if result["case"].startswith(f"{training}:{phase}:")]
    return f"{sum(rights)}/{len(rights)}"


def main() -> None:
    """All cases, or those that are named; the verdicts go to a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="TRAINING:PHASE:RANK", help="by default: all")
    parser.add_argument("--device", choices=TRAININGS, default="gloo")
    parser.add_argument("--steps", type=int, default=30, help="of each case (default: 30)")
    parser.add_argument("--json", type=Path, help="also write the figures there, and the report beside it as .md")
    arguments = parser.parse_args()
    cases = arguments.cases or [*all_cases(arguments.device)]
    results = [judge(observed) for observed in observe(cases, arguments.steps, arguments.device)]
    text = report(results, arguments.steps, arguments.device)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        arguments.json.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
