"""Renders the rules: rules/recording, alerts and after_alerts as one ordered group, for any scrape interval.

    python deploy/prometheus/render.py                  writes rules/15s.yml, 5s.yml, fast.yml and what `explain` knows

Rules of your own, with nothing installed but PyYAML:

    python deploy/prometheus/render.py --interval 30s --thresholds mine.yml --keep team --out DIR

writes DIR/30s.yml for scrapes and evaluations each 30 s, with the thresholds that mine.yml has instead of those of
thresholds.yml, and with `team` kept, which is a label of your series, beside `cluster`: ranks and GPUs that differ in
a kept label are never compared or joined, and alerts have it.

The order of the files and of the rules in them is that of the evaluation, facts first, then alerts, then what reads
alerts: Prometheus evaluates the rules of a group one after the other and those of several groups beside each other.

What is rendered is committed, so that Prometheus needs nothing but it. In a source `<<name>>` is a threshold,
`<<planned_phases>>` and `<<computing_phases>>` are phases of `rankscope.record.phases`, and `<<cause_words>>` and
`<<cause_advice>>` are what causes.yml has on each cause of the alert. What stands between the lines
`# <<for each tier>>` and `# <<end>>` is there once for each row of `tiers`, whose fields are `<<tier_limit>>` and so
on. `<<first_tier_span>>` is that of the first row. Kept labels are added wherever series are joined, aggregated or
asked for, and `owner` wherever that is by `run`, since two users may name their runs alike: no source names them.
Percentages, and durations below a minute, are rounded to two digits.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

try:
    import yaml
except ModuleNotFoundError:
    sys.exit("render.py: needs PyYAML: pip install PyYAML")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "trainer_hooks"))  # for those who have not installed Rankscope here

from rankscope.record.phases import COMPUTING, PLANNED  # noqa: E402

KNOWN = HERE.parents[1] / "trainer_hooks/rankscope/cli/explaining/known.json"
ALERTMANAGER = HERE.parent / "alertmanager/alertmanager.yml"
RUNBOOKS = "https://github.com/rankscope/rankscope/blob/main/docs/runbooks"
PLACEHOLDER = re.compile(r"<<\s*(?P<name>\w+)\s*(?:\|\s*(?P<form>\w+)\s*)?>>")
DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
LABEL = re.compile(r"[a-zA-Z_]\w*")
# The labels by which an expression joins or aggregates, and a query in the text of an alert with what fills it in.
LABELS_OF_A_JOIN = re.compile(r"\b(by|on) \((\w+(?:, \w+)*)\)")
QUERY = re.compile(r"printf `([^`]*)`((?: \$labels\.\w+)+) \| query")
MATCHERS = re.compile(r"\{[^{}]*%q[^{}]*\}")
MATCHED = re.compile(r"(\w+)=%q")
ROUNDED = (
    (re.compile(r"\| humanizePercentage\b"), '| printf "%.2g" | humanizePercentage'),
    (
        re.compile(r"(\$value|\. \| first \| value) \| humanizeDuration"),
        r'printf (or (and (lt (\1) 60.0) "%.2g") "%.0f") (\1) | humanizeDuration',
    ),
)
"""Patterns in the texts of alerts, and what they become."""
KEPT = ("cluster",)
OWNED = {"run": "owner"}
"""What belongs to a label: a run is one of its owner's, as the kernel tells (decision 24)."""
FLAPPING = 'alertname="RankscopeFlapping"'
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"(.*)"')
TRIED = (5, 60)  # seconds between scrapes, as docs/install/existing-prometheus.md promises
FIRST_TIER = "first_tier_"
EACH_TIER, END = "# <<for each tier>>", "# <<end>>"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PHASES = {"planned_phases": "|".join(PLANNED), "computing_phases": "|".join(COMPUTING)}


@dataclass(frozen=True)
class Speed:
    """Rules for scrapes and evaluations each `interval` seconds."""

    name: str
    """Of the rendered file."""
    interval: int
    is_fast: bool = False
    """Whether it is for the demo and the tests, whose ranks share two processors and where nobody waits for hours."""


SPEEDS = (Speed("15s", 15), Speed("5s", 5), Speed("fast", 1, is_fast=True))

Threshold = Mapping[str, Any]
Causes = Mapping[str, Mapping[str, Any]]
"""Of each alert, as causes.yml has it."""


class RenderError(Exception):
    """The sources or the thresholds are wrong; the text says where."""


@dataclass(frozen=True)
class Thresholds:
    """What thresholds.yml says."""

    named: Mapping[str, Threshold]
    tiers: tuple[Mapping[str, Threshold], ...] = ()

    @classmethod
    def load(cls, path: Path) -> Thresholds:
        """Raises RenderError for what is no threshold."""
        named: dict[str, Any] = yaml.safe_load(path.read_text())
        tiers = named.pop("tiers", {"rows": []})["rows"]
        for name, fields in [*named.items(), *(field for row in tiers for field in row.items())]:
            _check(f"{path.name}: {name}", fields)
        return cls(named, tuple(tiers))

    def replaced(self, path: Path) -> Thresholds:
        """The same with an operator's own, `name: value` or fields as here, instead. Raises RenderError."""
        try:
            own: object = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RenderError(f"{path}: {error}") from None
        if not isinstance(own, dict):
            raise RenderError(f"{path}: is no table of thresholds such as checkpoint_overdue: 1h")
        fields = {name: _own(one) for name, one in own.items()}
        for name, one in fields.items():
            if name not in self.named:
                raise RenderError(f"{path}: {name} is no threshold of thresholds.yml")
            _check(f"{path}: {name}", one)
            if (kind := _kind(self.named[name])) != _kind(one):
                raise RenderError(f"{path}: {name} needs {kind}")
        return replace(self, named={**self.named, **fields})


def _own(fields: object) -> Threshold:
    """An operator's reasons are his own."""
    return {"reason": "", **fields} if isinstance(fields, dict) else {"reason": "", "value": fields}


def _kind(fields: Threshold) -> str:
    """What its value has to be."""
    value = fields.get("value", "1s")
    if isinstance(value, str):
        return "a duration such as 90s or 5m" if DURATION.fullmatch(value) else "a text"
    return "a number"


def _check(where: str, fields: Threshold) -> None:
    """A value, or a number of scrapes or evaluations and how long they last at least; another one if it is fast."""
    for allowed in ({"value"}, {"scrapes"}, {"scrapes", "at_least"}, {"evaluations", "at_least"}):
        if set(fields) in (allowed | {"reason"}, allowed | {"reason", "fast", "why_fast"}):
            return
    raise RenderError(
        f"{where} needs value, scrapes or evaluations, a reason, and may have at_least, and fast with why_fast; "
        f"it has {', '.join(sorted(fields))}"
    )


def value_of(fields: Threshold, speed: Speed) -> str:
    """The threshold at a speed; a number of scrapes is a duration."""
    if speed.is_fast and "fast" in fields:
        return str(fields["fast"])
    if "value" in fields:
        return str(fields["value"])
    intervals = fields.get("scrapes") or fields["evaluations"] - 1
    span = intervals * speed.interval + ("evaluations" in fields)  # a second more holds the one at the edge
    return duration(max(span, float(seconds(fields.get("at_least", "0s")))))


def duration(span: float) -> str:
    """Seconds as Prometheus writes them, in the largest unit that divides them."""
    return next(f"{span / size:g}{unit}" for unit, size in reversed(SECONDS.items()) if span % size == 0)


def seconds(duration: str) -> str:
    """A duration such as `90s` or `5m` as a number of seconds; raises ValueError if it is none."""
    match = DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration} is no duration such as 90s or 5m")
    return f"{int(match[1]) * SECONDS[match[2]]:g}"


def percent(ratio: str) -> str:
    """A ratio such as `0.1` as a percentage."""
    return f"{float(ratio) * 100:g}%"


FORMS: dict[str | None, Callable[[str], str]] = {None: str, "seconds": seconds, "percent": percent}


@dataclass(frozen=True)
class Values:
    """What stands for the placeholders, at one speed."""

    thresholds: Thresholds
    causes: Causes
    speed: Speed
    kept: tuple[str, ...] = KEPT

    def of(self, name: str, alert: str) -> str:
        """In a rule that is this alert, if it is one. Raises RenderError."""
        if name in PHASES:
            return PHASES[name]
        if name in ("cause_words", "cause_advice"):
            return _by_cause(self.causes.get(alert, {}), name.removeprefix("cause_"))
        if name == "interval":
            return duration(self.speed.interval)
        if name.startswith(FIRST_TIER):
            return value_of(self.thresholds.tiers[0][name.removeprefix(FIRST_TIER)], self.speed)
        if name not in self.thresholds.named:
            raise RenderError(f"unknown threshold <<{name}>>")
        return value_of(self.thresholds.named[name], self.speed)

    def in_tier(self, number: int) -> Values:
        """The same with the fields of one of the tiers."""
        tier = {f"tier_{name}": fields for name, fields in self.thresholds.tiers[number - 1].items()}
        named = {**self.thresholds.named, **tier, "tier": {"value": number}}
        return replace(self, thresholds=Thresholds(named))


def _by_cause(alert: Mapping[str, Any], what: str) -> str:
    """A template that says of the alert's cause what causes.yml does; lines that a folded scalar makes one of."""
    texts = {cause: fields[what] for cause, fields in alert.get("causes", {}).items() if what in fields}
    if what == "words":
        texts = {cause: f"{text} ({{{{ $labels.cause }}}})" for cause, text in texts.items()}
    if not texts:
        raise RenderError(f"causes.yml has no {what} for this alert")
    first, between = ("{{", "") if what == "words" else ("{{-", " ")  # advice follows a sentence, or nothing does
    branches = [f'if match "^({cause})$" $labels.cause }}}}{between}{text}' for cause, text in texts.items()]
    otherwise = [f"{{{{- else }}}}{alert['otherwise']}"] if what == "words" and "otherwise" in alert else []
    lines = [f"{first} {branches[0]}", *(f"{{{{- else {branch}" for branch in branches[1:]), *otherwise]
    return "\n".join([*lines, "{{- end }}"])


def render(source: str, values: Values, where: str) -> str:
    """`source` with its placeholders filled in and a runbook for each alert. `where` stands in errors."""
    alert, lines = "", []
    for number, line, tier in _repeated(source, len(values.thresholds.tiers)):
        alert = match[1] if (match := re.fullmatch(r"- alert: (\w+)", line)) else alert
        rendered = _render_line(line, values.in_tier(tier) if tier else values, alert, f"{where}:{number}")
        lines.append(rendered if line.startswith("#") else _keep(rendered, values.kept))
        if line.strip() == "annotations:":
            lines.append(f"    runbook_url: {RUNBOOKS}/{alert}.md")
    return "".join(f"{line}\n" for line in lines)


def _repeated(source: str, tiers: int) -> Iterator[tuple[int, str, int]]:
    """The lines with their number in the source and that of their tier, which is 0 outside of what is repeated."""
    block: list[tuple[int, str]] | None = None
    for number, line in enumerate(source.splitlines(), start=1):
        if line == EACH_TIER:
            block = []
        elif line == END and block is not None:
            yield from ((number, line, tier) for tier in range(1, tiers + 1) for number, line in block)
            block = None
        elif block is not None:
            block.append((number, line))
        else:
            yield number, line, 0


def _render_line(line: str, values: Values, alert: str, where: str) -> str:
    indent = re.match(" *", line)[0]  # type: ignore[index]  # matches everything

    def value(match: re.Match[str]) -> str:
        name, form = match["name"], match["form"]
        if form not in FORMS:
            raise RenderError(f"{where}: unknown form <<{name} | {form}>>")
        try:
            return FORMS[form](values.of(name, alert)).replace("\n", f"\n{indent}")
        except RenderError as error:
            raise RenderError(f"{where}: {error}") from None
        except ValueError as error:
            raise RenderError(f"{where}: <<{name} | {form}>>: {error}") from None

    line = PLACEHOLDER.sub(value, line)
    for pattern, rounded in ROUNDED:
        line = pattern.sub(rounded, line)
    return line


def _keep(line: str, kept: Sequence[str]) -> str:
    """With these labels and owners in every join and aggregation, and in the queries of an alert's text by its own."""

    def in_join(match: re.Match[str]) -> str:
        labels = match[2].split(", ")
        added = (*_owners(labels), *kept)
        return f"{match[1]} ({', '.join([*labels, *(label for label in added if label not in labels)])})"

    def in_query(match: re.Match[str]) -> str:
        arguments = iter(match[2].split())
        filled: list[str] = []

        def in_matchers(matchers: re.Match[str]) -> str:
            labels = MATCHED.findall(matchers[0])
            added = (*_owners(labels), *kept)
            filled.extend(next(arguments) for _ in labels)
            filled.extend(f"$labels.{label}" for label in added)
            return matchers[0][:-1] + "".join(f",{label}=%q" for label in added) + "}"

        query = MATCHERS.sub(in_matchers, match[1])
        return f"printf `{query}` {' '.join([*filled, *arguments])} | query"

    return QUERY.sub(in_query, LABELS_OF_A_JOIN.sub(in_join, line))


def _owners(labels: Sequence[str]) -> list[str]:
    return [OWNED[label] for label in labels if label in OWNED]


def sources(root: Path = HERE) -> list[Path]:
    """The files with rules in the order of their evaluation."""
    folders = (root / "rules" / kind for kind in ("recording", "alerts", "after_alerts"))
    return [path for folder in folders for path in sorted(folder.glob("*.yml"))]


def render_all(root: Path = HERE) -> dict[Path, str]:
    """What each rendered file has to contain. Raises RenderError, for a threshold that nobody uses too."""
    rendered = {root / f"rules/{speed.name}.yml": group(speed, root) for speed in SPEEDS}
    used = {match["name"] for path in sources(root) for match in PLACEHOLDER.finditer(path.read_text())}
    for name in Thresholds.load(root / "thresholds.yml").named.keys() - used:
        raise RenderError(f"thresholds.yml: no rule uses {name}")
    return rendered


def group(speed: Speed, root: Path = HERE, own: Path | None = None, kept: tuple[str, ...] = KEPT) -> str:
    """The rules for one speed, as a file that Prometheus reads; `own` thresholds instead. Raises RenderError."""
    causes = yaml.safe_load((root / "causes.yml").read_text())
    thresholds = Thresholds.load(root / "thresholds.yml")
    values = Values(thresholds.replaced(own) if own else thresholds, causes["alerts"], speed, kept)
    rendered = "\n".join(render(path.read_text(), values, path.name) for path in sources(root))
    rules = "".join(f"{'      ' * bool(line.strip())}{line}" for line in rendered.splitlines(keepends=True))
    return (
        f"# For scrapes each {duration(speed.interval)}. Made by deploy/prometheus/render.py from recording, alerts,\n"
        "# ../thresholds.yml and ../causes.yml: edit those, then `make generate`; or render.py, if it is your own.\n\n"
        f"groups:\n  - name: rankscope\n    interval: {duration(speed.interval)}\n    rules:\n{rules}"
    )


def _whole_seconds(interval: str) -> int:
    if not re.fullmatch(r"[1-9]\d*[smh]", interval):
        raise RenderError(f"--interval: {interval} is no duration in whole seconds such as 30s or 1m")
    return int(seconds(interval))


def known(root: Path = HERE, alertmanager: Path = ALERTMANAGER) -> str:
    """What `rankscope explain` knows of causes and alerts, as JSON: it runs where there is no YAML."""
    causes = yaml.safe_load((root / "causes.yml").read_text())
    thresholds = yaml.safe_load((root / "thresholds.yml").read_text())
    inhibit_rules = yaml.safe_load(alertmanager.read_text())["inhibit_rules"]
    facts = {
        "made_by": "deploy/prometheus/render.py, from causes.yml, thresholds.yml and alertmanager.yml: "
        "edit those, then `make generate`",
        "meanings": {cause: of["in_short"] for cause, of in causes["lost"].items() if "in_short" in of},
        "shares": {alert: of["share"] for alert, of in causes["alerts"].items() if "share" in of},
        "tiers": [
            {
                "limit": tier["limit"]["value"],
                "evaluations": tier["span"]["evaluations"],
                "at_least": int(seconds(tier["span"]["at_least"])),
            }
            for tier in thresholds["tiers"]["rows"]
        ],
        "min_steps_to_alert": thresholds["min_steps_to_alert"]["value"],
        "inhibit_rules": [
            {
                "source": [_matcher(text) for text in rule["source_matchers"]],
                "target": [_matcher(text) for text in rule["target_matchers"]],
                "equal": rule["equal"],
            }
            for rule in inhibit_rules
            if FLAPPING not in rule["source_matchers"]  # `explain` shows the fault, however often it was notified
        ],
    }
    return json.dumps(facts, indent=1) + "\n"


def _matcher(text: str) -> list[str]:
    """Label, operator and value."""
    match = MATCHER.fullmatch(text)
    if match is None:
        raise RenderError(f'alertmanager.yml: {text} is no matcher such as run!=""')
    return list(match.groups())


def outdated(rendered: Mapping[Path, str]) -> Iterator[Path]:
    """The files that differ from what they have to be, are missing, or are left from a source that is gone."""
    for path, text in rendered.items():
        if not path.exists() or path.read_text() != text:
            yield path
    for directory in {path.parent for path in rendered if path.suffix == ".yml"}:
        yield from (path for path in sorted(directory.glob("*.yml")) if path not in rendered)


def write(rendered: Mapping[Path, str]) -> None:
    """Bring every outdated file up to date."""
    for path in list(outdated(rendered)):
        if path in rendered:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rendered[path])
        else:
            path.unlink()


def _write_own(options: argparse.Namespace) -> None:
    for label in options.keep:
        if not LABEL.fullmatch(label):
            raise RenderError(f"--keep: {label} is no name of a label")
    speed = Speed(options.interval, _whole_seconds(options.interval))
    text = group(speed, own=options.thresholds, kept=(*KEPT, *options.keep))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{speed.name}.yml"
    path.write_text(text)
    sys.stdout.write(f"{path}\n")
    if not min(TRIED) <= speed.interval <= max(TRIED):
        sys.stderr.write(f"render.py: {speed.name} is not tried: intervals between 5s and 1m are\n")


def generated() -> dict[Path, str]:
    """What each committed file has to contain that is made here. Raises RenderError."""
    return {**render_all(), KNOWN: known()}


def main() -> int:
    """Render; the exit status, which is 2 if the sources are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = parser.add_argument_group("rules of your own")
    own.add_argument("--out", type=Path, metavar="DIR", help="write them there, and nothing else")
    own.add_argument("--interval", default="15s", help="of scrapes and evaluations, such as 30s or 1m (15s)")
    own.add_argument("--thresholds", type=Path, metavar="FILE", help="a line `name: value` for each that differs")
    own.add_argument("--keep", action="append", default=[], metavar="LABEL", help="one more label to keep; repeatable")
    options = parser.parse_args()
    try:
        if options.out:
            _write_own(options)
            return 0
        if options.thresholds or options.keep or options.interval != "15s":
            raise RenderError("rules of your own are written to --out DIR")
        write(generated())
    except (RenderError, OSError) as error:
        sys.stderr.write(f"render.py: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
