"""Check whether the slow rank of four and its phase are named.

    python -m validation.stragglers --save
    python -m validation.stragglers --device asynchronous --save

A delay of 30 ms a step is injected into one phase of one rank of four, for each phase and each rank, in each kind of
training. The verdict is made from the four records as the rules make it from the series
(deploy/prometheus/rules/recording), with the rules' own thresholds. A case is right if this rank alone is named, with
this phase; `nothing` is right if no rank is named. Over gloo the phases are measured on the host. On the asynchronous
device (testing/asynchronous_device) the host does not wait for other ranks, as with CUDA and NCCL, and the phases are
measured on the device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from testing import report
from testing.torchrun import environment, forked

REPOSITORY = Path(__file__).parents[1]
THRESHOLDS = REPOSITORY / "deploy" / "prometheus" / "thresholds.yml"
TRAININGS = {
    "gloo": ("ddp", "fsdp2", "by_hand"),
    "asynchronous": ("ddp", "fsdp2", "hsdp", "by_hand", "by_hand_in_a_stream", "tensor_and_data", "pipeline_and_data"),
}
"""By kind of device. In the last two all ranks are one group: the rank that waits least of all is named."""
PHASES = ("forward", "backward", "data_wait", "optimizer", "checkpoint", "other")
RANKS = 4
NO_RANK: dict[str, str] = {}


class Limits(NamedTuple):
    """The rules' limit of a lag, and the ratio of it that one phase must explain."""

    lag: float
    cause_share: float


def limits() -> Limits:
    """Return the rules' limits for ranks that share few cores."""
    thresholds = yaml.safe_load(THRESHOLDS.read_text())
    return Limits(float(thresholds["loss_limit"]["fast"]), float(thresholds["cause_share"]["value"]))


def culprits(phases: dict[str, dict[str, float]], limits: Limits) -> dict[str, str]:
    """Return the cause by lagging rank, from seconds by rank and phase."""
    totals = {rank: sum(seconds.values()) for rank, seconds in phases.items()}
    ratios = {rank: {p: s / totals[rank] for p, s in seconds.items()} for rank, seconds in phases.items()}
    waits = {rank: ratio.pop("collective_wait", 0.0) for rank, ratio in ratios.items()}
    lags = {rank: statistics.median(waits.values()) - wait for rank, wait in waits.items()}
    return {rank: cause(rank, ratios, limits.cause_share * lag) for rank, lag in lags.items() if lag > limits.lag}


def cause(rank: str, ratios: dict[str, dict[str, float]], needed: float) -> str:
    """Return the phase in which the rank exceeds the mean of the others most; `unknown` if by less than `needed`."""
    others = [ratio for other, ratio in ratios.items() if other != rank]
    excess = {
        phase: own - statistics.mean(ratio.get(phase, 0.0) for ratio in others) for phase, own in ratios[rank].items()
    }
    phase = max(excess, key=lambda phase: excess[phase])
    return phase if excess[phase] > needed else "unknown"


def all_cases(device: str) -> Iterator[str]:
    """Yield every fault in every training, and each training without a fault."""
    for training in TRAININGS[device]:
        yield f"{training}:nothing:0"
        yield from (f"{training}:{phase}:{rank}" for phase in PHASES for rank in range(RANKS))


def expected(case: str) -> dict[str, str]:
    """Return the rank and phase that should be named."""
    _, phase, rank = case.split(":")
    return NO_RANK if phase == "nothing" else {rank: phase}


def observe(cases: Sequence[str], steps: int, device: str = "gloo") -> list[dict[str, Any]]:
    """Return the records' phases for each case. Raises CalledProcessError if the job fails."""
    command = forked(RANKS, REPOSITORY / "validation/straggler_job.py", device, steps, *cases)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        variables = environment(RANKSCOPE_RUN_DIR=run_dir)
        job = subprocess.run(command, env=variables, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in job.stdout.splitlines()]


def judge(observed: dict[str, Any]) -> dict[str, Any]:
    """Add the named ranks, and whether they are right, to one case."""
    named = culprits(observed["phases"], limits())
    return {**observed, "named": named, "is_right": named == expected(observed["case"])}


def body(results: list[dict[str, Any]], device: str) -> list[str]:
    """Return the right cases by training and phase, and each wrong one."""
    phases = ("nothing", *PHASES)
    rows = [(training, *(share(results, training, phase) for phase in phases)) for training in TRAININGS[device]]
    wrong = [f"- `{one['case']}`: named {one['named'] or 'no rank'}" for one in results if not one["is_right"]]
    return [report.table(("training", *phases), rows), "\n".join(["Wrong:", *wrong] if wrong else ["None is wrong."])]


def share(results: list[dict[str, Any]], training: str, phase: str) -> str:
    """Return the right cases of all, as in `4/4`."""
    rights = [result["is_right"] for result in results if result["case"].startswith(f"{training}:{phase}:")]
    return f"{sum(rights)}/{len(rights)}"


def main() -> None:
    """Run all cases, or the given ones, and publish."""
    parser = report.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="TRAINING:PHASE:RANK", help="default: all")
    parser.add_argument("--device", choices=TRAININGS, default="gloo")
    parser.add_argument("--steps", type=int, default=30, help="steps of each case (default: 30)")
    options = parser.parse_args()
    cases = options.cases or [*all_cases(options.device)]
    results = [judge(observed) for observed in observe(cases, options.steps, options.device)]
    name = "stragglers" if options.device == "gloo" else f"stragglers_{options.device}"
    text = body(results, options.device)
    report.Report(name, "Naming the slow rank and its phase", __doc__, "all right", text, results, ["torch"]).publish(
        options.save
    )


if __name__ == "__main__":
    main()
