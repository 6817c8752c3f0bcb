"""Render the rules: rules/recording, alerts and after_alerts as one ordered group, for any scrape interval.

    python deploy/prometheus/render.py                  writes all that is generated from these sources

Your own rules need nothing but PyYAML:

    python deploy/prometheus/render.py --interval 30s --thresholds mine.yml --keep team --out DIR

writes DIR/30s.yml for scrapes and evaluations each 30 s. Thresholds in mine.yml replace those of thresholds.yml.
`team`, a label of your series, is kept in addition to `cluster`: ranks and GPUs that differ in a kept label are never
compared or joined, and alerts have it.

The order of the files and of the rules in them is the order of evaluation: facts, alerts, then rules that read alerts.
Prometheus evaluates the rules of one group in sequence, and those of different groups concurrently.

Sources contain these placeholders:

    <<name>>, <<name | seconds>>, <<name | percent>>, <<name | readable>>    a threshold
    <<interval>>                                the interval of scrapes and evaluations
    <<planned_phases>>, <<computing_phases>>    phases of rankscope.record.phases
    <<summary>>, <<advice>>                     texts of the alert in causes.yml; of one cause: <<summary_CAUSE>>
    <<cause_words>>, <<cause_evidence>>, <<cause_advice>>    the text for the alert's label `cause`
    {{ $value | percent }}, duration, number, bytes    a number with two significant digits at most
    {{ $value | count "rank" "ranks" }}         a number of things

The lines between `# <<for each tier>>` and `# <<end>>` are repeated for each row of `tiers`, with its fields as
`<<tier_limit>>` and so on. `<<first_tier_span>>` is the span of the first row. Kept labels are added to every join,
aggregation and query, and `owner` to those by `run`, because two users may give their runs the same name.
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
sys.path.insert(0, str(HERE.parents[1] / "trainer_hooks"))  # Rankscope may not be installed

from rankscope.record.phases import COMPUTING, PLANNED  # noqa: E402

KNOWN = HERE.parents[1] / "trainer_hooks/rankscope/cli/explaining/known.json"
WORDS = HERE.parents[1] / "exporter/rankscope_exporter/diagnosis/words.json"
ALERTMANAGER = HERE.parent / "alertmanager/alertmanager.yml"
RUNBOOKS = "https://github.com/rankscope/rankscope/blob/main/docs/runbooks"
PLACEHOLDER = re.compile(r"<<\s*(?P<name>\w+)\s*(?:\|\s*(?P<form>\w+)\s*)?>>")
DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
LABEL = re.compile(r"[a-zA-Z_]\w*")
# The labels of a join or aggregation, and a query in an alert's text with its arguments.
LABELS_OF_A_JOIN = re.compile(r"\b(by|on) \((\w+(?:, \w+)*)\)")
QUERY = re.compile(r"printf `([^`]*)`((?: \$labels\.\w+)+) \| query")
MATCHERS = re.compile(r"\{[^{}]*%q[^{}]*\}")
MATCHED = re.compile(r"(\w+)=%q")

_VALUE = r"\{\{(-?) (\$value|\. \| first \| value) \| "
_DIVIDED = r'{{{{ printf "vector(%f / {})" (\2) | query | first | value | printf "{}" }}}}'.format
NUMBER_FORMATS = (
    # printf rounds to two digits; humanizePercentage multiplies by 100.
    (re.compile(r"\| percent \}\}"), '| printf "%.2g" | humanizePercentage }}'),
    (re.compile(_VALUE + r"number \}\}"), r'{{\1 printf (or (and (lt (\2) 99.5) "%.2g") "%.0f") (\2) }}'),
    # humanize1024 has four digits, such as 47.68Mi.
    (
        re.compile(r"\| bytes \}\}"),
        r'| humanize1024 | reReplaceAll "^(\\\\d{2,}|\\\\d\\\\.\\\\d|\\\\d)[.\\\\d]*" "$1 " }}B',
    ),
    # Templates cannot divide, but queries can.
    (
        re.compile(_VALUE + r"duration \}\}"),
        r'{{\1 if lt (\2) 99.5 }}{{ printf "%.2g s" (\2) }}'
        rf"{{{{ else if lt (\2) 5970.0 }}}}{_DIVIDED(60, '%.2g min')}"
        rf"{{{{ else if lt (\2) 358200.0 }}}}{_DIVIDED(3600, '%.2g h')}"
        rf"{{{{ else }}}}{_DIVIDED(86400, '%.0f days')}{{{{ end }}}}",
    ),
    (
        re.compile(_VALUE + r'count "([^"]*)" "([^"]*)" \}\}'),
        r"{{\1 \2 }} {{ if eq (\2) 1.0 }}\3{{ else }}\4{{ end }}",
    ),
)
"""Patterns in the texts of alerts, and their replacements."""
EVIDENCE = (
    "{{{{ with printf `max by (run) "
    '(rankscope_finding_evidence{{run=%q,kind="{}",name="{}"}})` $labels.run | query }}}}'
)
FIELDS = {
    **{label: f"{{{{ $labels.{label} }}}}" for label in ("run", "rank", "node", "cause", "phase")},
    "place": (
        "Rank {{ $labels.rank }}{{ with $labels.node }} ({{ . }}"
        "{{ with printf `topk(1, rankscope_gpu_info{uuid=%q})` $labels.uuid | query }}"
        ', GPU {{ . | first | label "gpu" }}{{ end }}){{ end }}'
    ),
    "ratio": "{{ $value | percent }}",
    "busy": "{{ $value | percent }}",
    "age": "{{ $value | duration }}",
    "scale": "{{ $value | number }}",
    "stage": (EVIDENCE.format("stage_imbalance", "stage") + "Stage {{ . | first | value }}{{ else }}A stage{{ end }}"),
}
"""Fields of the texts in causes.yml, as templates. diagnosis/words.py has the same."""
FIELD = re.compile(r"\{(\w+)\}")
TEXT = re.compile(r"(summary|words|advice)(?:_(\w+))?")
KEPT = ("cluster",)
OWNED = {"run": "owner"}
"""Labels that identify something only together with another label: a run is its owner's (decision 24)."""
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
    """Name of the rendered file."""
    interval: int
    is_fast: bool = False
    """Rules for the demo and the tests, where ranks share two CPUs and waits are short."""


SPEEDS = (Speed("15s", 15), Speed("5s", 5), Speed("fast", 1, is_fast=True))

Threshold = Mapping[str, Any]
Causes = Mapping[str, Mapping[str, Any]]
"""The alerts of causes.yml by name."""


class RenderError(Exception):
    """The sources or the thresholds are wrong; the text says where."""


@dataclass(frozen=True)
class Thresholds:
    """The content of thresholds.yml."""

    named: Mapping[str, Threshold]
    tiers: tuple[Mapping[str, Threshold], ...] = ()

    @classmethod
    def load(cls, path: Path) -> Thresholds:
        """Load a file. Raises RenderError for an invalid threshold."""
        named: dict[str, Any] = yaml.safe_load(path.read_text())
        tiers = named.pop("tiers", {"rows": []})["rows"]
        for name, fields in [*named.items(), *(field for row in tiers for field in row.items())]:
            _check(f"{path.name}: {name}", fields)
        return cls(named, tuple(tiers))

    def replaced(self, path: Path) -> Thresholds:
        """Return them with an operator's own, as `name: value` or with fields. Raises RenderError."""
        try:
            own: object = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RenderError(f"{path}: {error}") from None
        if not isinstance(own, dict):
            raise RenderError(f"{path}: expected a table of thresholds such as checkpoint_overdue: 1h")
        fields = {name: _own(one) for name, one in own.items()}
        for name, one in fields.items():
            if name not in self.named:
                raise RenderError(f"{path}: {name} is not a threshold of thresholds.yml")
            _check(f"{path}: {name}", one)
            if (kind := _kind(self.named[name])) != _kind(one):
                raise RenderError(f"{path}: {name} needs {kind}")
        return replace(self, named={**self.named, **fields})


def _own(fields: object) -> Threshold:
    """Return the fields of an operator's threshold, which needs no reason."""
    return {"reason": "", **fields} if isinstance(fields, dict) else {"reason": "", "value": fields}


def _kind(fields: Threshold) -> str:
    """Return the kind of value that the threshold needs."""
    value = fields.get("value", "1s")
    if isinstance(value, str):
        return "a duration such as 90s or 5m" if DURATION.fullmatch(value) else "a text"
    return "a number"


def _check(where: str, fields: Threshold) -> None:
    """Check the names of a threshold's fields. Raises RenderError."""
    for allowed in ({"value"}, {"scrapes"}, {"scrapes", "at_least"}, {"evaluations", "at_least"}):
        if set(fields) in (allowed | {"reason"}, allowed | {"reason", "fast", "why_fast"}):
            return
    raise RenderError(
        f"{where} needs value, scrapes or evaluations, a reason, and may have at_least, and fast with why_fast; "
        f"it has {', '.join(sorted(fields))}"
    )


def value_of(fields: Threshold, speed: Speed) -> str:
    """Return the threshold at a speed; a number of scrapes becomes a duration."""
    if speed.is_fast and "fast" in fields:
        return str(fields["fast"])
    if "value" in fields:
        return str(fields["value"])
    intervals = fields.get("scrapes") or fields["evaluations"] - 1
    span = intervals * speed.interval + ("evaluations" in fields)  # one second more includes the one at the edge
    return duration(max(span, float(seconds(fields.get("at_least", "0s")))))


def duration(span: float) -> str:
    """Return seconds as a Prometheus duration, in the largest unit that divides them."""
    return next(f"{span / size:g}{unit}" for unit, size in reversed(SECONDS.items()) if span % size == 0)


def seconds(duration: str) -> str:
    """Return a duration such as `90s` or `5m` as a number of seconds. Raises ValueError."""
    match = DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration} is not a duration such as 90s or 5m")
    return f"{int(match[1]) * SECONDS[match[2]]:g}"


def percent(ratio: str) -> str:
    """Return a ratio such as `0.1` as a percentage."""
    return f"{float(ratio) * 100:g}%"


def readable(duration: str) -> str:
    """Return a duration such as `5m` in words: `5 min`. Raises ValueError."""
    number, unit = duration[:-1], duration[-1]
    seconds(duration)
    return f"{number} {'min' if unit == 'm' else unit}"


FORMS: dict[str | None, Callable[[str], str]] = {
    None: str,
    "seconds": seconds,
    "percent": percent,
    "readable": readable,
}


@dataclass(frozen=True)
class Values:
    """The values of the placeholders at one speed."""

    thresholds: Thresholds
    causes: Causes
    speed: Speed
    kept: tuple[str, ...] = KEPT

    def of(self, name: str, alert: str) -> str:
        """Return the value of a placeholder in a rule, which is this alert if it is one. Raises RenderError."""
        if name in PHASES:
            return PHASES[name]
        texts = self.causes.get(alert, {})
        if name in ("cause_words", "cause_evidence", "cause_advice"):
            return _by_cause(texts, name.removeprefix("cause_"))
        if match := TEXT.fullmatch(name):
            return _text(texts.get("causes", {}).get(match[2], {}) if match[2] else texts, match[1])
        if name == "interval":
            return duration(self.speed.interval)
        if name.startswith(FIRST_TIER):
            return value_of(self.thresholds.tiers[0][name.removeprefix(FIRST_TIER)], self.speed)
        if name not in self.thresholds.named:
            raise RenderError(f"unknown threshold <<{name}>>")
        return value_of(self.thresholds.named[name], self.speed)

    def in_tier(self, number: int) -> Values:
        """Return the values with the fields of one of the tiers."""
        tier = {f"tier_{name}": fields for name, fields in self.thresholds.tiers[number - 1].items()}
        named = {**self.thresholds.named, **tier, "tier": {"value": number}}
        return replace(self, thresholds=Thresholds(named))


def _text(entry: Mapping[str, Any], what: str) -> str:
    """Return a text of an alert or of one of its causes, as a template. Raises RenderError."""
    if what not in entry:
        raise RenderError(f"causes.yml has no {what} for this alert")
    fields = {**FIELDS, "link": _link(entry.get("ports", {}))}
    for name in FIELD.findall(entry[what]):
        if name not in fields:
            raise RenderError(f"causes.yml: unknown field {{{name}}} in {what}")
    return FIELD.sub(lambda match: fields[match[1]], entry[what])


def _link(ports: Mapping[str, str]) -> str:
    """Return the template that says what is wrong with a port, with a GPU's link, or between the ranks of a group."""
    value = {"ratio": "{{ . | first | value | percent }}", "number": "{{ . | first | value | number }}"}
    faults = [EVIDENCE.format("network", name) + text.format_map(value) for name, text in ports.items()]
    fault = "{{ else }}".join([*faults, "is at fault"]) + "{{ end }}" * len(faults)
    port = "{{ if $labels.port }}port {{ $labels.port }} of {{ $labels.node }} " + fault
    rank = "{{ else if $labels.rank }}the link of rank {{ $labels.rank }} ({{ $labels.node }}) is reduced"
    return port + rank + "{{ else }}the link between ranks {{ $labels.group }} is slow{{ end }}"


def _by_cause(alert: Mapping[str, Any], what: str) -> str:
    """Return a template with the text for the alert's cause, in lines of a folded scalar. Raises RenderError."""
    texts = {cause: _text(fields, what) for cause, fields in alert.get("causes", {}).items() if what in fields}
    default = {"words": "otherwise", "advice": "advice"}.get(what, "")
    otherwise = _text(alert, default) if default in alert else ""
    if not texts and otherwise:
        return otherwise
    if not texts:
        raise RenderError(f"causes.yml has no {what} for this alert")
    first, between = ("{{", "") if what == "words" else ("{{-", " ")  # words follow a colon, the others a sentence
    if what == "evidence":
        between = ""  # each part begins with a space, or is empty
    branches = [f'if match "^({cause})$" $labels.cause }}}}{between}{text}' for cause, text in texts.items()]
    last = [f"{{{{- else }}}}{between}{otherwise}"] if otherwise else []
    lines = [f"{first} {branches[0]}", *(f"{{{{- else {branch}" for branch in branches[1:]), *last]
    return "\n".join([*lines, "{{- end }}"])


def render(source: str, values: Values, where: str) -> str:
    """Return `source` with its placeholders filled in and a runbook for each alert. Errors name `where`."""
    alert, lines = "", []
    for number, line, tier in _repeated(source, len(values.thresholds.tiers)):
        alert = match[1] if (match := re.fullmatch(r"- alert: (\w+)", line)) else alert
        rendered = _render_line(line, values.in_tier(tier) if tier else values, alert, f"{where}:{number}")
        lines.append(rendered if line.startswith("#") else _keep(rendered, values.kept))
        if line.strip() == "annotations:":
            lines.append(f"    runbook_url: {RUNBOOKS}/{alert}.md")
    return "".join(f"{line}\n" for line in lines)


def _repeated(source: str, tiers: int) -> Iterator[tuple[int, str, int]]:
    """Yield each line with its number in the source and its tier, which is 0 outside of repeated lines."""
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
    for pattern, template in NUMBER_FORMATS:
        line = pattern.sub(template, line)
    return line


def _keep(line: str, kept: Sequence[str]) -> str:
    """Return the line with these labels and owners in every join, aggregation and query of an alert's text."""

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
    """Return the files with rules in the order of their evaluation."""
    folders = (root / "rules" / kind for kind in ("recording", "alerts", "after_alerts"))
    return [path for folder in folders for path in sorted(folder.glob("*.yml"))]


def render_all(root: Path = HERE) -> dict[Path, str]:
    """Return the content of each rendered file. Raises RenderError, also for an unused threshold."""
    rendered = {root / f"rules/{speed.name}.yml": group(speed, root) for speed in SPEEDS}
    used = {match["name"] for path in sources(root) for match in PLACEHOLDER.finditer(path.read_text())}
    for name in Thresholds.load(root / "thresholds.yml").named.keys() - used:
        raise RenderError(f"thresholds.yml: no rule uses {name}")
    return rendered


def group(speed: Speed, root: Path = HERE, own: Path | None = None, kept: tuple[str, ...] = KEPT) -> str:
    """Return the rules for one speed, with an operator's thresholds if `own` names them. Raises RenderError."""
    causes = yaml.safe_load((root / "causes.yml").read_text())
    thresholds = Thresholds.load(root / "thresholds.yml")
    values = Values(thresholds.replaced(own) if own else thresholds, causes["alerts"], speed, kept)
    rendered = "\n".join(render(path.read_text(), values, path.name) for path in sources(root))
    rules = "".join(f"{'      ' * bool(line.strip())}{line}" for line in rendered.splitlines(keepends=True))
    return (
        f"# For scrapes each {duration(speed.interval)}. Generated by deploy/prometheus/render.py from recording,\n"
        "# alerts, ../thresholds.yml and ../causes.yml: edit those, then run `make generate`.\n\n"
        f"groups:\n  - name: rankscope\n    interval: {duration(speed.interval)}\n    rules:\n{rules}"
    )


def _whole_seconds(interval: str) -> int:
    if not re.fullmatch(r"[1-9]\d*[smh]", interval):
        raise RenderError(f"--interval: {interval} is not a duration in whole seconds such as 30s or 1m")
    return int(seconds(interval))


def known(root: Path = HERE, alertmanager: Path = ALERTMANAGER) -> str:
    """Return what `rankscope explain` needs of causes and alerts, as JSON: it runs without a YAML parser."""
    causes = yaml.safe_load((root / "causes.yml").read_text())
    thresholds = yaml.safe_load((root / "thresholds.yml").read_text())
    inhibit_rules = yaml.safe_load(alertmanager.read_text())["inhibit_rules"]
    facts = {
        "made_by": "deploy/prometheus/render.py, from causes.yml, thresholds.yml and alertmanager.yml: "
        "edit those, then run `make generate`",
        "meanings": {cause: of["in_short"] for cause, of in causes["lost"].items() if "in_short" in of},
        "words": _texts(causes["alerts"].get("RankscopeRankLagging", {}), "words", "otherwise"),
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
            if FLAPPING not in rule["source_matchers"]  # `explain` also shows a fault that flaps
        ],
    }
    return json.dumps(facts, indent=1) + "\n"


def words(root: Path = HERE) -> str:
    """Return the texts of the exporter's findings by kind, as JSON; `` stands for all other causes."""
    alerts = yaml.safe_load((root / "causes.yml").read_text())["alerts"].values()
    entries = [*alerts, *(cause for alert in alerts for cause in alert.get("causes", {}).values())]
    made_by = "deploy/prometheus/render.py, from causes.yml: edit it, then run `make generate`"
    kinds = {
        entry["finding"]: {
            "summary": _texts(entry, "summary", "summary"),
            "words": _texts(entry, "words", "otherwise"),
            "advice": _texts(entry, "advice", "advice"),
        }
        for entry in entries
        if "finding" in entry
    }
    ports: Mapping[str, str] = next((entry["ports"] for entry in entries if "ports" in entry), {})
    lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(texts)}" for kind, texts in kinds.items())
    return f'{{"made_by": {json.dumps(made_by)},\n "ports": {json.dumps(ports)},\n "kinds": {{\n{lines}\n }}}}\n'


def _texts(entry: Mapping[str, Any], what: str, default: str) -> dict[str, str]:
    """Return one kind of text of an alert by cause."""
    causes = entry.get("causes", {}).items()
    texts = {cause: fields[what] for key, fields in causes for cause in key.split("|") if what in fields}
    return texts | ({"": entry[default]} if default in entry else {})


def _matcher(text: str) -> list[str]:
    """Return label, operator and value of a matcher. Raises RenderError."""
    match = MATCHER.fullmatch(text)
    if match is None:
        raise RenderError(f'alertmanager.yml: {text} is not a matcher such as run!=""')
    return list(match.groups())


def outdated(rendered: Mapping[Path, str]) -> Iterator[Path]:
    """Yield the files that differ, are missing, or have no source any more."""
    for path, text in rendered.items():
        if not path.exists() or path.read_text() != text:
            yield path
    for directory in {path.parent for path in rendered if path.suffix == ".yml"}:
        yield from (path for path in sorted(directory.glob("*.yml")) if path not in rendered)


def write(rendered: Mapping[Path, str]) -> None:
    """Write every outdated file."""
    for path in list(outdated(rendered)):
        if path in rendered:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rendered[path])
        else:
            path.unlink()


def _write_own(options: argparse.Namespace) -> None:
    for label in options.keep:
        if not LABEL.fullmatch(label):
            raise RenderError(f"--keep: {label} is not a label name")
    speed = Speed(options.interval, _whole_seconds(options.interval))
    text = group(speed, own=options.thresholds, kept=(*KEPT, *options.keep))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{speed.name}.yml"
    path.write_text(text)
    sys.stdout.write(f"{path}\n")
    if not min(TRIED) <= speed.interval <= max(TRIED):
        sys.stderr.write(f"render.py: {speed.name} is not tested; intervals between 5s and 1m are\n")


def generated() -> dict[Path, str]:
    """Return the content of each committed file that is generated here. Raises RenderError."""
    return {**render_all(), KNOWN: known(), WORDS: words()}


def main() -> int:
    """Render the files. Returns the exit status: 2 if the sources are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = parser.add_argument_group("your own rules")
    own.add_argument("--out", type=Path, metavar="DIR", help="write only these rules, to this folder")
    own.add_argument("--interval", default="15s", help="interval of scrapes and evaluations, such as 30s or 1m (15s)")
    own.add_argument("--thresholds", type=Path, metavar="FILE", help="thresholds that differ, as lines `name: value`")
    own.add_argument("--keep", action="append", default=[], metavar="LABEL", help="another label to keep; repeatable")
    options = parser.parse_args()
    try:
        if options.out:
            _write_own(options)
            return 0
        if options.thresholds or options.keep or options.interval != "15s":
            raise RenderError("your own rules need --out DIR")
        write(generated())
    except (RenderError, OSError) as error:
        sys.stderr.write(f"render.py: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
