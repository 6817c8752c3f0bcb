"""Attack: one process with the maximum of records and too many children, to delay all other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.attacks.ranks.ranks_support import living
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.config import parse
from rankscope_exporter.ranks import process_usage
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.watcher import RankWatcher
from rankscope_exporter.registry import HELP, rank_collectors

pytestmark = needs_root
RECORDS, CHILDREN, POLLS = 128, 1100, 30
# The children wait for the end of their parent's input. They are forked before there is memory to copy.
COSTLY = f"""
for _ in range({CHILDREN}):
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
more = [publish(directory, f"more{{n}}", **{{**info, "run": f"more{{n}}"}}) for n in range({RECORDS - 1})]
"""


def shown(watcher: RankWatcher) -> dict[str, float]:
    """Return the values of the victim's rank on the page, by the metric and its last labels."""
    samples = (sample for one in watcher.collectors for family in one.collect() for sample in family.samples)
    return {
        " ".join([sample.name, *list(sample.labels.values())[3:]]): sample.value
        for sample in samples
        if sample.labels.get("owner") == str(VICTIM)
    }


def test_a_process_with_many_records_and_children_removes_no_rank_from_the_page(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []
    read = process_usage._read
    monkeypatch.setattr(process_usage, "_read", lambda path: files.append(path) or read(path))
    collectors, _ = rank_collectors(parse(HELP, [], {}), lambda _at: {})
    watcher = RankWatcher(RunDirectory([run_dir]), collectors)
    with (
        living(run_dir, VICTIM, "mine", before="os.fork() or (os.read(0, 1), os._exit(0))"),
        living(run_dir, MALLORY, "x", before=COSTLY),
    ):
        for _ in range(POLLS):
            watcher.poll()
            page = shown(watcher)
            assert page["rankscope_rank_up"] == 1
            assert page["rankscope_rank_child_processes"] == 1
            assert "rankscope_rank_cpu_seconds_total workers" in page
    assert len(files) < POLLS * 20
