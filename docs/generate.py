"""Write docs/metrics.md from the declarations of the collectors; `make generate` runs this."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rankscope_exporter.analyzer.metrics import METRICS as ANALYZER_METRICS
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.gpu.collector import GPU_LABELS, Gpu, Tick
from rankscope_exporter.gpu.collectors.xid import WELL_KNOWN
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.ranks.collectors.findings import RUN_LABELS, Findings
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.metric import RANK_LABELS
from rankscope_exporter.registry import EXPORTER_METRICS, GPU_COLLECTORS, GPU_METRICS, RANK_METRICS
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.scenario import parse_scenario

OUTPUT = Path(__file__).parent / "metrics.md"
MODELS = {
    "H100 with 18 NVLinks": "H100",
    "H100 split into 7 by MIG": {"like": "H100", "mig": ["1g.10gb"] * 7},
    "A100 split into 3 by MIG": {"like": "A100", "mig": ["3g.20gb", "2g.10gb", "1g.5gb"]},
    "T4": "T4",
}

Cell = Callable[[Declaration], str]

TEXT = """# Metrics

<!-- Made by docs/generate.py from the declarations of the collectors; `make generate` writes it. -->

Everything that `/metrics` serves, except [dcgm-exporter's names](dcgm.md) (`--metrics.dcgm`). Base units, ratios
instead of percents, timestamps instead of ages. A value that a device or a rank does not have is **absent**: never 0,
never NaN, never a stale value.

A label has the same meaning everywhere:

- `gpu`: the NVML index on this machine
- `uuid`: the GPU's; followed by `#` and the index if the driver reports zeros, nothing, or the same for several GPUs
- `gpu_instance`: the MIG instance; empty for a whole GPU, which Prometheus treats as absent
- `run`, `rank`: the name of the run, and the global number of the rank. A second training of several ranks on the
  node with the same name and owner, such as another torchrun of one Slurm batch script, is the run `NAME (2)`
- `owner`: the uid of the files of the run's records. Two users' runs with one name are two runs. Empty with
  `--collector.ranks.owner=none`. For [sidecars](install/kubernetes.md#sidecars), Prometheus has `NAMESPACE/uid`
- `group`: the ranks that synchronize with each other, e.g. `0-3`
- `node`: the host's name, or `RANKSCOPE_NODE`
- `direction`: as the GPU sees it
- `phase`, `op`, `cause`: what a rank does, the kind of collective, and what time is lost to

## GPUs (labels `gpu`, `uuid`)

*Since* is the first architecture that has the value, by NVIDIA's documentation of the call; a product may still lack
it. Values that rarely change (errors, modes, link states) are up to 15 s old.

{gpus}

## Ranks (labels `run`, `rank`, `owner`)

### What a step is

A step ends when the optimizer that marks the steps has finished its `step()`. Only one at a time marks them:

- The first optimizer that steps marks the steps, whatever wraps it. With accumulation, a step has several backward
  passes.
- Another optimizer that steps between two of its steps belongs to the same step: a second one for other parameters, or
  a GAN's critic.
- Optimizers that step within the backward pass count as one optimizer, which steps once per backward pass.
- If this optimizer has not stepped for more than twice its longest gap (in backward passes, at least 8; 256 until it
  has stepped twice), another one that steps marks the steps. Its earlier steps in the gap count at that moment, and so
  do those of optimizers that stepped before it in the gap, one after the other. So staged training and models that are
  trained in turn lose no step, except some of the last stage if it is shorter than that. They have the same length in
  the histogram, and are not compared with the steps of other ranks.
- If no optimizer steps in 100 backward passes (or twice the longest gap, if that is more), each pass is a step,
  including these, until an optimizer steps. This also applies to the first passes of a loop that accumulates more than
  100. Once an optimizer has stepped, it applies neither in evaluation mode nor in a job with a gradient scaler.
- After the first call of `rankscope.step()`, only that ends a step.

{ranks}

### Forward and evaluation

Time in a module of the model is `forward`. The hook finds the model's classes in a few steps (2 and 3, 11 and 12, 101
and 102, …), as the outermost modules that the training thread calls, and the module within DDP. It looks again when
another optimizer steps, when no known module is called, and in the first, tenth, … evaluation of the model.

A pass is `evaluation` if gradients are off, the module is in evaluation mode, and the same module trains in training
mode. So is a pass of its parts, if they were in training mode before its `eval()`. This covers the validation of plain
loops, of rank 0 alone, and with `ddp.module` or a method of the model. Generating samples from the model in this way
(`model.eval()` and `no_grad`, as in RLHF) is `evaluation`, too. Time between such passes has its own phase;
`rankscope.phase("evaluation")` around all of it assigns it to `evaluation`.

A pass of a module that never trains is `forward`: a teacher, a reference model, a frozen encoder, an average of the
weights (EMA). So is a pass without gradients in training mode. If the script calls a method instead of the module, the
modules that it calls are `forward`, and its own computation is `other`.

### Samples

`rankscope_rank_samples_total` counts the samples of a training step when the step ends. A batch counts once, even if
several steps use it.

- A DataLoader over a map-style dataset fetches each batch by a list of indices. Its length is the number of samples,
  whatever `collate_fn` returns.
- For other loaders, streams and `rankscope.timed()`, the number comes from the batch: one leading dimension of all its
  tensors (a nested tensor: its components; a packed sequence: its sequences), `batch_size` or `num_graphs` of an
  object. A stream that drops a last, shorter batch has its loader's batch size.
- Otherwise the number is unknown: lists of tensors or of dicts, tensors of several leading dimensions (`cu_seqlens`),
  texts. When a step uses such a batch, the samples of the rank are absent. `rankscope.step(samples=…)` sets them.
- A step uses as many batches of each iterator as backward passes ran in it, the newest ones. So skipped batches do not
  count, nor does one that the script only inspects. In a step without backward passes, calls of `torch.autograd.grad`
  count instead.
- If the passes do not explain the batches, samples and tokens are absent for the rest of the run: most steps fetch more
  batches than they have passes, or a batch had a forward pass but no backward pass (its loss was dropped, or added to
  another one).
- A DataLoader that requests the same list of indices several times in succession, so that each backward pass uses a
  part of the batch (TRL's GRPO), has neither samples and tokens nor the setting `batch_size`.
- Batches that are fetched without gradients or within the phase `evaluation` do not count. Nor do those that an
  iterator yields while the model is in evaluation mode, if another one yielded a batch for the step, nor those of an
  iterator that is exhausted without a backward pass, such as `list(loader)`.
- Batches that another thread than the training one fetches do not count.

Ranks that share their batches count them once: the first rank along each dimension of a device mesh whose name has the
words tp, sp, cp, pp, tensor, sequence, context, pipeline or model. On a mesh of one dimension without a name,
parameters that are not sharded in their first dimension mean tensor parallelism. If a job divides its model without a
device mesh (Megatron, DeepSpeed's Ulysses, its own process groups), each rank counts, and the sum over the ranks is too
large. With Accelerate's `dispatch_batches`, each rank counts its own part.

## Runs and findings (labels `run`, `owner`)

A run has these while the exporter diagnoses it: see `rankscope_run_judged_info`.

{findings}

## Network ports (label `port`)

Read from the node's sysfs. A port is named by its adapter (`mlx5_3`; `mlx5_0/2` where it has several) or interface.

{network}

## The exporter itself

{exporter}

## The analyzer

`rankscope-exporter --analyze TARGETS` serves these, and of the runs that it judges the metrics of
[runs and findings](#runs-and-findings-labels-run-owner).

{analyzer}

## Number of series

For one GPU, by collector (`--no-collector.NAME` disables one). Collectors that are off by default are in parentheses:
`process` has a series for each process on the GPU, here one. Counted with simulated GPUs of these models, busy and
without an XID error:

{budget}
"""


def generated() -> dict[Path, str]:
    """Return the expected content of the page, by path."""
    return {OUTPUT: reference()}


def main() -> None:
    """Write the page."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


def reference() -> str:
    """Return the whole page."""
    elsewhere = {*Findings.metrics, *Network.metrics}
    return TEXT.format(
        gpus=_table(GPU_METRICS, GPU_LABELS, {"source call": lambda m: _code(m.source), "since": lambda m: m.since}),
        ranks=_table([metric for metric in RANK_METRICS if metric not in elsewhere], RANK_LABELS),
        network=_table(Network.metrics, ("port",)),
        findings=_table(Findings.metrics, RUN_LABELS),
        exporter=_table(EXPORTER_METRICS, ()),
        analyzer=_table(ANALYZER_METRICS, ("run", "owner")),
        budget=_budget({name: series_of(model) for name, model in MODELS.items()}),
    )


def series_of(model: object) -> dict[str, int]:
    """Return the number of series of each collector, for one busy GPU of this simulated model."""
    state = {"at": 0, "busy": 1, "processes": [{"pid": os.getpid()}]}
    simulated = SimulatedDriver(parse_scenario({"gpus": 1, "model": model, "timeline": {0: [state]}}), clock=Clock())
    driver = Driver()
    with installed(simulated):
        driver.connect()
        device = driver.device(0)
        readers = {collector: collector.reader() for collector in GPU_COLLECTORS}
        rounds = [{s: read(device, Tick(simulated.now(), 1.0)) for s, read in readers.items()} for _ in range(3)]
        driver.close()
    families = {collector.name: collector.families({Gpu(0, ""): rounds[-1][collector]}) for collector in GPU_COLLECTORS}
    counts = {name: sum(len(family.samples) for family in made) for name, made in families.items()}
    return counts | {"xid": len(WELL_KNOWN)}


class Clock:
    """A clock that advances by a second each time that it is read, so that nothing waits."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Return the Unix time in seconds."""
        self._now += 1.0
        return self._now


def _table(
    metrics: Sequence[Declaration],
    common: Sequence[str],
    more: Mapping[str, Callable[[Declaration], str]] | None = None,
) -> str:
    columns: dict[str, Callable[[Declaration], str]] = {
        "name": lambda m: f"`{m.name}`",
        "type": lambda m: m.kind,
        "unit": lambda m: m.unit,
        "more labels": lambda m: ", ".join(f"`{label}`" for label in m.labels if label not in common),
        "meaning": lambda m: m.help,
        **(more or {}),
    }
    return _rows([list(columns), *([cell(metric) for cell in columns.values()] for metric in metrics)])


def _budget(counts: Mapping[str, Mapping[str, int]]) -> str:
    off = {collector.name for collector in GPU_COLLECTORS if not collector.is_on}
    collectors = dict.fromkeys(name for count in counts.values() for name in count)
    rows = [["collector", *counts]]
    for name in collectors:
        cells = [str(count[name]) for count in counts.values()]
        rows.append([f"`{name}`", *(f"({cell})" if name in off else cell for cell in cells)])
    totals = (sum(number for name, number in count.items() if name not in off) for count in counts.values())
    return _rows([*rows, ["**together**", *(f"**{total}**" for total in totals)]])


def _rows(rows: Iterable[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * (head.count(" | ") + 1), *body])


def _code(calls: str) -> str:
    """Return the text with the names of calls formatted as code."""
    return re.sub(r"(…?[A-Za-z]*[a-z][A-Z]\w*(\([^)]*\))?)", r"`\1`", calls)


if __name__ == "__main__":
    main()
