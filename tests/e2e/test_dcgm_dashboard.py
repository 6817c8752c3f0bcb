"""NVIDIA's own dashboard works with our exporter: a real Prometheus has data for each of its expressions."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from testing import servers
from testing.stack import wait_for

DASHBOARD: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("dcgm_dashboard.yml").read_text(encoding="utf-8"))
WHOLE = "{gpus: 2, timeline: {0: [{at: 0, busy: 0.5, memory_used: 10 GiB}, {at: 1, xid: 31}]}}"
SPLIT = '{gpus: 1, model: {like: H100, mig: ["3g.40gb", "1g.10gb"]}, timeline: {0: [{at: 0, busy: 0.5}]}}'


@dataclass
class Monitored:
    """A Prometheus and the exporters that it scrapes."""

    prometheus: servers.Prometheus
    whole: servers.Server
    split: servers.Server
    plain: servers.Server
    """An exporter without the flag --metrics.dcgm."""


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    directory = tmp_path_factory.mktemp("dcgm")
    with ExitStack() as started:

        def exporter(name: str, scenario: str, *flags: str) -> servers.Server:
            return started.enter_context(servers.exporter(directory, yaml.safe_load(scenario), directory, name, flags))

        exporters = [
            exporter("whole", WHOLE, "--metrics.dcgm"),
            exporter("split", SPLIT, "--metrics.dcgm"),
            exporter("plain", WHOLE),
        ]
        jobs = [{"job_name": e.name, "static_configs": [{"targets": [e.address]}]} for e in exporters]
        configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
        prometheus = started.enter_context(servers.prometheus(directory, yaml.safe_dump(configuration)))
        # Averages need two readings, rates two scrapes.
        assert wait_for(lambda: len(prometheus.query("rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[30s]) > 0")) == 3, 60)
        assert wait_for(lambda: prometheus.query('{__name__=~"rankscope_gpu_.*", job="plain"}'), 60)
        assert wait_for(lambda: prometheus.query("DCGM_FI_DEV_XID_ERRORS > 0"), 60)
        yield Monitored(prometheus, *exporters)


def select_all(expression: str) -> str:
    """Return the expression with Grafana's variables set to all values."""
    return re.sub(r"\$\w+", ".+", expression)


@pytest.mark.parametrize("panel", DASHBOARD["panels"])
def test_a_panel_has_data(monitored: Monitored, panel: str) -> None:
    result = monitored.prometheus.query(select_all(DASHBOARD["panels"][panel]))
    assert result
    assert all(math.isfinite(float(series["value"][1])) for series in result)


@pytest.mark.parametrize("variable", DASHBOARD["variables"])
def test_a_variable_has_values(monitored: Monitored, variable: str) -> None:
    arguments = DASHBOARD["variables"][variable]
    matching = urllib.parse.urlencode({"match[]": select_all(arguments["series"])})
    url = f"{monitored.prometheus.url}/api/v1/label/{arguments['label']}/values?{matching}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert all(json.load(answer)["data"])


def test_the_panels_have_the_simulated_values(monitored: Monitored) -> None:
    """Check two whole GPUs, of which one is half busy, and one that is split into two instances."""

    def panel(name: str, job: str) -> dict[str, float]:
        expression = select_all(DASHBOARD["panels"][name]).replace('gpu=~".+"', f'gpu=~".+", job="{job}"')
        found = monitored.prometheus.query(expression)
        keys = (series["metric"].get("GPU_I_PROFILE", series["metric"].get("gpu", "")) for series in found)
        return dict(zip(keys, (float(series["value"][1]) for series in found), strict=True))

    assert panel("GPU Framebuffer Mem Used", "whole") == {"0": 10 * 1024, "1": 0}
    assert panel("GPU Utilization", "whole") == pytest.approx({"0": 0.5, "1": 0})
    assert set(panel("GPU Utilization", "split")) == {"3g.40gb", "1g.10gb"}
    assert panel("GPU SM Clocks", "whole")["0"] == pytest.approx(1.98e9)


def test_an_xid_error_is_found_by_its_code(monitored: Monitored) -> None:
    (series,) = monitored.prometheus.query('DCGM_FI_DEV_XID_ERRORS{err_code=~"31|79"}')
    assert (series["metric"]["gpu"], series["metric"]["err_msg"]) == ("0", "GPU memory page fault")
    assert "pod" not in series["metric"], "it is not allocated"


def test_without_the_flag_no_dcgm_metric_is_exported(monitored: Monitored) -> None:
    found = monitored.prometheus.query('count by (job) ({__name__=~"DCGM_.*"})')
    assert {series["metric"]["job"] for series in found} == {"whole", "split"}
    with urllib.request.urlopen(f"{monitored.plain.url}/metrics", timeout=10) as answer:
        assert b"DCGM" not in answer.read()


def test_the_metric_types_are_those_of_dcgm_exporter(monitored: Monitored) -> None:
    with urllib.request.urlopen(f"{monitored.whole.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter" in lines
    assert "# TYPE DCGM_FI_DEV_GPU_UTIL gauge" in lines
    assert any(line.startswith("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{") for line in lines)
