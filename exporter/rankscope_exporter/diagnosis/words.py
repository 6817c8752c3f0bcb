"""Findings in words: one sentence that says what is wrong, where and how much, and what to do first.

The texts are in causes.yml; docs/generate_texts.py writes them to words.json. Alerts have them from the metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.record.quantities import duration, number, percent, size
from rankscope_exporter.diagnosis.detectors import ONE_PER_RUN
from rankscope_exporter.diagnosis.findings import LAYOUT, LISTED, Candidate, Place
from rankscope_exporter.diagnosis.readings import Run, run_title

_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
WORDS: Mapping[str, Mapping[str, Mapping[str, str]]] = _TEXTS["kinds"]
"""By kind the `summary`, the `words` after the colon and the `advice`, each by cause; `` is for all other causes."""
PORT_FAULTS: Mapping[str, str] = _TEXTS["ports"]
"""What is wrong with a network port, by the name of the evidence."""
EVIDENCE: Mapping[str, str] = _TEXTS["evidence"]
"""What a number says, by the name of the evidence."""
GPUS: Mapping[str, Mapping[str, Mapping[str, str]]] = _TEXTS["gpus"]
"""By kind of a GPU's problem the `summary`, `evidence` and `advice`, each by cause."""
ALERTS: Mapping[str, str] = _TEXTS["alerts"]
"""The alert about each kind of finding and of a GPU's problem. Its runbook has the same name."""


def where(candidate: Candidate) -> str:
    """Return the ranks and where they are: `Rank 3 (node-a, GPU 3)`, `Context place 3 (ranks 3,7, node-a)`."""
    place = candidate.place
    named, also = (_place_name(text) for text in (place.place, place.also))
    ranks, gpu = _ranks(place), f"GPU {place.gpu}" if place.gpu else ""
    if place.rank is not None and named in ("", gpu):
        first, around = ranks, [place.node, gpu, also]
    else:
        node = place.node if named != f"node {place.node}" else ""
        first, around = named or f"set of {ranks}", [ranks if named else "", node, also]
    text = ", ".join(filter(None, around))
    return first[0].upper() + first[1:] + (f" ({text})" if text else "")


def _ranks(place: Place) -> str:
    if len(place.ranks) > LISTED:
        return place.rank_label
    return f"rank {place.rank}" if len(place.ranks) < 2 else f"ranks {place.rank_label}"


def _place_name(text: str) -> str:
    kind, _, number = text.partition(" ")
    return f"{kind} place {number}" if kind in LAYOUT.values() else text


def sentence(run: Run, candidate: Candidate) -> str:
    """Return what is wrong, where and how much, in one sentence without a full stop."""
    summary, words = _text(candidate, "summary"), _text(candidate, "words")
    text = f"{summary}: {words}" if words else summary
    if candidate.kind in ONE_PER_RUN and candidate.place.ranks:
        text = text.replace("The ranks", f"R{_ranks(candidate.place)[1:]}", 1)
    return text.format_map({"run": run_title(run), **_fields(candidate)})


def short_sentence(candidate: Candidate) -> str:
    """Return the same of a hang or a crash without the run: `Rank 3 (node-a, GPU 3) is stuck in data_wait`."""
    text = _text(candidate, "summary").removeprefix("Run {run} hangs: ").replace(" of run {run}", "")
    text = text.format_map(_fields(candidate))
    return text[:1].upper() + text[1:]


def advice(candidate: Candidate) -> str:
    """Return what to do first."""
    return _text(candidate, "advice").format_map(_fields(candidate))


def evidence(candidate: Candidate) -> str:
    """Return what the numbers say, in one sentence; empty without numbers that the summary does not have."""
    phrases = [
        text.format(
            ratio=percent(value), number=number(value), bytes=size(value), duration=duration(value),
            seconds=f"{number(value)} s", whole=f"{value:.0f}", cause=candidate.cause,
        )
        for name, value in candidate.evidence.items()
        if (text := EVIDENCE.get(name)) and (value or "{number}" not in text)
    ]  # fmt: skip
    text = "; ".join(phrases)
    return text[:1].upper() + text[1:] + "." * bool(text)


def gpu_texts(kind: str, cause: str, fields: Mapping[str, object]) -> tuple[str, str, str]:
    """Return the summary of a GPU's problem, its evidence and the advice. Fields that are empty are unknown."""
    texts = (GPUS[kind][what] for what in ("summary", "evidence", "advice"))
    summary, evidence, advice = (_fill(of.get(cause, of[""]), fields) for of in texts)
    return summary, evidence[:1].upper() + evidence[1:], advice


def _fill(text: str, fields: Mapping[str, object]) -> str:
    """Return the text without the parts in [ ] that have an unknown field."""
    parts = re.split(r"\[(.*?)\]", text)
    are_known = (all(map(fields.get, re.findall(r"{(\w+)}", part))) for part in parts[1::2])
    kept = (part if is_known else "" for part, is_known in zip(parts[1::2], are_known, strict=True))
    optional = [*kept, ""]
    return "".join(part.format_map(fields) for pair in zip(parts[::2], optional, strict=True) for part in pair)


def advice_by_cause(kind: str) -> dict[str, str]:
    """Return the advice of a kind by cause, for a report that names no rank."""
    texts = WORDS[kind]["advice"].items()
    return {cause: text.format(ranks=" --rank N", node="its node", cause=cause) for cause, text in texts}


def _text(candidate: Candidate, what: str) -> str:
    texts = WORDS[candidate.kind][what]
    return texts.get(candidate.cause, texts.get("", ""))


def _fields(candidate: Candidate) -> dict[str, object]:
    """Return the values of the fields in the texts."""
    evidence, place = candidate.evidence, candidate.place
    return {
        "place": where(candidate),
        "ranks": "" if len(place.ranks) > LISTED else f" --rank {place.rank_label}",
        "node": place.node or "its node",
        "cause": candidate.cause,
        "phase": candidate.cause,
        "in_phase": f" in {candidate.phase}" if candidate.phase else "",
        "rank": place.rank_label,
        "full_in": duration(evidence.get("full_in", 0.0)),
        "step": f"{evidence.get('since_step', 0.0):.0f}",
        "ratio": percent(candidate.ratio),
        "busy": percent(1.0 - candidate.ratio),
        "age": duration(evidence.get("age", candidate.lasted or 0.0)),
        "scale": number(evidence.get("scale", 0.0)),
        "stage": f"Stage {evidence['stage']:.0f}" if "stage" in evidence else "A stage",
        "link": _link(candidate),
    }


def _link(candidate: Candidate) -> str:
    """Return what is wrong with a network port, with a GPU's link, or between the ranks of a group."""
    place = candidate.place
    if not place.port and place.rank is None:
        return f"the link between ranks {place.group} is slow"
    if not place.port:
        return f"the link of r{where(candidate)[1:]} is reduced"
    faults = (
        text.format(ratio=percent(value), number=number(value))
        for name, text in PORT_FAULTS.items()
        if (value := candidate.evidence.get(name)) is not None
    )
    return f"port {place.port} of {place.node} {next(faults, 'is at fault')}"
