"""The texts and limits of the rules that the Python packages contain, as JSON: they run without a YAML parser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from deploy.prometheus.shipped import HERE
from deploy.prometheus.thresholds import RenderError, seconds

KNOWN = HERE.parents[1] / "trainer_hooks/rankscope/cli/explaining/known.json"
WORDS = HERE.parents[1] / "exporter/rankscope_exporter/diagnosis/words.json"
ALERTMANAGER = HERE.parent / "alertmanager/alertmanager.yml"
FLAPPING = 'alertname="RankscopeFlapping"'
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"(.*)"')


def generated() -> dict[Path, str]:
    """Return the content of both files. Raises RenderError."""
    return {KNOWN: known(), WORDS: words()}


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
    causes = yaml.safe_load((root / "causes.yml").read_text())
    alerts = causes["alerts"].values()
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
    texts = {"made_by": made_by, "ports": ports, "evidence": causes["evidence"]}
    named = ",\n ".join(f"{json.dumps(name)}: {json.dumps(text)}" for name, text in texts.items())
    return f'{{{named},\n "kinds": {{\n{lines}\n }}}}\n'


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
