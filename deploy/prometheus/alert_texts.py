"""The texts of causes.yml as templates of alerts, and the formats of the numbers in these templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deploy.prometheus.thresholds import RenderError

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
    **{label: f"{{{{ $labels.{label} }}}}" for label in ("run", "cause", "phase")},
    "node": '{{ or $labels.node "its node" }}',
    "ranks": '{{ if not (match " " $labels.rank) }} --rank {{ $labels.rank }}{{ end }}',
    "place": (
        '{{ if match "[-, ]" $labels.rank }}Set of '
        '{{ if not (match " " $labels.rank) }}ranks {{ end }}{{ $labels.rank }}'
        '{{ with printf `max by (place) (rankscope_finding_ratio{run=%q,rank=%q,place!=""})` $labels.run $labels.rank '
        '| query }} ({{ . | first | label "place" }}){{ end }}'
        "{{ else }}Rank {{ $labels.rank }}{{ with $labels.node }} ({{ . }}"
        "{{ with printf `topk(1, rankscope_gpu_info{uuid=%q})` $labels.uuid | query }}"
        ', GPU {{ . | first | label "gpu" }}{{ end }}){{ end }}{{ end }}'
    ),
    "ratio": "{{ $value | percent }}",
    "busy": "{{ $value | percent }}",
    "age": "{{ $value | duration }}",
    "scale": "{{ $value | number }}",
    "stage": (EVIDENCE.format("stage_imbalance", "stage") + "Stage {{ . | first | value }}{{ else }}A stage{{ end }}"),
}
"""Fields of the texts in causes.yml, as templates. diagnosis/words.py has the same."""
FIELD = re.compile(r"\{(\w+)\}")
NAME = re.compile(r"cause_(words|evidence|advice)|(summary|words|advice)(?:_(\w+))?")
"""The name of a text's placeholder."""


def format_numbers(line: str) -> str:
    """Return a line in which each number of a template has two significant digits at most."""
    for pattern, replacement in NUMBER_FORMATS:
        line = pattern.sub(replacement, line)
    return line


def template(alert: Mapping[str, Any], by_cause: str | None, what: str, cause: str | None) -> str:
    """Return a text of an alert in causes.yml as a template, by the groups of NAME. Raises RenderError."""
    if by_cause:
        return _by_cause(alert, by_cause)
    return _text(alert.get("causes", {}).get(cause, {}) if cause else alert, what)


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
