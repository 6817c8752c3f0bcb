"""Render the Helm chart to deploy/kustomize/rankscope.yaml; `make generate` runs this. Needs helm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHART = HERE / "rankscope"
OUTPUT = HERE.parent / "kustomize/rankscope.yaml"
HELM_LABELS = ("helm.sh/chart:", "app.kubernetes.io/managed-by:")
"""Labels of objects that Helm installs."""
HEAD = "# Made by deploy/helm/generate.py from the Helm chart with its default values: `make generate`.\n"


def program(name: str) -> str:
    """Return the path of helm or kubectl: from `make helm`, else from the PATH."""
    installed = Path(sys.executable).with_name(name)
    found = str(installed) if installed.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: run `make helm`")
    return found


def render(*arguments: str) -> str:
    """Return the output of `helm template` with these arguments. Raises CalledProcessError."""
    command = [program("helm"), "template", "rankscope", str(CHART), "--namespace=rankscope", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - our own chart


def generated() -> dict[Path, str]:
    """Return the expected content of the generated files, by path."""
    text = render("--set=image.repository=rankscope-exporter")
    lines = [line for line in text.splitlines() if not line.strip().startswith(HELM_LABELS)]
    return {OUTPUT: HEAD + "\n".join(lines).strip() + "\n"}


def main() -> None:
    """Write the files."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
