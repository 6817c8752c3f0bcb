"""The runs that `rankscope explain` explains: those with the given name, cluster and owner, or the live ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.moments import format_time
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError, quoted

RUNS_SHOWN = 20
IDENTITY = "run, cluster, owner"


class Run(NamedTuple):
    """A run: its name, cluster and owner identify it."""

    name: str
    cluster: str
    """The label of its series; empty without one."""
    owner: str
    """The uid of its user; empty without one."""

    def __str__(self) -> str:
        return f"{self.name} in cluster {self.cluster}" if self.cluster else self.name

    @property
    def of_owner(self) -> str:
        """The matchers of the series of all runs of its owner; an empty one matches series without the label."""
        return f"owner={quoted(self.owner)},cluster={quoted(self.cluster)}"

    @property
    def where(self) -> str:
        """The matchers of its series."""
        return f"run={quoted(self.name)},{self.of_owner}"


def latest(series: str) -> str:
    """Return an expression for series with their last values, also of an exporter that does not answer for a while."""
    return f"last_over_time({series}[2m])"


def live_ranks(where: str = "") -> str:
    """Return an expression for the live ranks of the runs with these labels, each with its node."""
    info, up = (latest(f"rankscope_rank_{name}{{{where}}}") for name in ("info", "up"))
    return f"group by ({IDENTITY}, node, rank) ({info} and on (job, instance, {IDENTITY}, rank) {up} == 1)"


def find_runs(prometheus: Prometheus, wanted: tuple[str | None, ...], is_now: bool) -> list[Run]:
    """Return the live runs with the given name, cluster and owner, or the only one. Raises PrometheusError."""
    known = latest('{__name__=~"rankscope_rank_info|rankscope_run_judged_info"}')
    runs = sorted(by_run(prometheus, f"group by ({IDENTITY}) ({known})"))
    if not runs:
        raise PrometheusError(f"{prometheus.url} {_none(prometheus, is_now)}")
    found = [run for run in runs if all(asked in (None, its) for asked, its in zip(wanted, run, strict=True))]
    if not found:
        words = zip((" ", " in cluster ", " of owner "), wanted, strict=True)
        asked = "".join(f"{word}{value}" for word, value in words if value is not None)
        raise PrometheusError(f"{prometheus.url} has no run{asked}; it has: {_listed(map(str, runs))}")
    if len(found) == 1:
        return found
    living = by_run(prometheus, f"count by ({IDENTITY}) ({live_ranks()})")
    alive = [run for run in found if run in living]
    if not alive:
        raise one_needed(prometheus, found)
    return alive


def one_needed(prometheus: Prometheus, runs: Sequence[Run]) -> PrometheusError:
    """Return the error that says which runs there are, and how to choose one."""
    living = by_run(prometheus, f"count by ({IDENTITY}) ({live_ranks()})")
    return PrometheusError(f"{prometheus.url} has {len(runs)} runs; {_choice(prometheus, runs, living)}")


def options_that_differ(runs: Iterable[Run]) -> str:
    """Return the options that select one of these runs, such as `--run and --owner`."""
    values = zip(("--run", "--cluster", "--owner"), zip(*runs, strict=True), strict=True)
    return " and ".join(flag for flag, known in values if len({*known}) > 1)


def _choice(prometheus: Prometheus, runs: Sequence[Run], living: Mapping[Run, float]) -> str:
    """Return the runs to choose from with state, start and last step, the living and the youngest first."""
    began, steps = (
        by_run(prometheus, f"max by ({IDENTITY}) (last_over_time(rankscope_rank_{series}[1h]))")
        for series in ("start_timestamp_seconds", "steps_total")
    )
    has_owners = len({run.owner for run in runs}) > 1

    def described(run: Run) -> str:
        words = [f"{living[run]:.0f} ranks" if run in living else "no live rank"]
        if has_owners:
            words.insert(0, f"owner {run.owner}")
        if run in began:
            words.append(f"started {format_time(began[run], '%Y-%m-%d %H:%M')}")
        if run in steps:
            words.append(f"step {steps[run]:.0f}")
        return f"{run} ({', '.join(words)})"

    ordered = sorted(runs, key=lambda run: (run not in living, -began.get(run, 0.0), run))
    return f"choose one with {options_that_differ(runs)}: {_listed(map(described, ordered))}"


def _listed(runs: Iterable[str]) -> str:
    first = list(islice(runs, RUNS_SHOWN + 1))
    return ", ".join(first[:RUNS_SHOWN]) + (", ..." if len(first) > RUNS_SHOWN else "")


def by_run(prometheus: Prometheus, expression: str) -> dict[Run, float]:
    """Return the values of an expression by run, cluster and owner."""
    return {run_of(sample): sample.value for sample in prometheus.query(expression, "run")}


def run_of(sample: Sample) -> Run:
    """Return the run that a sample is about."""
    return Run(sample.labels["run"], sample.labels.get("cluster", ""), sample.labels.get("owner", ""))


def _none(prometheus: Prometheus, is_now: bool) -> str:
    """Return that the server has no run, and why."""
    exporters = len(prometheus.query("group by (instance, cluster) (rankscope_exporter_build_info)"))
    if is_now and exporters:
        return f"has no run: it scrapes Rankscope exporters ({exporters}), but none shows a rank"
    if is_now:
        return "has no run and scrapes no Rankscope exporter: see its page /targets"
    if exporters:
        return f"had no run then: it scraped Rankscope exporters ({exporters}), but none showed a rank"
    return "had no run then and scraped no Rankscope exporter"
