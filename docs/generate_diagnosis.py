"""Write docs/diagnosis.md from the detectors' docstrings and the thresholds; `make generate` runs this."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from rankscope_exporter.diagnosis import detectors, thresholds
from rankscope_exporter.diagnosis.detectors.loss import KindAndCause
from rankscope_exporter.diagnosis.priority import EXPLAINED_BY, EXPLAINED_BY_CAUSE
from rankscope_exporter.diagnosis.thresholds import Thresholds, Tier

OUTPUT = Path(__file__).parent / "diagnosis.md"

TEXT = """# Diagnosis

<!-- Made by docs/generate_diagnosis.py from the detectors and thresholds; `make generate` writes it. -->

The exporter diagnoses the training runs of its node: which rank slows down a run, why, and what else the run loses its
time to. The findings are shown by

- `rankscope top` on the node, without an exporter or Prometheus
- the exporter's status page `/`, and [`/api/v1/runs`](api.md) as JSON
- the metrics of [runs and findings](metrics.md), such as `rankscope_finding_ratio`, and the alerts, which only
  select findings

An exporter diagnoses a run only if all ranks below its world size are on its node and it reads their GPUs
(`rankscope_run_judged_info`). [An analyzer](install/node.md#runs-that-span-nodes) diagnoses runs that span nodes in the
same way. [`RankscopeRunNotDiagnosed`](runbooks/RankscopeRunNotDiagnosed.md) alerts if neither does.

## Change a threshold

Write the values that differ to a JSON file and start the exporter, and the analyzer, with
`--collector.findings.thresholds FILE`:

```json
{{"tiers": [[0.15, 7], [0.1, 40]], "checkpoint_overdue": 3600}}
```

## Keep baselines across a restart

`--state-dir DIR` saves each run's baselines, pauses and open findings once a minute and when the findings change. The
directory must exist, or the exporter does not start. systemd and the image create `/var/lib/rankscope`; create any
other one for the exporter's user, for example with `install -d -m 750 -o USER DIR`. What is saved of
a user is [limited](security.md#the-commands), and a large state is saved less often.

Without the flag, a run has no baseline after a restart and is compared with the usual loss of healthy runs.

## How a loss becomes a finding

![Readings become facts, facts become candidates, candidates become findings](images/findings.svg)

1. **Readings.** Once a second the exporter reads the counters and the state of each rank and GPU.
2. **Facts.** Two readings give the facts of the time between them: in which phase each rank was for how long, on the
   host and on the GPU, and how long it waited for others. An unknown value is absent.
3. **Late ranks.** In synchronous training all ranks have the same step time, but the rank that comes last waits least.
   The wait of this rank is transfer; what the others wait beyond that is for late ranks. Mean waits are sorted and
   split at the largest gap. The ranks that wait less are the late ones: one rank, a node, or half of the run, and one
   finding.
4. **Place and cause.** The place is the smallest one with exactly these ranks: a GPU, a node, or a place in the layout.
   The cause is the phase in which they take longer than the others, or the reason for it: throttling, another process,
   too little CPU time, more work.
5. **Losses of the whole run.** If no rank is late, the time may go to data, transfer, copies, slow launches or
   throttling. Each detector measures one of these, less what a healthy run loses, too.
6. **Persistence.** A candidate is a finding if it lasts long enough, and is not a matter of chance (below).
7. **Priority.** A finding that another one explains is not shown.

A run in which no rank makes progress is judged by its own pace: how long it has waited for the same thing before. A run
that is slower than it was, at the same work per step, is compared with its own past.

## Minimum duration of a loss

A loss is measured in parts of at least a second and a step. It is a finding if its mean over at least these seconds is
above the limit, and if it is not a matter of chance:

{tiers}

It is not chance if its probability is below `chance`, or a part of it in less than 100 s, for one of these reasons:

- It is steady. The deviation of the parts gives the probability, by Student's t. Three or four equal steps suffice,
  however long they are.
- It has enough events, which may be minutes apart. For the lag of a rank, the same rank is the last one in so many
  events that this is no chance for the number of ranks: in all of 6 events of eight ranks, or in all of 15 of two.
  A loss of the whole run needs as many events as that of one of eight ranks.

Steps in a planned phase (start-up, checkpoint, evaluation) do not count. A finding ends when the loss has been below
{release} of {loss} for {release_seconds} s, and for 1.5 times the longest time between two of its events. If it returns
within 15 minutes with the same cause and place, it is the same finding. So what happens in each minute, or throttling
in each ten, is one finding that stays open between. Its ratio is the mean over the time of two events.

Cause and place are fixed when a finding starts; the severity becomes critical at most once, when the loss exceeds
{severe}. If another phase causes the loss and the first one explains too little of it, another finding replaces it.

`launch` and `device_reads` show only in steps that are measured on the GPU: of short steps one every second or two, of
steps with hundreds of phases one every ten seconds. Only parts with such a step count for them.

If one rank works alone in a single step now and then, that step is rarely a measured one. So standstills of at least
5 s in which the other ranks wait for it count as compared time, as much of them as of all other steps.

A loss that every healthy run has counts only beyond an allowance: the run's own loss in the last hour (its lower
quartile), at most the allowance below. In the first minute of a run it is the allowance.

## Findings that explain others

An explained finding is not shown and does not alert:

{priority}

## Detectors

{detectors}

## Thresholds

Ratios and seconds, unless a reason says otherwise.

{thresholds}
"""


def generated() -> dict[Path, str]:
    """Return the expected content of the page, by path."""
    return {OUTPUT: page()}


def main() -> None:
    """Write the page."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


def page() -> str:
    """Return the whole page."""
    limits = Thresholds()
    explained = [(kind, ", ".join(f"`{by}`" for by in kinds)) for kind, kinds in EXPLAINED_BY.items()]
    named = {pair: f"{pair[0]}` with the cause `{pair[1]}" if pair[1] else pair[0] for pair in _pairs()}
    explained += [(named[one], f"`{named[by]}`") for one, by in EXPLAINED_BY_CAUSE.items()]
    return TEXT.format(
        tiers=table(Tier._fields, limits.tiers),
        release=limits.release,
        loss=limits.loss,
        release_seconds=f"{limits.release_seconds:g}",
        severe=limits.severe,
        priority=table(("finding", "is explained by"), [(f"`{kind}`", by) for kind, by in explained]),
        detectors="\n\n".join(_detectors()),
        thresholds=table(("threshold", "value", "reason"), threshold_rows(limits)),
    )


def _pairs() -> list[KindAndCause]:
    return [*EXPLAINED_BY_CAUSE, *EXPLAINED_BY_CAUSE.values()]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    texts = [[f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in texts)


def _detectors() -> list[str]:
    return [f"### {_title(module.__name__)}\n\n{inspect.getdoc(module)}" for module in detectors.MODULES]


def _title(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ").capitalize()


def threshold_rows(limits: Thresholds) -> list[tuple[str, str, str]]:
    """Return name, value and reason of each threshold."""
    reasons = _reasons()
    return [
        (f"`{one.name}`", f"{getattr(limits, one.name):g}", reasons.get(one.name, ""))
        for one in fields(limits)
        if one.name != "tiers"
    ]


def _reasons() -> dict[str, str]:
    """Return the text below each field. A field without a text has that of the next field with one."""
    classes = [node for node in ast.parse(inspect.getsource(thresholds)).body if isinstance(node, ast.ClassDef)]
    (made,) = (node for node in classes if node.name == "Thresholds")
    found: dict[str, str] = {}
    name = ""
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
    return found


if __name__ == "__main__":
    main()
