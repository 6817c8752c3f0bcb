"""The run directory of the mount unit: every user can write there, up to its limits."""

from __future__ import annotations

import configparser
import os
import subprocess
from pathlib import Path

import pytest

from rankscope.record.layout import SIZE
from rankscope.record.writer import SYSTEM_RUN_DIR
from rankscope_exporter.ranks.run_directory import FILES_LIMIT

UNIT = Path(__file__).parents[2] / "deploy/node/run-rankscope.mount"
WITHIN = """
set -e
mount -t tmpfs -o "$1" tmpfs "$2"
cd "$2"
stat -c %a .
stat -f -c '%b %S %c' .
head -c 1G /dev/zero > large 2> /dev/null || echo full
rm large
touch $(seq 5000) 2> /dev/null || echo no inode left
"""


def mount_section() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(UNIT.read_text())
    return unit["Mount"]


def test_the_unit_is_named_after_the_directory_that_the_hook_and_the_exporter_use() -> None:
    assert mount_section()["Where"] == str(SYSTEM_RUN_DIR)
    assert str(SYSTEM_RUN_DIR)[1:].replace("/", "-") == UNIT.stem


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_the_directory_is_writable_for_all_up_to_its_limits(tmp_path: Path) -> None:
    command = ["unshare", "--mount", "sh", "-c", WITHIN, "sh", mount_section()["Options"], str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    mode, sizes, *limits = done.stdout.splitlines()
    blocks, block_size, inodes = map(int, sizes.split())
    assert (mode, limits) == ("1777", ["full", "no inode left"])
    assert blocks * block_size >= FILES_LIMIT * SIZE
    assert FILES_LIMIT <= inodes < 10_000
