"""A package's life cycle in a booted Debian 12: install, serve, train, upgrade, remove while a job trains, purge."""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from testing.report import ROOT, Check
from testing.waiting import eventually
from validation.packages.systems import DEBIAN_12, BootedSystem, bootstrap

OPTIONS = "OPTIONS=--simulate=2"
TRAIN = f"""
cd; export PATH={sys.prefix}/bin:$PATH
exec rankscope run --run mine -- torchrun --standalone --nproc-per-node 2 {ROOT}/examples/digits_ddp.py --epochs 10000
"""
LIST = "find / -xdev -path /home -prune -o -print; find /run/rankscope /dev/shm -xdev 2> /dev/null || true"
SYSTEM_FILES = re.compile(
    r"/(var/(log|cache|lib/(apt|dpkg|private|systemd/random-seed))|tmp|var/tmp|run/(systemd|log))(/|$)"
)
"""Files that a system writes by itself, or keeps for each package that was ever installed."""
WANTED = {"CapEff": "0000000000000000", "CapBnd": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"}
EXPOSURE = 2.0
IDENTITY = "stat --format=%d /run/rankscope; ls /run/rankscope /var/lib/rankscope"


def check(old: Path, new: Path, scratch: Path) -> list[Check]:
    """Return the checks, step by step."""
    bootstrap(DEBIAN_12)
    interpreter = [] if sys.base_prefix == "/usr" else [Path(sys.base_prefix)]
    with BootedSystem(DEBIAN_12, [ROOT, old.parent, new.parent, *interpreter], scratch / "boot.log") as node:
        # The job's environment may be below /root, which other users cannot enter.
        entered = {str(directory) for path in (ROOT, *interpreter) for directory in path.parents}
        node.do(f"useradd --create-home alice; chmod a+x {' '.join(entered)}")
        before = set(node.do(LIST).splitlines())
        return [*_install(node, old), *_analyze(node), *_train(node, new), *_purge(node, before)]


def scrape(node: BootedSystem) -> Mapping[str, list[tuple[Mapping[str, str], float]]]:
    """Return the samples of a scrape from this machine, by name."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    with urllib.request.urlopen(f"http://{node.ADDRESS}:10417/metrics", timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def serves(node: BootedSystem) -> bool:
    try:
        return bool(scrape(node))
    except OSError:
        return False


def steps(node: BootedSystem) -> list[int]:
    """Return the number of steps of each rank of alice's job."""
    owner = node.do("id --user alice").strip()
    samples = scrape(node).get("rankscope_rank_steps_total", [])
    return [int(value) for labels, value in samples if labels["owner"] == owner and labels["run"] == "mine"]


def install(node: BootedSystem, package: Path) -> None:
    """Install or upgrade the package, as a user does."""
    node.do(f"apt-get install --quiet --yes --no-install-recommends {package}")


def output_line(node: BootedSystem, script: str) -> str:
    """Return a script's output in one line."""
    return " ".join(node.do(script).split())


def _install(node: BootedSystem, package: Path) -> Iterator[Check]:
    install(node, package)
    eventually(lambda: serves(node), pause=0.5)
    states = output_line(
        node, "for what in enabled active; do systemctl is-$what rankscope-exporter run-rankscope.mount; done"
    )
    yield Check("the service and the mount are enabled and active", states == "enabled enabled active active", states)
    node.do(f"echo '{OPTIONS}' > /etc/default/rankscope-exporter; systemctl restart rankscope-exporter")
    eventually(lambda: serves(node) and len(scrape(node)["rankscope_gpu_up"]) == 2, pause=0.5)
    yield Check("a scrape from another machine shows the GPUs", True, "2 simulated GPUs")
    pid = output_line(node, "systemctl show --property=MainPID --value rankscope-exporter")
    status = dict(re.findall(r"^(\w+):\t(\S+)", node.do(f"cat /proc/{pid}/status"), re.M))
    found = {name: status[name] for name in ("Uid", *WANTED)}
    holds = found["Uid"] != "0" and WANTED.items() <= found.items()
    yield Check(
        "it runs without root and capabilities", holds, " ".join(f"{name} {value}" for name, value in found.items())
    )
    exposure = output_line(node, "systemd-analyze security --no-pager rankscope-exporter | tail -n 1")
    score = float(re.findall(r": ([\d.]+) ", exposure)[0])
    yield Check(f"systemd-analyze security finds an exposure of at most {EXPOSURE}", score <= EXPOSURE, f"{score}")
    manuals = output_line(node, "man --where rankscope rankscope-exporter")
    yield Check("man has both pages", len(manuals.split()) == 2, manuals)


def _analyze(node: BootedSystem) -> Iterator[Check]:
    states = output_line(node, "for what in enabled active; do systemctl is-$what rankscope-analyzer || true; done")
    yield Check("the analyzer does not start by itself", states == "disabled inactive", states)
    node.do("echo TARGETS=127.0.0.1 > /etc/default/rankscope-analyzer; systemctl enable --now rankscope-analyzer")
    eventually(lambda: _targets(node).endswith(" 1.0"), pause=0.5)
    yield Check("started, it asks the exporter", True, _targets(node))


def _targets(node: BootedSystem) -> str:
    """Return the analyzer's metric of the targets that answer; empty if there is none."""
    shown = "curl --silent http://localhost:10418/metrics | grep 'analyzer_targets{state=\"up\"}' || true"
    return output_line(node, shown)


def _train(node: BootedSystem, new: Path) -> Iterator[Check]:
    job = node.start(TRAIN, "alice")
    eventually(lambda: len(steps(node)) == 2 and min(steps(node)) > 20, 120, pause=0.5)
    seen, memory = steps(node), scrape(node)["rankscope_rank_resident_memory_bytes"]
    yield Check(
        "ranks of another user are seen, and their processes",
        len(memory) == 2,
        f"steps {seen}, with memory and CPU time",
    )
    for command, text in (("top --once", "mine, user"), ("hang --run mine", "2 ranks"), ("explain", "mine, user")):
        done = node.run(f"rankscope {command}")
        lines = [line for line in done.stdout.splitlines() if text in line]
        yield Check(f"rankscope {command} shows the run", bool(lines), " ".join(lines) or done.stdout + done.stderr)
    eventually(lambda: node.do("ls /var/lib/rankscope"), 120, pause=0.5)
    before = output_line(node, IDENTITY)
    install(node, new)
    eventually(lambda: serves(node) and len(steps(node)) == 2, pause=0.5)
    kept = output_line(node, IDENTITY) == before and OPTIONS in node.do("cat /etc/default/rankscope-exporter")
    yield Check("an upgrade keeps the mount, the records, the state and the flags", kept, before)
    eventually(lambda: _targets(node).endswith(" 1.0"), pause=0.5)
    after = steps(node)
    version = output_line(node, "dpkg-query --show rankscope")
    yield Check("the new version shows the running job", min(after) > max(seen), f"{version}, steps {after}")
    node.do("apt-get remove --quiet --yes rankscope")
    done = node.run(f"{sys.prefix}/bin/rankscope top --once", "alice")
    lines = [line for line in done.stdout.splitlines() if "mine, user alice: 2 of 2 ranks" in line]
    goes_on = job.poll() is None and bool(lines)
    yield Check("a job goes on when the package is removed", goes_on, " ".join(lines) or done.stdout + done.stderr)
    node.do("pkill --uid alice")
    job.wait(60)


def _purge(node: BootedSystem, before: set[str]) -> Iterator[Check]:
    node.do("apt-get purge --quiet --yes rankscope; umount /run/rankscope; rmdir /run/rankscope")
    left = {path for path in set(node.do(LIST).splitlines()) - before if not SYSTEM_FILES.match(path)}
    named = node.do("find / -xdev -path /home -prune -o -name '*rankscope*' -print").splitlines()
    units = node.do(
        "systemctl list-units --all --no-legend 'rankscope*' 'run-rankscope*'; getent passwd rankscope || true"
    ).splitlines()
    everything = sorted({*left, *units, *(name for name in named if name not in before)})
    yield Check("a purge leaves nothing", not everything, ", ".join(everything) or "no file, unit or user")
