"""The command `rankscope history`: the events of each GPU, port and node over all runs, the worst first."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.cli.printable import printable
from rankscope.record.quantities import count, duration, number
from rankscope_exporter.job_report.job import NoJobError, check_directory
from rankscope_exporter.job_report.page import WIDTH, clock, hours
from rankscope_exporter.ledger.blame import SLOW
from rankscope_exporter.ledger.parts import DAY, FILE, Incident, Part, culprit_runs, read

PARTS_SHOWN, INCIDENTS_SHOWN = 20, 8
LINE_LIMIT = 1000
OTHERWISE = ": give the --state-dir of an exporter or an analyzer, as a user who may read it"
SECONDS = {"throttled": "throttled for {}", "link": "fewer lanes for {}", "lost": "lost for {}"}
"""Events that are times, in words. The others are numbers, except those of ports."""


class Trouble(NamedTuple):
    """A part and the events of the wanted time."""

    part: Part
    runs: int
    """The runs in which it was the culprit."""
    incidents: Sequence[Incident]
    """The newest first."""
    events: Mapping[str, float]

    @property
    def lost(self) -> float:
        """Return the GPU seconds that runs have lost to it, with evidence against it."""
        return sum(one.gpu_seconds for one in self.incidents if one.is_blamed)

    @property
    def badness(self) -> tuple[float, ...]:
        """Return what sorts the worst part first."""
        return -self.runs, -self.lost, -len(self.events), -len(self.incidents)


def show(state_dir: Path, days: float, *, is_json: bool, now: float | None = None) -> int:
    """Print the history. Return the exit status: 2 if there is none, with the reason on stderr."""
    now = time.time() if now is None else now
    try:
        if not 0.0 < days < float("inf"):
            raise NoJobError("--days: must be more than 0")
        found = troubles(_read(state_dir), now - days * DAY)
    except NoJobError as error:
        print(f"rankscope history: {printable(str(error), LINE_LIMIT)}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    printed = [_as_json(found, days, now)] if is_json else _lines(found, days)
    sys.stdout.writelines(f"{printable(line, None if is_json else LINE_LIMIT)}\n" for line in printed)
    return 0


def troubles(parts: Sequence[Part], since: float) -> list[Trouble]:
    """Return the parts to which something has happened since then, the worst first."""
    found = []
    for part in parts:
        incidents = sorted((one for one in part.incidents if one.ended >= since), key=lambda one: -one.ended)
        events: Counter[str] = Counter()
        for day in part.days:
            events.update(day.events if day.at > since - DAY else {})
        if incidents or events:
            found.append(Trouble(part, culprit_runs(part, parts, since), incidents, events))
    return sorted(found, key=lambda one: one.badness)


def _read(directory: Path) -> list[Part]:
    check_directory(directory, OTHERWISE)
    try:
        return [*read(directory)]
    except FileNotFoundError as error:
        if any(directory.glob("*-*.jsonl")):
            return []  # an exporter has saved runs there, and nothing has happened to a GPU
        raise NoJobError(f"{directory}: no exporter has saved anything there{OTHERWISE}") from error
    except OSError as error:
        raise NoJobError(f"{directory / FILE}: {error.strerror}{OTHERWISE}") from error


def _lines(found: Sequence[Trouble], days: float) -> Iterator[str]:
    span = "24 hours" if days == 1.0 else f"{days:g} days"
    if not found:
        yield f"Nothing happened to the GPUs, ports and nodes in the last {span}."
        return
    yield f"GPUs, ports and nodes with trouble in the last {span}, the worst first"
    for trouble in found[:PARTS_SHOWN]:
        yield ""
        yield _title(trouble)
        if events := [*_events(trouble.events)]:
            yield from _wrapped(", ".join(events))
        for incident in trouble.incidents[:INCIDENTS_SHOWN]:
            yield from _wrapped(_sentence(incident))
        if len(trouble.incidents) > INCIDENTS_SHOWN:
            yield f"  and {len(trouble.incidents) - INCIDENTS_SHOWN} more; --json has all"
    if len(found) > PARTS_SHOWN:
        yield f"\nand {len(found) - PARTS_SHOWN} more; --json has all"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _title(trouble: Trouble) -> str:
    part = trouble.part
    name = f" GPU {part.gpu} ({part.uuid})" if part.uuid else f" port {part.port}" if part.port else ""
    blamed = len({one.of_run for one in trouble.incidents if one.is_blamed})
    runs = trouble.runs if part.uuid else blamed
    lost = f", {hours(trouble.lost)} lost" if trouble.lost else ""
    return f"{part.node}{name}: " + (f"culprit in {count(runs, 'run')}{lost}" if runs else "not a culprit")


def _events(events: Mapping[str, float]) -> Iterator[str]:
    for event, value in sorted(events.items()):
        kind, _, which = event.partition(" ")
        if kind == "port":
            yield f"{which} for {duration(value)}"
        elif kind == "xid":
            yield f"XID {which}: {count(round(value), 'event')}"
        elif kind in SECONDS:
            yield SECONDS[kind].format(duration(value))
        else:
            yield f"uncorrected memory errors: {number(value)}"


def _sentence(one: Incident) -> str:
    verdicts = {"": "does not count", SLOW: "counts if it was slow as other ranks, too"}
    cause = f" ({one.cause})" if one.cause else ""
    owner = f" of uid {one.owner}" if one.owner else ""
    rank = f", rank {one.rank}" if one.rank else ""
    lost = f", {hours(one.gpu_seconds)} lost" if one.gpu_seconds else ""
    when = f"{clock(one.began)}, for {duration(max(one.ended - one.began, 0.0))}"
    verdict = verdicts.get(one.evidence, f"counts: {one.evidence}")
    return f"{when}: {one.kind}{cause} in run {one.run}{owner}{rank}{lost}; {verdict}"


def _as_json(found: Iterable[Trouble], days: float, now: float) -> str:
    parts: list[dict[str, Any]] = [
        {
            **{name: getattr(one.part, name) for name in ("node", "gpu", "uuid", "port")},
            "culprit_runs": one.runs,
            "lost_gpu_seconds": round(one.lost, 1),
            "events": one.events,
            "incidents": [asdict(incident) for incident in one.incidents],
        }
        for one in found
    ]
    return json.dumps({"at": now, "days": days, "parts": parts})
