"""Renders the Helm chart to deploy/kustomize/rankscope.yaml: what `make generate` calls. Needs helm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHART = HERE / "rankscope"
OUTPUT = HERE.parent / "kustomize/rankscope.yaml"
OF_HELM = ("helm.sh/chart:", "app.kubernetes.io/managed-by:")
"""Labels that say that Helm has installed an object."""
HEAD = "# Made by deploy/helm/generate.py from the Helm chart with its default values: `make generate`.\n"


def program(name: str) -> str:
    """Return the path of helm or kubectl: the one that `make helm` has installed, else the one on the PATH."""
    installed = Path(sys.executable).with_name(name)
    found = str(installed) if installed.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: run `make helm`")
    return found


def render(*arguments: str) -> str:
    """Return what `helm template` prints for these arguments. Raises CalledProcessError."""
    command = [program("helm"), "template", "rankscope", str(CHART), "--namespace=rankscope", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - our own chart


def generated() -> dict[Path, str]:
    """Return what each committed file has to contain that is made here."""
    text = render("--set=image.repository=rankscope-exporter")
    lines = [line for line in text.splitlines() if not line.strip().startswith(OF_HELM)]
    return {OUTPUT: HEAD + "\n".join(lines).strip() + "\n"}


def main() -> None:
    """Write them."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
