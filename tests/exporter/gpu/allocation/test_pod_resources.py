"""Pods and their GPUs, from a real gRPC server on a Unix socket."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.exporter.gpu.allocation.kubelet import Kubelet

from rankscope_exporter.gpu.allocation.claims import ClaimsWatcher
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.pod_resources import KubeletError, PodResources, gpu_of_device, parse_pods
from rankscope_exporter.ranks.rank import Scan

UUID = "GPU-51300000-0000-4000-8000-00000000000"
INSTANCE = "MIG-51300000-0000-4000-8000-000000000000"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path)
    server.start()
    yield server
    server.stop()


def pod(namespace: str, name: str, container: str) -> Holder:
    return Holder("kubernetes", k8s_namespace=namespace, k8s_pod=name, k8s_container=container)


def test_each_gpu_has_its_pod_and_container_as_holder(kubelet: Kubelet) -> None:
    kubelet.add("ml", "train-0", worker=[f"{UUID}0", f"{UUID}1"], sidecar=[])
    kubelet.add("web", "page", server=[])
    kubelet.add("ml", "notebook", jupyter=["nvidia3"])
    assert PodResources(kubelet.socket).holders() == {
        f"{UUID}0": [pod("ml", "train-0", "worker")],
        f"{UUID}1": [pod("ml", "train-0", "worker")],
        "nvidia3": [pod("ml", "notebook", "jupyter")],
    }


def test_pods_that_share_a_gpu_are_all_holders(kubelet: Kubelet) -> None:
    kubelet.add("ml", "a", main=[f"{UUID}0::0"])
    kubelet.add("ml", "b", main=[f"{UUID}0::7"])
    assert PodResources(kubelet.socket).holders() == {f"{UUID}0": [pod("ml", "a", "main"), pod("ml", "b", "main")]}


def test_a_node_without_pods_has_no_holders(kubelet: Kubelet) -> None:
    assert PodResources(kubelet.socket).holders() == {}


def test_a_response_larger_than_grpcs_default_limit_is_read(kubelet: Kubelet) -> None:
    for number in range(200):
        kubelet.add("ml", f"pod-{number}" + "x" * 25_000, main=[f"{UUID}0"])
    assert kubelet.answer.ByteSize() > 4 * 2**20
    assert len(PodResources(kubelet.socket).holders()[f"{UUID}0"]) == 200


def test_a_restarted_kubelet_is_queried_again(kubelet: Kubelet) -> None:
    resources = PodResources(kubelet.socket)
    kubelet.stop()
    with pytest.raises(KubeletError, match=r"kubelet\.sock: UNAVAILABLE"):
        resources.holders()
    kubelet.add("ml", "a", main=[f"{UUID}0"])
    kubelet.start()
    assert list(resources.holders()) == [f"{UUID}0"]


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        (f"{UUID}0", f"{UUID}0"),
        (f"{UUID}0::12", f"{UUID}0"),
        (f"MIG-{UUID}0/7/0", f"{UUID}0"),
        (f"MIG-{UUID}0/7/0::3", f"{UUID}0"),
        (INSTANCE, INSTANCE),
        (f"{INSTANCE}::3", INSTANCE),
        (f"{UUID}0-7", f"{UUID}0"),  # HAMi, Volcano
        ("nvidia2", "nvidia2"),
        ("nvidia2/gi1", "nvidia2"),
        ("nvidia2/vgpu3", "nvidia2"),
        ("nvidia12/gi1/vgpu0", "nvidia12"),
        ("nvidia2::1", "nvidia2"),
        (f"{UUID}0::", None),
        (f"{UUID}0:1", None),
        (f"{UUID}", None),
        (f"{INSTANCE}/1/0", None),
        ("MIG-1g.5gb", None),
        ("nvidia", None),
        ("nvidiactl", None),
        ("0000:3b:00.0", None),
        ("", None),
    ],
)
def test_a_device_id_names_its_gpu(device: str, gpu: str | None) -> None:
    assert gpu_of_device(device.encode(), "nvidia.com/gpu") == gpu


@pytest.mark.parametrize(
    ("device", "resource", "gpu"),
    [
        ("2", "nvidia.com/gpu", "2"),
        ("2::1", "nvidia.com/gpu.shared", "2"),
        ("2:0", "nvidia.com/mig-1g.5gb", "2"),
        ("2", "nvidia.com/gpu-a100", "2"),
        ("2", "nvidia.com/hostdev", None),
        ("2", "example.com/fpga", None),
        ("2", "", None),
    ],
)
def test_a_number_names_a_gpu_only_for_gpu_resources(device: str, resource: str, gpu: str | None) -> None:
    assert gpu_of_device(device.encode(), resource) == gpu


CLAIM = "5c9f3b1a-0d2e-4f6a-8b7c-112233445566"
BY_NVIDIA = {"driver_name": "gpu.nvidia.com", "pool_name": "gpu-node-1"}
CDI = "k8s.gpu.nvidia.com"


@pytest.mark.parametrize(
    ("resource", "gpus"),
    [
        ({**BY_NVIDIA, "device_name": "gpu-3"}, ["nvidia3"]),
        (
            {**BY_NVIDIA, "device_name": "gpu-3", "cdi": [f"{CDI}/device=gpu-3", f"{CDI}/claim={CLAIM}-gpu-3"]},
            ["nvidia3"],
        ),
        ({**BY_NVIDIA, "device_name": "gpu-3", "share_id": CLAIM}, ["nvidia3"]),
        ({**BY_NVIDIA, "device_name": "gpu-12-mig-19-0-1"}, ["nvidia12"]),
        ({**BY_NVIDIA, "device_name": "gpu-0-mig-1g10gb-19-4"}, ["nvidia0"]),
        ({**BY_NVIDIA, "device_name": "gpu-0-mig-1g10gb-me-20-4"}, ["nvidia0"]),
        ({"cdi": [f"{CDI}/device=gpu-3"]}, ["nvidia3"]),
        ({"cdi": [f"{CDI}/device=gpu-3", f"{CDI}/claim={CLAIM}-gpu-3"]}, ["nvidia3"]),
        ({"cdi": [f"{CDI}/device=gpu-3-mig-19-0-1"]}, ["nvidia3"]),
        ({**BY_NVIDIA, "device_name": "gpu-vfio-0"}, []),
        ({**BY_NVIDIA, "device_name": "gpu-"}, []),
        ({**BY_NVIDIA, "device_name": "gpu-3-mig-"}, []),
        ({"driver_name": "compute-domain.nvidia.com", "device_name": "channel-0"}, []),
        ({"driver_name": "gpu.example.com", "device_name": "gpu-0"}, []),
        ({"cdi": ["k8s.gpu.example.com/device=gpu-0"]}, []),
        ({}, []),
    ],
)
def test_a_claim_names_its_gpu(kubelet: Kubelet, resource: dict[str, Any], gpus: list[str]) -> None:
    kubelet.add("web", "page", server=[])
    kubelet.claim("ml", "train-0", "worker", **resource)
    assert PodResources(kubelet.socket).holders() == {gpu: [pod("ml", "train-0", "worker")] for gpu in gpus}


def test_a_deleted_pod_holds_nothing_after_the_next_poll(kubelet: Kubelet) -> None:
    kubelet.add("ml", "a", main=[f"{UUID}0"])
    kubelet.claim("ml", "b", "main", **BY_NVIDIA, device_name="gpu-1")
    watcher = ClaimsWatcher([PodResources(kubelet.socket)], lambda: Scan([], Counter()))
    watcher.poll()
    assert watcher.claims().find_holders(0, "nvidia0", f"{UUID}0") == [pod("ml", "a", "main")]
    assert watcher.claims().find_holders(1, "nvidia1", f"{UUID}1") == [pod("ml", "b", "main")]
    del kubelet.answer.pod_resources[:]
    watcher.poll()
    assert watcher.claims().find_holders(0, "nvidia0", f"{UUID}0") == []
    assert watcher.claims().find_holders(1, "nvidia1", f"{UUID}1") == []
    assert watcher.claims().is_complete


def test_a_container_with_several_parts_of_a_gpu_holds_it_once(kubelet: Kubelet) -> None:
    kubelet.add("ml", "a", main=[f"{UUID}0::0", f"{UUID}0::1", INSTANCE])
    assert PodResources(kubelet.socket).holders() == {
        f"{UUID}0": [pod("ml", "a", "main")],
        INSTANCE: [pod("ml", "a", "main")],
    }


def test_corrupt_responses_raise_only_value_or_index_errors(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path)
    kubelet.add("ml", "train-0", worker=[f"{UUID}0"])
    whole = kubelet.answer.SerializeToString()
    randomly = random.Random(3)
    outcomes = set()
    for _ in range(3000):
        broken = bytearray(whole[: randomly.randint(1, len(whole))])
        broken[randomly.randrange(len(broken))] = randomly.randrange(256)
        try:
            outcomes.add(all(isinstance(holder, Holder) for _, holder in parse_pods(bytes(broken))))
        except (ValueError, IndexError):
            outcomes.add("error")
    assert outcomes == {True, "error"}


def test_a_truncated_response_is_an_error(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path)
    kubelet.add("ml", "train-0", worker=[f"{UUID}0"])
    with pytest.raises(ValueError, match="ends within a field"):
        list(parse_pods(kubelet.answer.SerializeToString()[:-1]))


def test_grpc_is_imported_only_when_a_kubelet_is_queried() -> None:
    code = "import sys, rankscope_exporter.daemon; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_grpc_the_error_names_the_package_to_install() -> None:
    code = """if True:
        import sys
        sys.modules["grpc"] = None
        from rankscope_exporter.__main__ import main
        main(["--collector.allocation.kubelet-socket=/x", "--web.listen-address=127.0.0.1:0", "--log.level=error"])"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr == (
        "rankscope-exporter: --collector.allocation.kubelet-socket: grpc missing; "
        "install with: pip install 'rankscope[kubernetes]'\n"
    )
