"""The texts of causes.yml that the Python packages contain, as JSON: they run without a YAML parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from deploy.prometheus.shipped import HERE

KNOWN = HERE.parents[1] / "trainer_hooks/rankscope/cli/explaining/known.json"
WORDS = HERE.parents[1] / "exporter/rankscope_exporter/diagnosis/words.json"


def generated() -> dict[Path, str]:
    """Return the content of both files."""
    return {KNOWN: known(), WORDS: words()}


def known(root: Path = HERE) -> str:
    """Return what `rankscope explain` needs of the causes, as JSON: it runs without a YAML parser."""
    causes = yaml.safe_load((root / "causes.yml").read_text())
    facts = {
        "made_by": "deploy/prometheus/render.py, from causes.yml: edit it, then run `make generate`",
        "meanings": {cause: of["in_short"] for cause, of in causes["lost"].items() if "in_short" in of},
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
