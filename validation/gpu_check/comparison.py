"""Part 1: each metric beside nvidia-smi's own word for it, between scrapes that were taken around it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

from validation.gpu_check import smi
from validation.gpu_check.exporter import Recorder, Scrape, Series, values
from validation.gpu_check.report import Check, judge, missing
from validation.gpu_check.table import TABLED, WORDS, expectations, spelled, word

# Seconds. What a scrape serves was read up to a second before it (an interval), so readings from before nvidia-smi
# began and after it ended are at hand once as much has passed.
AROUND = 1.6


def compare(part: str, recorder: Recorder) -> Iterator[Check]:
    """Everything that nvidia-smi says now."""
    time.sleep(AROUND)
    began = time.time()
    xml = smi.query()
    ended = time.time()
    time.sleep(AROUND)
    yield from beside(part, recorder.between(began - AROUND, ended + AROUND), xml)


def beside(part: str, scrapes: Sequence[Scrape], xml: str) -> Iterator[Check]:
    """The scrapes beside the document."""
    for index, (uuid, gpu, log) in enumerate(smi.gpus(xml)):
        name = part if index == 0 else f"{part}, GPU {index}"
        seen: set[Series] = set()
        yield from _numbers(name, scrapes, uuid, gpu, seen)
        yield from _words(name, scrapes, uuid, gpu, log, seen)
        yield from _others(name, scrapes, uuid, seen)
    yield from _count(part, scrapes, xml)


def _numbers(
    part: str, scrapes: Sequence[Scrape], uuid: str, gpu: ElementTree.Element, seen: set[Series]
) -> Iterator[Check]:
    for name, labels, theirs, slack in expectations(gpu):
        metric = f"rankscope_gpu_{name}"
        seen |= {series for scrape in scrapes for series in scrape.select(metric, uuid=uuid, **labels)}
        value, step = theirs or (None, 0.0)
        ours = values(scrapes, metric, uuid=uuid, **labels)
        yield judge(part, _shown(name, labels), ours, value, step + slack)


def _words(
    part: str,
    scrapes: Sequence[Scrape],
    uuid: str,
    gpu: ElementTree.Element,
    log: ElementTree.Element,
    seen: set[Series],
) -> Iterator[Check]:
    for row in WORDS:
        series = {s for scrape in scrapes for s in scrape.select(f"rankscope_gpu_{row.metric}", uuid=uuid)}
        seen |= series
        ours = sorted({value for s in series if (value := dict(s[1])[row.label])})
        theirs = word(log, gpu, row.path)
        about = f"{row.metric}{{{row.label}}}"
        if not ours or theirs is None:
            yield Check(part, about, missing(bool(ours), theirs is not None), " ".join(ours), theirs or "")
        else:
            fits = ours in ([theirs], [spelled(theirs)])
            yield Check(part, about, "ok" if fits else "differs", " ".join(ours), theirs)


def _others(part: str, scrapes: Sequence[Scrape], uuid: str, seen: set[Series]) -> Iterator[Check]:
    """Series of metrics in the table, with a label value that nvidia-smi has no element for."""
    served = {s for scrape in scrapes for s in scrape.values if s[0] in TABLED and dict(s[1]).get("uuid") == uuid}
    for name, pairs in sorted(served - seen, key=lambda series: (series[0], sorted(series[1]))):
        labels = {key: value for key, value in pairs if key not in ("gpu", "uuid")}
        ours = values(scrapes, name, uuid=uuid, **labels)
        yield judge(part, _shown(name.removeprefix("rankscope_gpu_"), labels), ours, None)


def _count(part: str, scrapes: Sequence[Scrape], xml: str) -> Iterator[Check]:
    attached = float(len(list(smi.gpus(xml))))
    for name in ("seen", "expected"):
        metric = f"rankscope_exporter_gpus_{name}"
        yield judge(part, metric, values(scrapes, metric), attached)


def _shown(name: str, labels: Mapping[str, str]) -> str:
    return " ".join([name, ", ".join(labels.values())]) if labels else name
