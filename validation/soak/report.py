"""The figures of a soak, and the page of them, out of what was observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from validation.soak import checks, plan
from validation.soak.observations import Observation

Figures = dict[str, Any]

HEAD = """# Soak and chaos at production speed

Two real jobs of four ranks, one over gloo and one on the asynchronous device, each on a node with an exporter of its
own; one Prometheus with the rules for scrapes each 15 s and one Alertmanager, both configured as shipped. In each job
there is one fault after the other, while what watches them is killed, restarted, stopped and deceived. Real are the
jobs, exporters, servers and signals; the GPUs are simulated, a full run directory is a small tmpfs, and the clock that
jumps is the exporter's, in its process; Prometheus's does not.
"""


def summary(observed: Mapping[str, Sequence[Observation]]) -> Figures:
    """All that the page says."""
    (planned,), (begun,), (history,) = observed["plan"], observed["begin"], observed["history"]
    chaos, told = observed.get("chaos", []), observed.get("told", [])
    faults = checks.stories(observed.get("fault", []), observed.get("healed", []), observed["end"][0]["time"])
    strange = checks.assign(faults, told)
    memory, full = observed.get("memory", []), observed.get("full at start", [])
    return {
        "command": planned["command"],
        "seed": planned["seed"],
        "minutes": planned["seconds"] / 60,
        "load": _range(one["load"][0] for one in observed.get("load", [])),
        "cpu_pressure": _range(one["pressure"] for one in observed.get("load", []) if one["pressure"] is not None),
        "checks": [
            asdict(check)
            for check in (
                checks.none_lost(faults),
                checks.none_told_twice(faults),
                checks.none_ended_early(faults),
                checks.no_false_alarms(strange, chaos),
                checks.alerts_survive(history, chaos, faults),
                checks.counters_only_grow(history, chaos, begun["instances"]),
                checks.a_full_directory_stops_no_job(full),
                checks.memory_is_flat(memory),
                checks.nothing_failed(observed.get("error", [])),
            )
        ],
        "faults": [_fault(story, begun["time"]) for story in faults],
        "strange": [{**asdict(telling), "seconds": round(telling.received - begun["time"])} for telling in strange],
        "chaos": [_disturbance(one, begun["time"]) for one in chaos],
        "left_out": [f"{what}: {reason}" for what, reason in _left_out(observed.get("left out", []))],
        "messages": len(checks.messages(told)),
        "memory": checks.lives(memory),
    }


def page(figures: Figures) -> str:
    verdict = [f"| {c['check']} | {'yes' if c['holds'] else 'NO'} | {c['found']} |" for c in figures["checks"]]
    faults = [_row(fault) for fault in figures["faults"]]
    return "\n".join(
        [
            HEAD,
            f"{figures['minutes']:g} minutes, seed {figures['seed']}, {len(figures['faults'])} faults,",
            f"{len(figures['chaos'])} disturbances, {figures['messages']} messages. Load {_words(figures['load'])};",
            f"something waited for a processor {_words(figures['cpu_pressure'])} of the time.",
            "",
            *(["Left out: " + "; ".join(figures["left_out"]) + ".", ""] if figures["left_out"] else []),
            "| check | holds | found |",
            "|---|---|---|",
            *verdict,
            "",
            "Seconds are from the onset to the receiver, Alertmanager's waiting included.",
            "",
            "| minute | run | fault | alert | told after | messages |",
            "|---|---|---|---|---|---|",
            *faults,
            "",
            "| disturbed | how often | while an alert fired |",
            "|---|---|---|",
            *_disturbed(figures["chaos"]),
            "",
            f"Made by `{figures['command']}`.",
            "",
        ]
    )


def _fault(story: checks.Story, began: float) -> dict[str, Any]:
    first = story.told[0].alerts[0] if story.told else {}
    return {
        "minute": round((story.onset - began) / 60, 1),
        "run": story.run,
        "fault": story.title,
        "alert": first.get("alertname"),
        "place": story.place,
        "cause": first.get("cause"),
        "seconds": story.seconds,
        "messages": len(story.told),
        "held": round(story.healed - story.onset),
    }


def _row(fault: Mapping[str, Any]) -> str:
    where = " ".join(f"{name} {value}" for name, value in fault["place"].items())
    alert = f"{fault['alert'] or 'NOTHING'} {fault['cause'] or ''}".strip()
    what = f"{fault['fault']}{', ' if where else ''}{where}"
    return f"| {fault['minute']:.0f} | {fault['run']} | {what} | {alert} | {fault['seconds']} s | {fault['messages']} |"


def _disturbance(one: Observation, began: float) -> dict[str, Any]:
    firing = sorted({labels["alertname"] for labels in one["firing"]})
    said = {name: one[name] for name in ("act", "target", "run", "amount")}
    times = {"minute": round((one["began"] - began) / 60, 1), "seconds": round(one["ended"] - one["began"], 1)}
    return {**said, **times, "firing": firing}


def _disturbed(chaos: Iterable[Mapping[str, Any]]) -> list[str]:
    often: Counter[str] = Counter()
    firing: Counter[str] = Counter()
    for one in chaos:
        words = {plan.SLOW: "scrapes are slow", plan.FULL: "the run directory is full", plan.CLOCK: "the clock jumps"}
        name = words.get(one["act"], f"{one['target']}: {one['act']}")
        often[name] += 1
        firing[name] += bool(one["firing"])
    return [f"| {name} | {often[name]} | {firing[name]} |" for name in sorted(often)]


def _left_out(observed: Iterable[Observation]) -> list[tuple[str, str]]:
    return sorted({(one["what"], one["reason"]) for one in observed})


def _range(values: Iterable[float]) -> list[float]:
    found = sorted(values)
    return [found[0], found[len(found) // 2], found[-1]] if found else []


def _words(figures: Sequence[float]) -> str:
    return f"{figures[0]:.2f} to {figures[-1]:.2f}, median {figures[1]:.2f}" if figures else "not known"
