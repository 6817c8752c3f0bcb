"""The compose file, rendered by Compose for each profile, and the Dockerfile of its image."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from rankscope.record.writer import SYSTEM_RUN_DIR
from rankscope_exporter.analyzer.targets import parse_source
from rankscope_exporter.config import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "exporter/Dockerfile").read_text(encoding="utf-8")
EXPORTERS = {"gpu": "exporter-gpu", "demo": "exporter-demo"}
STACK = {"prometheus", "alertmanager", "grafana"}
ANALYZER = "analyzer"


def compose(*arguments: str, **environment: str) -> str:
    """Return the output of Compose for our file, in an environment with only the given variables."""
    program = Path(sys.executable).with_name("docker-compose")
    command = [str(program), "--file", str(ROOT / "deploy/docker-compose.yml"), *arguments]
    given = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, env=given, check=True, stdout=subprocess.PIPE, text=True).stdout


def rendered(profile: str, **environment: str) -> dict[str, Any]:
    services = json.loads(compose("--profile", profile, "config", "--format", "json", **environment))["services"]
    assert isinstance(services, dict)
    return services


def mounts(service: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {mount["target"]: mount for mount in service.get("volumes", []) if mount["type"] == kind}


@pytest.fixture(scope="module", params=EXPORTERS)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def services(profile: str) -> dict[str, Any]:
    return rendered(profile)


def test_compose_accepts_the_file_without_a_warning(profile: str) -> None:
    assert compose("--profile", profile, "config", "--quiet") == ""


def test_a_profile_has_the_stack_an_analyzer_and_one_exporter(services: dict[str, Any], profile: str) -> None:
    assert services.keys() == STACK | {ANALYZER, EXPORTERS[profile]}


def test_every_image_is_pinned(services: dict[str, Any]) -> None:
    for name in STACK:
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", services[name]["image"]), name


def test_every_container_is_locked_down(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged"), name


def test_every_container_has_a_health_check_of_its_own_port(services: dict[str, Any], profile: str) -> None:
    for name in STACK:
        port = services[name]["ports"][0]["target"]
        assert f"http://127.0.0.1:{port}/" in services[name]["healthcheck"]["test"][-1], name
    assert services[EXPORTERS[profile]]["build"]["dockerfile"] == "exporter/Dockerfile"
    assert f"http://127.0.0.1:{DEFAULT_PORT}/-/healthy" in instruction("HEALTHCHECK")


def test_only_the_exporter_is_reachable_from_elsewhere(services: dict[str, Any], profile: str) -> None:
    for name in (*STACK, ANALYZER):
        assert {port["host_ip"] for port in services[name]["ports"]} == {"127.0.0.1"}, name
    published = services[EXPORTERS[profile]]["ports"]
    assert [(port["target"], port["published"], "host_ip" in port) for port in published] == [
        (DEFAULT_PORT, str(DEFAULT_PORT), False)
    ]


def test_every_mounted_file_exists_and_is_read_only(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for target, mount in mounts(service, "bind").items():
            assert mount["read_only"], f"{name}: {target}"
            assert target == str(SYSTEM_RUN_DIR) or Path(mount["source"]).is_dir(), f"{name}: {mount['source']}"


def test_every_configuration_file_is_below_a_mount(services: dict[str, Any]) -> None:
    for name in ("prometheus", "alertmanager"):
        inside = next(flag.partition("=")[2] for flag in services[name]["command"] if "--config.file" in flag)
        mount = mounts(services[name], "bind")[str(Path(inside).parent)]
        assert (Path(mount["source"]) / Path(inside).name).is_file()


def test_links_in_notifications_open_the_published_ports(services: dict[str, Any]) -> None:
    for name in ("prometheus", "alertmanager"):
        (url,) = (flag.partition("=")[2] for flag in services[name]["command"] if "--web.external-url=" in flag)
        assert url == f"http://localhost:{services[name]['ports'][0]['published']}"


def test_every_data_directory_has_a_volume(services: dict[str, Any]) -> None:
    for name, flag in (("prometheus", "--storage.tsdb.path="), ("alertmanager", "--storage.path=")):
        path = next(given.removeprefix(flag) for given in services[name]["command"] if given.startswith(flag))
        assert path in mounts(services[name], "volume")
    [state] = [flag for flag in json.loads(instruction("ENTRYPOINT")) if flag.startswith("--state-dir=")]
    exporter = next(service for name, service in services.items() if name.startswith("exporter"))
    sources = {mounts(one, "volume")[state.partition("=")[2]]["source"] for one in (exporter, services[ANALYZER])}
    assert len(sources) == 2
    assert "/var/lib/grafana" in mounts(services["grafana"], "volume")
    assert "/tmp" in services["grafana"]["tmpfs"]


def test_prometheus_finds_the_exporter_of_each_profile_under_one_name(services: dict[str, Any], profile: str) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    targets = [target for group in jobs["rankscope"]["static_configs"] for target in group["targets"]]
    aliases = services[EXPORTERS[profile]]["networks"]["default"]["aliases"]
    assert targets == [f"{aliases[0]}:{DEFAULT_PORT}"]


def test_the_analyzer_asks_the_exporters_that_prometheus_scrapes_and_is_scraped(
    services: dict[str, Any], profile: str
) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["rankscope-analyzer"]["static_configs"] == [{"targets": [f"{ANALYZER}:{DEFAULT_PORT}"]}]
    (source,) = (flag.removeprefix("--analyze=") for flag in services[ANALYZER]["command"])
    assert parse_source(source)
    assert source == f"prometheus+http://prometheus:{services['prometheus']['ports'][0]['target']}"
    assert services[EXPORTERS[profile]]["command"][-1] == f"--analyzer.url=http://{ANALYZER}:{DEFAULT_PORT}"
    assert services[ANALYZER]["hostname"] == ANALYZER, "the pages of the nodes name it"


def test_grafana_reaches_prometheus_and_loads_the_committed_dashboards(services: dict[str, Any]) -> None:
    provisioning = mounts(services["grafana"], "bind")["/etc/grafana/provisioning"]["source"]
    source = yaml.safe_load((Path(provisioning) / "datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0]['target']}"
    provider = yaml.safe_load((Path(provisioning) / "dashboards/rankscope.yml").read_text())["providers"][0]
    folder = mounts(services["grafana"], "bind")[provider["options"]["path"]]["source"]
    assert Path(folder) == ROOT / "grafana/dashboards"
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert json.loads((Path(folder) / home.name).read_text())["uid"] == "rankscope-fleet"


def test_grafanas_rate_interval_is_the_scrape_interval() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    sources = yaml.safe_load((ROOT / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    assert sources["datasources"][0]["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_the_exporter_sees_the_hosts_processes_name_and_records(services: dict[str, Any], profile: str) -> None:
    exporter = services[EXPORTERS[profile]]
    assert (exporter["pid"], exporter["uts"]) == ("host", "host")
    records = mounts(exporter, "bind")[str(SYSTEM_RUN_DIR)]
    assert records["source"] == str(SYSTEM_RUN_DIR)
    assert records["bind"]["create_host_path"] is False


def test_the_run_directory_can_be_changed() -> None:
    exporter = rendered("demo", RANKSCOPE_RUN_DIR="/mnt/run")["exporter-demo"]
    assert mounts(exporter, "bind")[str(SYSTEM_RUN_DIR)]["source"] == "/mnt/run"


def test_the_gpu_profile_reserves_the_gpus_and_the_demo_simulates_them() -> None:
    gpu, demo = rendered("gpu")["exporter-gpu"], rendered("demo")["exporter-demo"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", -1)  # -1 means all
    assert set(device["capabilities"]) == {"gpu", "utility"}
    assert demo["command"][0] == "--simulate=4"
    assert "deploy" not in demo


def instruction(name: str) -> str:
    """Return the last instruction with this name, including continuation lines."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.partition(" ")[2] for line in joined.splitlines() if line.startswith(f"{name} ")][-1]


def copied_into_the_build() -> list[str]:
    lines = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    return [source.rstrip("/") for sources in lines for source in sources]


def test_the_files_that_the_image_copies_exist_and_are_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    assert set(copied_into_the_build()) == allowed
    assert all((ROOT / source).exists() for source in allowed)


def test_the_sources_of_the_wheel_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [
        project["project"]["readme"],
        *project["project"]["license-files"],
        project["tool"]["hatch"]["version"]["path"],
    ]
    for part in [*parts, *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]:
        assert Path(part).parts[0] in copied_into_the_build(), part


def test_the_image_starts_a_command_of_the_project_on_its_port_as_an_unprivileged_user() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert json.loads(instruction("ENTRYPOINT"))[0] in project["scripts"]
    assert instruction("EXPOSE") == str(DEFAULT_PORT)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instruction("USER"))


def test_both_stages_use_one_pinned_python_that_the_project_supports() -> None:
    [base] = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    major, minor = map(int, re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-\w+", base).groups())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (major, minor) >= tuple(map(int, re.findall(r"\d+", project["requires-python"])))
