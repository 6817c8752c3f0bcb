"""The content of the packages: the service's restrictions, manual pages, completion, versions, and merged wheels."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import shtab
import yaml
from deploy.packages import build

from rankscope_exporter.analyzer.targets import SUFFIXES, parse_source

EXPORTER, ANALYZER = (build.NODE / f"rankscope-{name}.service" for name in ("exporter", "analyzer"))
FIRST_FLAGS = {"rankscope": "--version", "rankscope-exporter": "--web.listen-address"}
COMPLETE = """
source "$1"
COMP_WORDS=("$2" "$3") COMP_CWORD=1
function=$(complete -p "$2" | grep -o -- '-F [^ ]*')
${function#-F } "$2" "$3" "$2"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def service(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(unit.read_text())
    return parser["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(("unit", "threshold"), [(EXPORTER, 20), (ANALYZER, 12)], ids=["exporter", "analyzer"])
def test_a_service_has_a_low_exposure(unit: Path, threshold: int, tmp_path: Path) -> None:
    copied = shutil.copy(unit, tmp_path)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={threshold}", str(copied)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_service_sets_no_restriction_that_breaks_the_exporter() -> None:
    hides_devices = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"}
    hides_processes_and_users = {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivateNetwork"}
    assert not (hides_devices | hides_processes_and_users) & set(service(EXPORTER))


def test_the_analyzer_has_every_restriction_of_the_exporter_and_its_own_state() -> None:
    exporter, analyzer = service(EXPORTER), service(ANALYZER)
    differing = {"EnvironmentFile", "ExecStart", "StateDirectory", "MemoryMax", "User"}
    assert {name: analyzer.get(name) for name in exporter.keys() - differing} == {
        name: exporter[name] for name in exporter.keys() - differing
    }
    assert f"--state-dir=%S/{analyzer['StateDirectory']} " in analyzer["ExecStart"]
    assert analyzer["StateDirectory"] != exporter["StateDirectory"]


def test_a_unit_reads_the_flags_that_the_packages_install() -> None:
    contents = yaml.safe_load((build.HERE / "nfpm.yaml").read_text())["contents"]
    installed = {one["src"]: one["dst"] for one in contents}
    for unit in (EXPORTER, ANALYZER):
        flags = unit.with_suffix(".default")
        assert flags.exists()
        assert service(unit)["EnvironmentFile"] == f"-{installed[flags.name]}"


def test_only_the_exporter_starts_by_itself() -> None:
    scripts = {path.name: path.read_text() for kind in ("deb", "rpm") for path in (build.HERE / kind).iterdir()}
    starting = re.compile(r"preset|\benable\b|\bstart\b|invoke restart|for unit in")
    for name, script in scripts.items():
        assert not [line for line in script.splitlines() if starting.search(line) and ANALYZER.name in line], name
    for name in ("postrm", "prerm", "postun", "preun"):
        assert ANALYZER.name in scripts[name]


@pytest.mark.parametrize("unit", [EXPORTER, ANALYZER], ids=["exporter", "analyzer"])
def test_every_flag_of_a_service_and_its_example_exists(unit: Path) -> None:
    (parser, _) = build.PARSERS["rankscope-exporter"]
    known = {flag for action in parser._actions for flag in action.option_strings}
    flags = re.findall(r"(--[\w.-]+)=", unit.read_text() + unit.with_suffix(".default").read_text())
    assert flags
    assert set(flags) <= known


def test_every_example_of_targets_is_one() -> None:
    examples = re.findall("^#TARGETS=(.+)", ANALYZER.with_suffix(".default").read_text(), re.M)
    assert len(examples) == 4
    names = [name for text in examples for name in text.split(",") if not name.endswith(SUFFIXES)]  # files are read
    assert [parse_source(name).text for name in names] == names
    assert len(names) == 5


@pytest.mark.parametrize("command", build.PARSERS)
def test_the_manual_page_has_every_flag(command: str) -> None:
    page = build.manual(command, "1.2.3").replace(r"\-", "-")
    (parser, _) = build.PARSERS[command]
    flags = [flag for action in parser._actions for flag in action.option_strings if flag not in ("-h", "--help")]
    assert FIRST_FLAGS[command] in flags
    assert [flag for flag in flags if flag not in page] == []


@pytest.mark.parametrize("command", build.PARSERS)
def test_bash_completes_flags(command: str, tmp_path: Path) -> None:
    completion = tmp_path / command
    completion.write_text(shtab.complete(build.PARSERS[command][0], "bash"))
    begun = FIRST_FLAGS[command][:6]
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(completion), command, begun], capture_output=True, text=True, check=True
    )
    assert FIRST_FLAGS[command] in done.stdout.split()


@pytest.mark.parametrize(
    ("version", "packaged"), [("0.1.0", "0.1.0"), ("0.2.0rc1", "0.2.0~rc1"), ("0.2.0.dev3", "0.2.0~dev3")]
)
def test_a_pre_release_comes_before_its_release(version: str, packaged: str) -> None:
    assert build.package_version(version) == packaged


def test_files_that_differ_between_wheels_of_two_pythons_are_refused(tmp_path: Path) -> None:
    for python, text in (("3.11", "a"), ("3.12", "b")):
        for name in ("package/module.py", f"package/compiled.cpython-{python}.so", "package-1.dist-info/WHEEL"):
            file = tmp_path / python / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    library = tmp_path / "library"
    build.merge(tmp_path / "3.11", library)
    with pytest.raises(ValueError, match=re.escape("package/module.py")):
        build.merge(tmp_path / "3.12", library)
    assert not (library / "package-1.dist-info/WHEEL").exists()


def test_the_compiled_modules_are_for_the_versions_that_the_commands_look_for() -> None:
    (found,) = re.findall(r"^VERSIONS = (\(.*\))", (build.HERE / "command").read_text(), re.M)
    assert re.findall(r"\((\d), (\d+)\)", found) == [tuple(python.split(".")) for python in build.PYTHONS]
    relations = yaml.safe_load((build.HERE / "nfpm.yaml").read_text())["overrides"]
    first, last = build.PYTHONS[0], int(build.PYTHONS[-1].partition(".")[2])
    assert f"python3 (>= {first})" in relations["deb"]["depends"][0]
    assert f"python3 (<< 3.{last + 1})" in relations["deb"]["depends"]
    assert relations["rpm"]["depends"][0] == f"(python(abi) >= {first} with python(abi) < 3.{last + 1})"


def test_the_locked_packages_are_those_of_the_image() -> None:
    def pins(path: Path) -> dict[str, str]:
        return dict(re.findall(r"^(\S+)==(\S+)", path.read_text(), re.M))

    image, packages = pins(build.ROOT / "exporter/requirements.txt"), pins(build.LOCK)
    assert {name: packages.get(name) for name in image} == {**image, "grpcio": None}
