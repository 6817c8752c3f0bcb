"""Writes the dashboards to grafana/dashboards/ and into the Helm chart: what `make generate` calls."""

from __future__ import annotations

from pathlib import Path

from rankscope_dashboards.queries import DASHBOARDS

OUTPUT = Path(__file__).parent / "dashboards"
CHART = Path(__file__).parents[1] / "deploy/helm/rankscope/files/dashboards"


def generated() -> dict[Path, str]:
    """What each dashboard's file has to contain."""
    texts = {f"{name}.json": dashboard.to_json() for name, dashboard in DASHBOARDS.items()}
    return {folder / name: text for folder in (OUTPUT, CHART) for name, text in texts.items()}


def main() -> None:
    """Write them all."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
