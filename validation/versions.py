"""Run the hook's tests with every supported Python and every torch that can be installed (`make test-versions`).

    python -m validation.versions --save

Each pair has its own environment, which is removed after its tests. The tests are those of the hook that start no
process. A Python is available if `python3.N` runs, or if pyenv has it. By default each Python runs with the oldest and
the newest torch, and Python 3.12 with all; `--pairs 3.10/2.4 3.13/2.14` runs only these. The next call skips finished
pairs, unless `--again` is given.

`no wheel` means that pip installs no torch of that version for that Python on this machine, `no interpreter` that the
machine has no such Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from testing import report

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = tuple(f"2.{minor}" for minor in range(4, 16))
FULL = "3.12"  # the Python that runs with every torch
PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "cloudpickle", "safetensors", "PyYAML")
INSTALL_TIMEOUT, TEST_TIMEOUT = 1800, 3600  # seconds
HOOK_TESTS = (
    *("test_instrument", "test_script", "test_settings", "test_trackers", "record", "timeline"),
    *("process/test_identity", "process/test_manners", "process/test_manners_interrupted", "probes"),
)
# These need frameworks, or packages without a wheel for another torch.
LEFT_OUT = ("probes/test_frameworks.py", "probes/test_loader_workers.py")
# torch 2.4 has no FSDP2 that trains on a CPU, and DTensor in another place. It may hang while it destroys a gloo group:
# the destructor holds the GIL and joins a thread that waits for it.
NOT_IN_OLDEST = (
    "probes/test_forward.py::test_the_forward_of_an_fsdp2_model_is_forward",
    "probes/test_collectives.py::test_fsdp2_and_its_clipping_are_seen",
    "test_settings.py::test_fsdp2_is_recognized_by_its_parameters",
    "process/test_manners.py::test_recreated_process_groups_keep_their_name_and_their_sequence_number_grows",
    "probes/test_shared_batches.py",
    "probes/test_checkpoint.py::test_each_rank_of_a_sharded_save_counts_its_bytes",
)


def interpreter(python: str) -> str | None:
    """Return the path of a Python that runs; None if this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(f"python{python}"), *sorted(pyenv.glob(f"{python}.*/bin/python{python}"), reverse=True)):
        if found and subprocess.run([str(found), "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


def run_pair(python: str, torch: str) -> dict[str, Any]:
    """Install the pair and run the tests. Return the results."""
    known = {"id": f"{python}/{torch}", "date": str(date.today())}
    path = interpreter(python)
    if path is None:
        return {**known, "outcome": "no interpreter"}
    with tempfile.TemporaryDirectory(prefix="rankscope-versions-") as environment:
        subprocess.run([path, "-m", "venv", environment], check=True)
        numpy = "numpy<2" if torch == TORCHES[0] and python != "3.13" else "numpy"
        command = [f"{environment}/bin/pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
        command += [f"torch=={torch}.*", numpy, *PACKAGES]
        installed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT)
        if installed.returncode:
            missing = "No matching distribution found for torch" in installed.stderr
            missing |= "Could not find a version that satisfies the requirement torch" in installed.stderr
            missing |= "conflicting dependencies" in installed.stderr  # pip's message if it has a constraint on torch
            return {**known, "outcome": "no wheel" if missing else installed.stderr[-500:]}
        return {**known, **test(f"{environment}/bin/python", torch)}


def test(python: str, torch: str) -> dict[str, Any]:
    """Run the tests in an environment. Return the versions and the counts."""
    names = "import platform, torch; print(platform.python_version(), torch.__version__)"
    versions = subprocess.run([python, "-W", "ignore", "-c", names], capture_output=True, text=True, check=False)
    if versions.returncode:
        return {"outcome": f"torch cannot be imported: {versions.stderr[-300:]}"}
    full_python, full_torch = versions.stdout.split()
    left_out = [f"--ignore=tests/trainer_hooks/{file}" for file in LEFT_OUT]
    if torch == TORCHES[0]:
        left_out += [
            f"--{'deselect' if '::' in test else 'ignore'}=tests/trainer_hooks/{test}" for test in NOT_IN_OLDEST
        ]
    tests = [str(path) for name in HOOK_TESTS for path in (ROOT / "tests/trainer_hooks").glob(f"{name}*")]
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.xml")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["-m", "unit or torch", f"--junitxml={results}"]
        environment = {**os.environ, "PYTHONPATH": "trainer_hooks:exporter:.:grafana"}
        options: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
        process = subprocess.run([*command, *left_out, *tests], **options, check=False, timeout=TEST_TIMEOUT)
        counts = read_results(results) if results.exists() else {"errors": [process.stdout[-500:]]}
    return {"outcome": "tested", "python": full_python, "torch": full_torch, "status": process.returncode, **counts}


def read_results(path: Path) -> dict[str, Any]:
    """Return the numbers of passed and skipped tests, and the names and messages of failed ones."""
    cases = ElementTree.parse(path).getroot().findall(".//testcase")
    faults = [(case.get("name"), case.findall("failure") + case.findall("error")) for case in cases]
    failed = {name: found[0].get("message", "")[:500] for name, found in faults if found}
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "failed": failed, "skipped": skipped}


def default_pairs() -> list[str]:
    """Return each Python with the oldest and the newest torch, and one Python with all."""
    corners = [f"{python}/{torch}" for python in PYTHONS for torch in (TORCHES[0], TORCHES[-1])]
    return [*corners, *(f"{FULL}/{torch}" for torch in TORCHES)]


def cell(line: dict[str, Any] | None) -> str:
    """Return the table's cell for a pair."""
    if line is None:
        return "not run"
    if line["outcome"] != "tested":
        return str(line["outcome"]).splitlines()[-1][:60]
    if line["status"] not in (0, 1) or "passed" not in line:
        return f"**pytest ended with {line['status']}**"
    failed = f", **{len(line['failed'])} failed**" if line["failed"] else ""
    return f"{line['passed']} passed{failed}"


def details(lines: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Return a table with a row for each tested pair, and the names of failed tests."""
    rows = [
        (line["python"], line["torch"], *(line.get(count, 0) for count in ("passed", "skipped")), line["date"])
        for line in lines
    ]
    failed = [f"- {line['id']}: `{name}`" for line in lines for name in line.get("failed", ())]
    table = report.table(["Python", "torch", "passed", "skipped", "date"], rows)
    return table, "\n".join(["Failed:", "", *failed]) if failed else "No test failed."


def page(lines: Sequence[dict[str, Any]]) -> report.Report:
    """Return the page of these pairs, with the last result of each."""
    by_pair = {line["id"]: line for line in lines}
    pairs = [[by_pair.get(f"{python}/{torch}") for python in PYTHONS] for torch in TORCHES]
    rows = [[f"torch {torch}", *map(cell, row)] for torch, row in zip(TORCHES, pairs, strict=True)]
    tested = [line for row in pairs for line in row if line and line["outcome"] == "tested"]
    return report.Report(
        "versions",
        "The hook with each Python and torch",
        __doc__,
        "no test fails",
        [report.table(["", *(f"Python {python}" for python in PYTHONS)], rows), *details(tested)],
        list(by_pair.values()),
    )


def main() -> int:
    """Run the pairs that are not done, and publish the page. Return 1 if a test fails."""
    parser = report.parser(__doc__)
    parser.add_argument("--pairs", nargs="+", default=default_pairs(), metavar="PYTHON/TORCH", help="only these")
    parser.add_argument("--again", action="store_true", help="also pairs that are done")
    options = parser.parse_args()
    ledger = (options.save or report.Directories()).ledger("versions")
    for pair in dict.fromkeys(options.pairs):
        if options.again or not ledger.has(pair):
            line = run_pair(*pair.split("/"))
            ledger.add(line)
            print(f"{pair}: {cell(line)}", file=sys.stderr)
    published = page(ledger.lines)
    published.publish(options.save)
    return int(any(line.get("status") for line in published.figures))


if __name__ == "__main__":
    sys.exit(main())
