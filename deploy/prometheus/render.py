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
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

try:
    import yaml
except ModuleNotFoundError:
    sys.exit("render.py: needs PyYAML: pip install PyYAML")

# Rankscope may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainer_hooks"))

from deploy.prometheus import alert_texts, packaged_texts
from deploy.prometheus.shipped import HERE
from deploy.prometheus.thresholds import FORMS, SPEEDS, RenderError, Speed, Thresholds, duration, value_of

from rankscope.record.phases import COMPUTING, PLANNED

RUNBOOKS = "https://github.com/rankscope/rankscope/blob/main/docs/runbooks"
PLACEHOLDER = re.compile(r"<<\s*(?P<name>\w+)\s*(?:\|\s*(?P<form>\w+)\s*)?>>")
LABEL = re.compile(r"[a-zA-Z_]\w*")
# The labels of a join or aggregation, and a query in an alert's text with its arguments.
LABELS_OF_A_JOIN = re.compile(r"\b(by|on) \((\w+(?:, \w+)*)\)")
QUERY = re.compile(r"printf `([^`]*)`((?: \$labels\.\w+)+) \| query")
MATCHERS = re.compile(r"\{[^{}]*%q[^{}]*\}")
MATCHED = re.compile(r"(\w+)=%q")
KEPT = ("cluster",)
OWNED = {"run": "owner"}
"""Labels that identify something only together with another label: a run is its owner's (decision 24)."""
TRIED = (5, 60)  # seconds between scrapes, as docs/install/existing-prometheus.md promises
FIRST_TIER = "first_tier_"
EACH_TIER, END = "# <<for each tier>>", "# <<end>>"
PHASES = {"planned_phases": "|".join(PLANNED), "computing_phases": "|".join(COMPUTING)}


@dataclass(frozen=True)
class Values:
    """The values of the placeholders at one speed."""

    thresholds: Thresholds
    causes: Mapping[str, Mapping[str, Any]]
    """The alerts of causes.yml by name."""
    speed: Speed
    kept: tuple[str, ...] = KEPT

    def of(self, name: str, alert: str) -> str:
        """Return the value of a placeholder in a rule, which is this alert if it is one. Raises RenderError."""
        if name in PHASES:
            return PHASES[name]
        if text := alert_texts.NAME.fullmatch(name):
            return alert_texts.template(self.causes.get(alert, {}), *text.groups())
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
    indent = " " * (len(line) - len(line.lstrip(" ")))

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

    return alert_texts.format_numbers(PLACEHOLDER.sub(value, line))


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
    speed = Speed.each(options.interval)
    text = group(speed, own=options.thresholds, kept=(*KEPT, *options.keep))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{speed.name}.yml"
    path.write_text(text)
    sys.stdout.write(f"{path}\n")
    if not min(TRIED) <= speed.interval <= max(TRIED):
        sys.stderr.write(f"render.py: {speed.name} is not tested; intervals between 5s and 1m are\n")


def generated() -> dict[Path, str]:
    """Return the content of each committed file that is generated here. Raises RenderError."""
    return {**render_all(), **packaged_texts.generated()}


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
