"""Show what a new user sees of one fault after the other: a minute of each on two ranks, and a minute between them.

    RANKS=2 python -m validation.new_user --save

The job, its faults, the exporter, Prometheus, Alertmanager and the notifications are real; rules and Alertmanager run
at the demo's speed, and the exporter has the thresholds as shipped. The GPUs are simulated. In each scene,
`rankscope top`, the status page, `rankscope explain`, the notifications and `rankscope report` are read at the given
seconds after its onset; reading takes ten more. A cell has the problems that the view names, or a dash. It is right if
it names this scene's own problem and no other; the report also has those of the earlier scenes. Candidates that are
not yet an alert are shown, but judged only while a hang is not certain. The raw figures have the full texts.
"""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from testing import report
from testing.report import Line, table, yes_or_no
from testing.servers import directories
from testing.stack import Stack
from validation.gauntlet.arena import RUN, Arena
from validation.succession import first_of_each

from rankscope_exporter.diagnosis.words import WORDS

TRAINS_FOR = 60.0  # seconds before the first fault
VIEWS = ("top", "page", "explain", "report", "notified")
Do = Callable[[Arena], object]


class Scene(NamedTuple):
    """An event, and what is right at each moment after it, as `found` returns it."""

    name: str
    begin: Do
    rights: Mapping[float, str]
    """By seconds after the onset: the only problem that is right to show; empty for none."""
    lasts: float = 60.0


def slow(rank: int, **behavior: Any) -> Do:
    return lambda arena: arena.change_ranks(ranks={rank: behavior})


LATE_DATA = "rank 1, its data is late"
COMPUTE = "rank 1, slow computation in backward"
LOGGING = "rank 0, extra work outside the model"
HANG = "hang, rank 1 in other"
NOT_YET = "not yet: "
HEALED = Scene("it ends", lambda arena: arena.heal(), {40.0: "", 55.0: ""})
SCENES = (
    Scene("healthy", lambda _: None, {30.0: ""}),
    Scene("slow data", slow(1, fetch=170.0), {20.0: LATE_DATA, 45.0: LATE_DATA}),
    HEALED,
    Scene("slow compute", slow(1, forward=50.0, backward=100.0), {20.0: COMPUTE, 45.0: COMPUTE}),
    HEALED,
    Scene("slow logging", slow(0, post=60.0), {20.0: LOGGING, 45.0: LOGGING}),
    HEALED,
    Scene("slow data", slow(1, fetch=170.0), {45.0: LATE_DATA}),
    Scene("at once, a hang", slow(1, hangs=True), {15.0: NOT_YET + HANG, 70.0: HANG}, lasts=85.0),
    HEALED,
    Scene("a kill", lambda arena: arena.kill(1), {20.0: "rank 1 was killed"}),
)
CAUSES = "|".join(re.escape(words).replace(r"\{cause\}", r"\w+") for words in WORDS["straggler"]["words"].values())
PLACE = r"Rank (?P<rank{0}>\d+) \([^)]*\)"
SENTENCE = re.compile(
    rf"(?P<not_yet>(?i:not yet an alert: ))?(?:{PLACE.format('')} slows down run train by [\d.]+%: (?P<cause>{CAUSES})"
    rf"|Run train hangs: {PLACE.format('_stuck')} is stuck in (?P<phase>\w+)"
    rf"|{PLACE.format('_ended')} of run train (?P<end>was killed|ended with an exception)"
    r"|(?P<wait>no rank has made progress)"
    r"|(?P<run>The ranks of run train slow each other down in turn|Run train (?:hangs|waits|spends|keeps)[^.:]*))"
)
"""A sentence about a problem, in the words of every view."""


class NewUser(Arena):
    """A node with the exporter as shipped and the demo's stack."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self._state_dir = directory / "state"
        self._state_dir.mkdir()
        exporter = ("rankscope_exporter", f"--state-dir={self._state_dir}")
        super().__init__(directory, memory, exporter=exporter, thresholds=None)
        self.stack = Stack(directory, [self.exporter])

    def _start(self, started: ExitStack) -> None:
        started.enter_context(self.stack)
        super()._start(started)

    def read(self, since: float) -> Mapping[str, str]:
        """Return the text of every view, and the notifications since that unix time. It takes about ten seconds."""
        prometheus = self.stack.prometheus.url
        views: dict[str, Callable[[], str]] = {  # in the order of VIEWS
            "top": lambda: self._command("top", "--once"),
            "page": self._page,
            "explain": lambda: self._command("explain", "--url", prometheus, "--run", RUN),
            "report": lambda: self._command("report", "--state-dir", str(self._state_dir), "--run", RUN),
        }
        with ThreadPoolExecutor(len(views)) as pool:
            texts = dict(zip(views, pool.map(lambda read: read(), views.values()), strict=True))
        firing = [one.line() for one in first_of_each(self.stack.webhook.firing()) if one.received >= since]
        return {**texts, "notified": "\n".join(firing)}

    def _page(self) -> str:
        with urllib.request.urlopen(self.exporter.url, timeout=10) as answer:
            page = re.sub(r"(?s)<(style|script).*?</\1>", "", answer.read().decode())
        return html.unescape(re.sub(r"<[^>]*>", " ", page))

    def _command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "rankscope.cli.launch", *arguments]
        variables = {**os.environ, "RANKSCOPE_RUN_DIR": str(self._run_dir), "COLUMNS": "240"}
        ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        return ran.stdout + ran.stderr


def play(arena: NewUser) -> Iterator[Line]:
    """Play all scenes. Yield a line for each moment, with what each view says and whether that is right."""
    reported: list[str] = []
    for scene in SCENES:
        scene.begin(arena)
        onset = time.time()
        for seconds, right in scene.rights.items():
            time.sleep(max(onset + seconds - time.time(), 0.0))
            texts = arena.read(onset)
            reported += [right] if right and not right.startswith(NOT_YET) and right not in reported else []
            said = {view: found(text) for view, text in texts.items()}
            said["notified"] = [word for one in texts["notified"].splitlines() for word in found(one)]
            wrong = [view for view in said if not _is_right(view, said[view], right, reported)]
            line = {"scene": scene.name, "seconds": seconds, "right": right, "said": said, "wrong": wrong}
            print(line, file=sys.stderr, flush=True)
            yield {**line, "texts": texts}
        time.sleep(max(onset + scene.lasts - time.time(), 0.0))


def _is_right(view: str, said: Sequence[str], right: str, reported: Sequence[str]) -> bool:
    """Return whether a view says what is right. The report has earlier problems, too, and none that is not certain."""
    is_sure = not right.startswith(NOT_YET)
    said = [one for one in said if not (is_sure and one.startswith(NOT_YET))]
    if view == "report":
        return said == [*reported]
    if view == "notified":
        return said == ([right] if right and is_sure else [])
    if view == "explain" and not is_sure:
        return not said  # it shows no candidates
    return said == ([right] if right else [])


def found(text: str) -> list[str]:
    """Return the different sentences about problems in a text, shortened."""
    plain = " ".join(re.sub(r"[│┃|]", " ", text).split())
    return list(dict.fromkeys(_shortened(one.groupdict()) for one in SENTENCE.finditer(plain)))


def _shortened(one: Mapping[str, str | None]) -> str:
    not_yet = "not yet: " if one["not_yet"] or one["wait"] else ""
    if one["rank"]:
        return f"{not_yet}rank {one['rank']}, {one['cause']}"
    if one["rank_stuck"]:
        return f"{not_yet}hang, rank {one['rank_stuck']} in {one['phase']}"
    if one["rank_ended"]:
        return f"{not_yet}rank {one['rank_ended']} {one['end']}"
    return f"{not_yet}{one['wait'] or one['run']}"


def body(lines: Sequence[Line]) -> list[str]:
    """Return the table, with what is wrong in bold."""
    rows = [
        (
            one["scene"],
            f"{one['seconds']:.0f} s",
            *(_cell(one, view) for view in one["said"]),
            yes_or_no(not one["wrong"]),
        )
        for one in lines
    ]
    return [table(("scene", "after", *VIEWS, "right"), rows)]


def _cell(line: Line, view: str) -> str:
    said = "; ".join(line["said"][view]) or "-"
    return f"**{said}**" if view in line["wrong"] else said


def main() -> int:
    """Play the scenes and publish the table. Return 1 if a view is wrong."""
    options = report.parser(__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the job and the servers, too
    with directories("new-user") as places, NewUser(*places) as arena:
        time.sleep(TRAINS_FOR)
        lines = [*play(arena)]
    title = "One fault after the other, as a new user sees it"
    report.Report("new_user", title, __doc__, "every view is right", body(lines), lines, ["torch"]).publish(
        options.save
    )
    return 1 if any(one["wrong"] for one in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
