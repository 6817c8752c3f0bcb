"""Write the texts of causes.yml that the Python packages contain, as JSON: they run without a YAML parser.

`make generate` runs this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CAUSES = ROOT / "exporter/rankscope_exporter/diagnosis/causes.yml"
WORDS = CAUSES.with_name("words.json")
KNOWN = ROOT / "trainer_hooks/rankscope/cli/explaining/known.json"
MADE_BY = "docs/generate_texts.py, from exporter/rankscope_exporter/diagnosis/causes.yml: edit it, then `make generate`"


def generated() -> dict[Path, str]:
    """Return the content of both files."""
    causes = yaml.safe_load(CAUSES.read_text(encoding="utf-8"))
    return {KNOWN: known(causes), WORDS: words(causes)}


def known(causes: Mapping[str, Any]) -> str:
    """Return what `rankscope explain` needs of the causes."""
    facts = {
        "made_by": MADE_BY,
        "meanings": {cause: of["in_short"] for cause, of in causes["lost"].items() if "in_short" in of},
    }
    return json.dumps(facts, indent=1) + "\n"


def words(causes: Mapping[str, Any]) -> str:
    """Return the texts of the findings and of GPUs by kind; `` stands for all other causes."""
    alerts = causes["alerts"].values()
    entries = [*alerts, *(cause for alert in alerts for cause in alert.get("causes", {}).values())]
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
    texts = {"made_by": MADE_BY, "alerts": _alerts(causes), "ports": ports, "evidence": causes["evidence"]}
    named = ",\n ".join(f"{json.dumps(name)}: {json.dumps(text)}" for name, text in texts.items())
    gpus = ",\n".join(
        f"  {json.dumps(kind)}: {json.dumps(_gpu_texts(entry))}" for kind, entry in causes["gpus"].items()
    )
    return f'{{{named},\n "gpus": {{\n{gpus}\n }},\n "kinds": {{\n{lines}\n }}}}\n'


def _alerts(causes: Mapping[str, Any]) -> dict[str, str]:
    """Return the alert of each kind of finding, and of problem of a GPU. That of several alerts is the first."""
    alerts = [(name, [entry, *entry.get("causes", {}).values()]) for name, entry in causes["alerts"].items()]
    found = [(entry["finding"], name) for name, entries in alerts for entry in entries if "finding" in entry]
    return {**dict(reversed(found)), **{kind: entry["alert"] for kind, entry in causes["gpus"].items()}}


def _gpu_texts(entry: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return each kind of texts of an alert about GPUs by cause."""
    return {what: _texts(entry, what, what) for what in ("summary", "evidence", "advice")}


def _texts(entry: Mapping[str, Any], what: str, default: str) -> dict[str, str]:
    """Return one kind of text of an alert by cause."""
    causes = entry.get("causes", {}).items()
    texts = {cause: fields[what] for key, fields in causes for cause in key.split("|") if what in fields}
    return texts | ({"": entry[default]} if default in entry else {})


def main() -> None:
    """Write the files."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
