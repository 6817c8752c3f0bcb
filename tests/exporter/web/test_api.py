"""The runs and GPUs of the node as JSON, at /api/v1/runs and /api/v1/gpus."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi.testclient import TestClient
from testing.families import family
from testing.judged_job import JudgedJob

from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.web.app import create_app

READY: Any = SimpleNamespace(is_ready=True)  # the part of the sampler that the pages use


def test_the_runs_are_served_as_json(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(2)
    client = TestClient(create_app(Scrape([]), READY, job.reporter()))
    answer = client.get("/api/v1/runs")
    assert answer.headers["content-type"] == "application/json"
    assert [run["run"] for run in answer.json()["runs"]] == ["r"]
    assert client.head("/api/v1/runs").status_code == 200
    assert client.post("/api/v1/runs").status_code == 405


def test_the_gpus_are_served_as_json(run_dir: Path) -> None:
    gpu = {"gpu": "3", "uuid": "GPU-a"}
    families = [family("gpu_up", (gpu, 1)), family("gpu_temperature_celsius", (gpu, 91))]
    collector: Any = SimpleNamespace(name="gpu", collect=lambda: families)
    job = JudgedJob(run_dir).trained(2)
    answer = TestClient(create_app(Scrape([collector]), READY, job.reporter())).get("/api/v1/gpus")
    assert answer.headers["content-type"] == "application/json"
    (found,) = answer.json()["gpus"]
    assert (found["index"], found["is_up"], found["temperature"], found["power"]) == ("3", True, 91.0, None)


def test_outdated_runs_are_an_error() -> None:
    client = TestClient(create_app(Scrape([]), READY, Reporter(lambda: None, lambda: None)))
    answer = client.get("/api/v1/runs")
    assert answer.status_code == 503
    assert "error" in answer.json()
