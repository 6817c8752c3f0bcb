"""The exporter runs on the C library as it does on NVIDIA's: found by the loader, called from several threads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from nvml_simulator import environment, install

from rankscope_exporter.simulation.scenario import parse_scenario

SCENARIO = """
gpus: 4
timeline:
  0: [{at: 0, busy: 0.5}]
  1: [{at: 0, lost: true}]
  2: [{at: 0, busy: 1, blocks: {nvmlDeviceGetPowerUsage: 600}}]
"""


@pytest.fixture
def exporter(tmp_path: Path, run_dir: Path, free_port: int) -> Iterator[str]:
    """The address of an exporter on the scenario's GPUs."""
    install(tmp_path, parse_scenario(yaml.safe_load(SCENARIO)), time.time() - 60)
    command = [sys.executable, "-m", "rankscope_exporter", f"--web.listen-address=127.0.0.1:{free_port}"]
    with subprocess.Popen(command, env={**os.environ, **environment(tmp_path)}) as process:
        yield f"http://127.0.0.1:{free_port}/metrics"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)


def scrape(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def values(body: str, metric: str) -> dict[str, float]:
    """A metric's values by GPU."""
    return {gpu: float(value) for gpu, value in re.findall(rf'^{metric}{{gpu="(\d+)",[^}}]*}} (\S+)$', body, re.M)}


def test_gpus_that_work_are_measured_while_one_is_lost_and_one_blocks(exporter: str) -> None:
    deadline = time.monotonic() + 60
    while values(body := scrape(exporter), "rankscope_gpu_busy_seconds_total").get("0", 0) < 1:
        assert time.monotonic() < deadline, body
        time.sleep(0.2)
    assert values(body, "rankscope_gpu_up") == {"0": 1, "2": 0, "3": 1}  # GPU 1 has never said its UUID
    assert values(body, "rankscope_gpu_temperature_celsius").keys() == {"0", "3"}
    assert values(body, "rankscope_gpu_busy_seconds_total")["3"] == 0
    assert "rankscope_exporter_gpus_expected 4.0" in body
    assert "rankscope_exporter_gpus_seen 2.0" in body
    assert "nan" not in body.lower()
