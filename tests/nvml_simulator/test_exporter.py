"""The exporter runs on the C library as on NVIDIA's: the loader finds it, and several threads call it."""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from nvml_simulator import environment, install
from testing.exporter_process import exporter_process
from testing.waiting import eventually

from rankscope_exporter.simulation.scenario import parse_scenario

SCENARIO = """
gpus: 4
timeline:
  0: [{at: 0, busy: 0.5}]
  1: [{at: 0, lost: true}]
  2: [{at: 0, busy: 1, blocks: {nvmlDeviceGetPowerUsage: 600}}]
"""


@pytest.fixture
def exporter(request: pytest.FixtureRequest, tmp_path: Path, run_dir: Path, free_port: int) -> Iterator[str]:
    """Return the address of an exporter on the scenario's GPUs."""
    scenario = getattr(request, "param", SCENARIO)
    install(tmp_path, parse_scenario(yaml.safe_load(scenario)), time.time() - 60)
    variables = {**os.environ, **environment(tmp_path)}
    with exporter_process(free_port, "--web.enable-lifecycle", env=variables):
        yield f"http://127.0.0.1:{free_port}/metrics"


def scrape(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def values(body: str, metric: str) -> dict[str, float]:
    """Return a metric's values by GPU."""
    return {gpu: float(value) for gpu, value in re.findall(rf'^{metric}{{gpu="(\d+)",[^}}]*}} (\S+)$', body, re.M)}


def test_working_gpus_are_measured_while_one_is_lost_and_one_blocks(exporter: str) -> None:
    eventually(lambda: values(scrape(exporter), "rankscope_gpu_busy_seconds_total").get("0", 0) >= 1)
    body = scrape(exporter)
    assert values(body, "rankscope_gpu_up") == {"0": 1, "2": 0, "3": 1}  # the UUID of GPU 1 is unknown
    assert values(body, "rankscope_gpu_temperature_celsius").keys() == {"0", "3"}
    assert values(body, "rankscope_gpu_busy_seconds_total")["3"] == 0
    assert "rankscope_exporter_gpus_expected 4.0" in body
    assert "rankscope_exporter_gpus_seen 2.0" in body
    assert "nan" not in body.lower()


@pytest.mark.parametrize("exporter", ["{gpus: 2, timeline: {0: [{at: 0, busy: 0.5}]}}"], indirect=True)
def test_gpus_are_released_and_reacquired_over_http(exporter: str) -> None:
    await_values(exporter, "rankscope_gpu_busy_seconds_total", 2)
    await_values(exporter, "rankscope_gpu_xid_errors_total", 1)
    before = values(scrape(exporter), "rankscope_gpu_busy_seconds_total")
    assert post(exporter, "release") == (200, "released for 900 s, or until POST /-/resume\n")
    body = scrape(exporter)
    assert set(re.findall(r"^rankscope_gpu_(\w+){", body, re.M)) == {"xid_errors_total"}
    assert "rankscope_exporter_gpus_released 1.0" in body
    assert "rankscope_exporter_nvml_up 0.0" in body
    assert post(exporter, "resume") == (200, "resumed\n")
    await_values(exporter, "rankscope_gpu_up", 2)
    body = scrape(exporter)
    assert "rankscope_exporter_gpus_released 0.0" in body
    assert values(body, "rankscope_gpu_up") == {"0": 1, "1": 1}
    assert values(body, "rankscope_gpu_busy_seconds_total")["0"] >= before["0"]


def test_a_stuck_gpu_prevents_a_release_and_is_named(exporter: str) -> None:
    await_values(exporter, "rankscope_gpu_busy_seconds_total", 2)
    assert post(exporter, "release") == (503, "not released: gpu-2: a driver call does not return\n")
    await_values(exporter, "rankscope_gpu_temperature_celsius", 2)
    assert "rankscope_exporter_gpus_released 0.0" in scrape(exporter)


def await_values(url: str, metric: str, count: int) -> None:
    eventually(lambda: len(values(scrape(url), metric)) >= count, pause=0.2)


def post(url: str, page: str) -> tuple[int, str]:
    """Return status and text of the response."""
    request = urllib.request.Request(url.replace("metrics", f"-/{page}"), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
