"""The command `rankscope explain`: what slows down a run, in some ten lines, or as one line of JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

from rankscope.cli.explaining.alerts import KNOWN, Alert
from rankscope.cli.explaining.explanation import Explanation, explain
from rankscope.cli.explaining.fetching import within
from rankscope.cli.explaining.moments import format_iso_time, format_time, parse_moment
from rankscope.cli.explaining.not_yet import STALL, NotYet
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError, UnreachableError
from rankscope.cli.printable import printable
from rankscope.record.quantities import count, duration, number, percent

CAUSES_SHOWN = 3  # and the sum of the others
SHOWN_FROM = 0.0005  # less is 0.0%
ALERTS_SHOWN = 3  # in addition to the verdict
UNNAMED_LIMIT = 0.1  # of `other`, from which on it would alert as a phase
MEANINGS: dict[str, str] = KNOWN["meanings"]  # docs/lost-time.md has the definitions
WORDS: dict[str, str] = KNOWN["words"]  # of the alert about a rank, by cause
CLOCKS = {"device": "the devices' clock", "host": "the hosts' clock", "mixed": "the devices' clock or the hosts'"}
BLAME = re.compile(r'rank:rankscope_blame:ratio\{rank="(.+)",phase="(.+)"\}')
COMPARED = ("rank:rankscope_wait:ratio", "group:rankscope_wait:reference", "rank:rankscope_lag:ratio")
EXPLAINED_WITHIN = 120.0  # seconds for some twenty queries: a server may be slow or hostile
LINE_LIMIT = 1000  # characters; only a hostile name is longer
ERROR_LIMIT = 8000  # characters: a choice of twenty runs with the longest names


def show(
    url: str,
    run: str | None,
    cluster: str | None,
    owner: str | None,
    at: str | None,
    as_json: bool,
    connect: Callable[[str, float | None], Prometheus] = Prometheus,
    explain_node: Callable[[], bool] = lambda: False,
) -> int:
    """Print the explanation. Returns the exit status: 2 if there is nothing to explain, with the reason on stderr.

    If no server answers, `explain_node` may print what this node knows; it returns whether it has.
    """
    try:
        moment = None if at is None else parse_moment(at)
        prometheus = connect(url, moment)
        found = within(EXPLAINED_WITHIN, lambda: explain(prometheus, run, cluster, owner, is_now=moment is None))
    except (PrometheusError, ValueError, TimeoutError) as error:
        is_of_now = at is None and not as_json
        if isinstance(error, UnreachableError) and is_of_now and explain_node():
            return 0
        print(f"rankscope explain: {printable(str(error), ERROR_LIMIT)}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    when = time.time() if moment is None else moment
    if as_json:
        sys.stdout.write(json.dumps(as_object(found, when)) + "\n")
    else:
        width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 120))
        sys.stdout.writelines(f"{printable(line, LINE_LIMIT)}\n" for line in as_lines(found, when, width))
    return 0


def as_object(found: Explanation, when: float) -> dict[str, object]:
    """Return the object that `--json` prints. Unknown values are null."""
    verdict = found.verdict
    return {
        "run": found.run.name,
        "cluster": found.run.cluster or None,
        "owner": found.run.owner or None,
        "at": round(when, 3),
        "clock": found.clock,
        "alert": verdict and verdict.name,
        "firing": verdict and verdict.is_firing,
        "since": verdict and (verdict.since or None),
        "severity": verdict and verdict.labels.get("severity"),
        "rank": verdict and verdict.labels.get("rank"),
        "host": found.host,
        "gpu": found.gpu,
        "cause": verdict and verdict.cause,
        "share": verdict and verdict.share(found.lost),
        "not_yet": found.not_yet and found.not_yet.as_object(),
        "evidence": {
            **(verdict.annotations if verdict else {}),  # first, so that none replaces the keys below
            "value": verdict and verdict.value,
            "lost": found.lost,
            "lost_gpu_hours": found.gpu_hours,
            "compared": found.compared,
        },
        "others": [alert.labels for alert in found.alerts[1:]],
    }


def as_lines(found: Explanation, when: float, width: int) -> Iterator[str]:
    """Yield the explanation as lines for a terminal."""
    moment = format_time(when, "%Y-%m-%d %H:%M:%S %Z")
    useful = f", {percent(found.lost['none'])} of the GPU time is useful compute" if "none" in found.lost else ""
    compared = f", compared by {CLOCKS[found.clock]}" if found.clock in CLOCKS else ""
    yield f"{found.run}: {_size(found)}{compared}{useful}, {moment}"
    yield from _table(found)
    if found.verdict is None:
        yield from _wrapped(_no_verdict(found), width)
        return
    yield from _verdict(found, found.verdict, width)
    yield from _others(found, width)
    if found.ended is not None:  # an alert that outlives its run has no figures
        yield f"Its ranks have ended. {_before(found.ended)}"


def _size(found: Explanation) -> str:
    if not found.ranks:
        return "no live rank"
    return f"{count(found.ranks, 'rank')} on {count(found.nodes, 'node')}"


def _table(found: Explanation) -> Iterator[str]:
    causes = [cause for cause, share in found.lost.items() if cause != "none" and share >= SHOWN_FROM]
    if causes:
        yield f"  {'lost to':42} share   GPU-hours so far"
    for cause in causes[:CAUSES_SHOWN]:
        name = f"{cause} ({MEANINGS[cause]})" if cause in MEANINGS else cause
        yield _row(name, found.lost[cause], found.gpu_hours.get(cause))
    if rest := causes[CAUSES_SHOWN:]:
        hours = [found.gpu_hours[cause] for cause in rest if cause in found.gpu_hours]
        yield _row(", ".join(rest), sum(found.lost[cause] for cause in rest), sum(hours) if hours else None)


def _row(name: str, share: float, hours: float | None) -> str:
    so_far = "" if hours is None else f"   {hours:16.2f}" if hours >= 0.01 else f"   {'under 0.01':>16}"
    return f"  {textwrap.shorten(name, 40, placeholder=' ...'):41}{percent(share):>6}{so_far}"


def _no_verdict(found: Explanation) -> str:
    if "none" not in found.lost and found.not_yet is None:
        if found.ended is None:
            return "No alert, and no figures: its ranks have just started, or have ended."
        return f"No alert, and no figures: its ranks have ended. {_before(found.ended)}"
    if found.not_yet is not None:
        return f"No alert yet: {_not_yet(found.not_yet)}"
    return f"No alert: no loss is large enough.{_blamed(found)}{_unnamed(found)}"


def _before(ended: float) -> str:
    return f"See the time before that with --at {ended - 30:.0f}."


def _not_yet(what: NotYet) -> str:
    when = "" if what.alerts_after_seconds is None else f"; it alerts after {duration(what.alerts_after_seconds)}"
    if what.cause == STALL:
        where = "" if what.rank is None else f": rank {what.rank} is in {what.phase}"
        return f"no rank has made progress for {duration(what.lasts)}{where}{when}."
    if what.rank is None:
        lost = f"{percent(what.share)} of the GPU time, more than usual, is lost to {what.cause}"
    else:
        words = WORDS.get(what.cause, WORDS[""]).format(cause=what.cause)
        lost = f"rank {what.rank} slows down the run by {percent(what.share)}: {words}"
    return f"{lost}, for {duration(what.lasts)}{when}."


def _unnamed(found: Explanation) -> str:
    """Return what to do if most of the loss is in no phase that the hook knows."""
    largest = next((cause for cause in found.lost if cause != "none"), None)
    if largest != "other" or found.lost["other"] < UNNAMED_LIMIT:
        return ""
    return (
        f" But {percent(found.lost['other'])} of the time is outside data loading, forward, backward, optimizer and "
        "collectives. First run rankscope stacks --rank 0 on its node to see where. Then wrap batches that come from "
        'no DataLoader (get_batch()) in rankscope.phase("data_wait"), and the rest in a phase of your own.'
    )


def _blamed(found: Explanation) -> str:
    """Return which rank the others waited for most, if that is the largest loss."""
    if next((cause for cause in found.lost if cause != "none"), None) != "straggler":
        return ""
    for series, share in found.compared.items():
        if blamed := BLAME.fullmatch(series):
            return f" The others waited most for rank {blamed[1]}, in {blamed[2]}: {percent(share)} of their time."
    return ""


def _verdict(found: Explanation, verdict: Alert, width: int) -> Iterator[str]:
    words = verdict.annotations.get("summary") or _in_short(verdict, found)
    yield from _wrapped(f"{_state(verdict)}{_since(verdict)}: {words}", width)
    yield from (f"  {line}" for line in _wrapped(_numbers(found, verdict), width - 2))
    if "runbook_url" in verdict.annotations:
        yield f"  {verdict.annotations['runbook_url']}"


def _state(alert: Alert) -> str:
    return alert.labels.get("severity", "firing").upper() if alert.is_firing else "PENDING, no notification yet"


def _since(verdict: Alert) -> str:
    since = format_iso_time(verdict.since)
    return f" since {since}" if since else ""


def _in_short(alert: Alert, found: Explanation) -> str:
    """Return an alert of a past moment by its labels: Prometheus does not keep its text."""
    host, gpu = (found.host, found.gpu) if alert is found.verdict else map(alert.labels.get, ("node", "gpu"))
    named = {"rank": alert.labels.get("rank"), "host": host, "GPU": gpu, "cause": alert.cause}
    share = alert.share(found.lost)
    words = [f"{name} {value}" for name, value in named.items() if value is not None]
    return ", ".join([alert.name, *words] + ([] if share is None else [f"{percent(share)} of the GPU time"]))


def _numbers(found: Explanation, verdict: Alert) -> str:
    """Return what was compared, as the notification says it if it is known."""
    if "description" in verdict.annotations:
        return verdict.annotations["description"]
    values = [found.compared[name] for name in COMPARED if name in found.compared]
    if not verdict.name.endswith("Lagging") or len(values) < len(COMPARED):
        return "" if verdict.value is None else f"The alert's value: {number(verdict.value)}."
    own, others, lag = map(percent, values)
    return f"It waits {own} of the time in collectives, the other ranks of its group {others}: a lag of {lag}."


def _others(found: Explanation, width: int) -> Iterator[str]:
    others = found.alerts[1:]
    for alert in others[:ALERTS_SHOWN]:
        summary = alert.annotations.get("summary") or _in_short(alert, found)
        yield textwrap.shorten(f"Also: {summary}", width, placeholder=" ...")
    if len(others) > ALERTS_SHOWN:
        yield f"And {count(len(others) - ALERTS_SHOWN, 'more alert')}: see --json."


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)  # names stay whole
