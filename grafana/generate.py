"""Writes the dashboards to grafana/dashboards/: what `make generate` calls."""

from __future__ import annotations

from pathlib import Path

from rankscope_dashboards.queries import DASHBOARDS

OUTPUT = Path(__file__).parent / "dashboards"


def generated() -> dict[Path, str]:
    """What each dashboard's file has to contain."""
    return {OUTPUT / f"{name}.json": dashboard.to_json() for name, dashboard in DASHBOARDS.items()}


def main() -> None:
    """Write them all."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
