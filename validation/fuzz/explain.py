"""Check whether any answer of a server breaks `rankscope explain`.

    python -m validation.fuzz.explain --inputs 100000 --save

The answers of a Prometheus (explain_answers.py) are mutated at random: swapped types, missing or duplicate fields, odd
numbers and texts, thousands of brackets, truncation, wrong content, wrong status. They go through the real command,
without the network. The command must end with 0 and lines that a terminal can print, or a line of valid JSON; or with 2
and one such line on stderr. Input N depends only on the seed and N: `--first N --inputs 1` repeats a failure.

With `--save` the next call continues where the last one ended.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import io
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from validation.fuzz import fuzzing
from validation.fuzz.explain_answers import NOW, Scene, answer
from validation.fuzz.fuzzing import FuzzError

from rankscope.cli.explaining.command import show
from rankscope.cli.explaining.fetching import BODY_LIMIT, Answer, FetchError
from rankscope.cli.explaining.prometheus import Prometheus

BOUND = "exit status 0 or 2, and text that a terminal can print"
QUESTIONS = 11  # the number of requests of an explanation; each input mutates the answers to some of them
LINES = 250  # maximum of an explanation with the longest texts
SCENES = (
    *(Scene(), Scene(), Scene(has_findings=False), Scene(has_findings=False, is_judged=False)),
    *(Scene(runs=("train", "two")), Scene(runs=("ended",), has_findings=False), Scene(runs=())),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 0.5, 1e308, -1e308, 10**30, 10**400, [], {}, [[]], [None], {"": ""}, {"a": {"b": []}}),
    *("", "NaN", "+Inf", "-Inf", "1e400", "-1", "1e308", "0x10", "1_000", "٣", "9" * 5000),
    *("1e18", "-1e17", "253402300800"),
    *("\n", "\x00", "\x1b[2J", "\x9b2J", "\u202e", "\u2028", "\ud800", "\\", '"', "{", '"} or up{a="', "x" * 5000),
    *("critical", "firing", "none", "straggler", "other", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"),
    *("$", '",phase="' * 400, "rankscope_finding_info", "hang", "%s%n{0}{found}", ["0", "0"], "train"),
)
TEXTS = tuple(odd for odd in ODD if isinstance(odd, str))
NAMES = (
    *("metric", "value", "data", "result", "labels", "run", "rank", "cause"),
    *("alertname", "__name__", "uuid", "severity", "summary"),
)
BODIES = (
    *(b"", b"null", b"[]", b"{}", b"0", b'"', b"\xff\xfe", b"<html>Log in</html>", b"NaN", b"9" * 5000, b"-" * 100),
    *(b"[" * 100_000, b'{"data":' * 20_000, b'{"data":{"result":' + b"[" * 100_000, b'{"error":"' + b"\\u001b" * 1000),
    *(b'{"data":{"result":[' + b"{}," * 1000 + b"{}]}}", b'{"data":{"result":[' + b"[]," * 1000 + b"0]}}"),
    b'{"data":{"result":[{"metric":{"run":"a","run":"b"},"value":[NaN,"1"]},{"metric":{},"value":[0,Infinity]}]}}',
)
FAILURES: tuple[Exception, ...] = (
    *(OSError("no route\n\x1b[2J"), TimeoutError("timed out"), http.client.BadStatusLine("\x1b[2J" * 9000)),
    *(FetchError("it redirects from http to 'ftp://a'"), ValueError("\x00"), http.client.IncompleteRead(b"x" * 99)),
)


class MutatingServer:
    """A stand-in for the network that answers each request, some with mutations."""

    def __init__(self, choose: random.Random, scene: Scene) -> None:
        self._choose, self._scene = choose, scene
        some = choose.choice((1, 1, 1, 2, 4, QUESTIONS))
        self._mutated = set(choose.sample(range(QUESTIONS), some))
        self._asked = 0
        self.has_mutated = False

    def __call__(self, url: str, _headers: Mapping[str, str]) -> Answer:
        """Answer a request, like `fetch`."""
        found = answer(url, self._scene)
        self._asked += 1
        if self._asked - 1 not in self._mutated:
            return Answer(200, "OK", json.dumps(found).encode())
        self.has_mutated = True
        kind = self._choose.random()
        if kind < 0.04:
            raise self._choose.choice(FAILURES)
        if kind < 0.10:
            return Answer(self._choose.choice((204, 302, 400, 401, 404, 422, 500, 999)), "No\x1b[2J", self._body(found))
        return Answer(200, "OK", self._body(found)[:BODY_LIMIT])

    def _body(self, found: dict[str, Any]) -> bytes:
        choose = self._choose
        if choose.random() < 0.15:
            return choose.choice(BODIES)
        found = copy.deepcopy(found)
        for _ in range(choose.choice((1, 1, 2, 3, 8))):
            _mutate(choose, found)
        body = bytearray(json.dumps(found).encode())
        if choose.random() < 0.1:
            del body[choose.randrange(len(body) + 1) :]
        elif choose.random() < 0.1:
            for _ in range(choose.choice((1, 2, 8))):
                body[choose.randrange(len(body))] ^= 1 << choose.randrange(8)
        return bytes(body)


def _mutate(choose: random.Random, found: dict[str, Any]) -> None:
    """Replace, remove, add or rename one value of the tree, or repeat it many times."""
    holder, key = choose.choice([*values(found), (found, "data")])
    kind = choose.randrange(10)
    if kind == 0:
        holder.pop(key, None) if isinstance(holder, dict) else holder.pop(key)
    elif kind == 1 and isinstance(holder, dict):
        holder[choose.choice(NAMES)] = holder.pop(key, None)
    elif kind == 2 and isinstance(holder, list):
        holder[:] = holder * choose.choice((2, 2, 30))
    elif kind == 3 and isinstance(holder, dict):
        holder[choose.choice((*NAMES, "more", "\x1b"))] = copy.deepcopy(choose.choice(ODD))
    elif kind < 8 and isinstance(holder, dict) and isinstance(holder.get(key), str):
        holder[key] = choose.choice(TEXTS)  # of the right type, so that it gets past the first checks
    else:
        holder[key] = copy.deepcopy(choose.choice(ODD))


def values(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value of a JSON tree, as its container and its key."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from values(tree[key])


def explained(seed: int, number: int) -> str:
    """Return the outcome of input `number` in a word. Raises FuzzError."""
    choose = random.Random(f"{seed}/{number}")
    scene = choose.choice(SCENES)
    server = MutatingServer(choose, scene)
    as_json = choose.random() < 0.3
    at = choose.choice((None, None, f"{NOW:.0f}"))
    run = "\x1b[2J" if choose.random() < 0.05 else choose.choice((None, *scene.runs))
    out, err = io.StringIO(), io.StringIO()

    def connect(url: str, moment: float | None) -> Prometheus:
        return Prometheus(url, moment, fetch=server)

    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = show("http://alice:secret@127.0.0.1:9090", run, None, None, at, as_json, connect=connect)
        kind = _checked(status, out.getvalue(), err.getvalue(), as_json)
        return kind if server.has_mutated else f"{kind}, not mutated"
    except Exception as error:
        raise FuzzError(f"seed {seed}, input {number}: {error!r}") from error


def _checked(status: int, out: str, err: str, as_json: bool) -> str:
    """Return the kind of the outcome. Raises FuzzError for output that a terminal or a program cannot read."""
    lines = (out or err).splitlines(keepends=True)
    if not all(line.endswith("\n") and (line[:-1].isprintable()) for line in lines) or "secret" in out + err:
        raise FuzzError(f"not printable: {(out + err)[:300]!r}")
    if status == 2 and not out and len(lines) == 1 and err.startswith("rankscope explain: "):
        return _kind(err)
    if status != 0 or err or not 1 <= len(lines) <= (1 if as_json else LINES):
        raise FuzzError(f"neither an explanation nor one line: {status}, {(out + err)[:300]!r}")
    if as_json:
        json.loads(out, parse_constant=_refuse)
    return "explained in JSON" if as_json else "explained"


def _refuse(constant: str) -> NoReturn:
    raise FuzzError(f"{constant} is no JSON")


KINDS = ("not a Prometheus", "cannot reach", "answers \\d+", "choose one", "has no run")


def _kind(err: str) -> str:
    return next((kind for kind in KINDS if re.search(kind, err)), "another error")


def run(seed: int, first: int, inputs: int) -> Counter[str]:
    """Fuzz inputs `first` … `first + inputs`. Return the outcomes. Raises FuzzError that names the input."""
    outcome: Counter[str] = Counter()
    for number in range(first, first + inputs):
        outcome[explained(seed, number)] += 1
    return outcome


def main() -> None:
    os.environ["COLUMNS"] = "100"
    fuzzing.main(__doc__, "inputs", run, "fuzz_explain", BOUND)


if __name__ == "__main__":
    main()
