"""Write the dashboards to grafana/dashboards/ and into the Helm chart (part of `make generate`)."""

from __future__ import annotations

import json
from pathlib import Path

from rankscope_dashboards.queries import DASHBOARDS

OUTPUT = Path(__file__).parent / "dashboards"
CHART = Path(__file__).parents[1] / "deploy/helm/rankscope/files/dashboards"


def generated() -> dict[Path, str]:
    """Return the content of each dashboard file, by path."""
    texts = {f"{name}.json": dashboard.to_json() for name, dashboard in DASHBOARDS.items()}
    written = {OUTPUT / name: text for name, text in texts.items()}
    return written | {CHART / name: _compact(text) for name, text in texts.items()}


def _compact(text: str) -> str:
    """Return the JSON in one line: kubectl copies a ConfigMap into an annotation of at most 256 KiB."""
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) + "\n"


def main() -> None:
    """Write all files."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
