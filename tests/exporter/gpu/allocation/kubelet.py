"""A kubelet with the pod resources API: a real gRPC server on a Unix socket. protoc's code encodes its messages."""

from __future__ import annotations

import importlib
import sys
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from grpc_tools import protoc
from testing.waiting import eventually

PROTO = Path(__file__).with_name("podresources.proto")
NAME = "podresources_pb2"


def compiled(directory: Path) -> ModuleType:
    """Return the messages of podresources.proto. Compile them into the directory once per process."""
    if NAME not in sys.modules:
        assert protoc.main(["", f"-I{PROTO.parent}", f"--python_out={directory}", str(PROTO)]) == 0
        sys.path.insert(0, str(directory))
        try:
            importlib.import_module(NAME)
        finally:
            sys.path.remove(str(directory))
    return sys.modules[NAME]


class Kubelet:
    """A server that returns the pods added by a test."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "kubelet.sock"
        self.messages = compiled(directory)
        self.answer = self.messages.ListPodResourcesResponse()
        self._server: grpc.Server | None = None

    def add(self, namespace: str, name: str, **containers: list[str]) -> None:
        """Add a pod whose containers have these devices, with CPUs and memory from static policies."""
        pod = self.answer.pod_resources.add(name=name, namespace=namespace)
        for container, ids in containers.items():
            resources = pod.containers.add(name=container, cpu_ids=[0, 1, 300])
            resources.memory.add(memory_type="memory", size=2**40)
            devices = resources.devices.add(resource_name="nvidia.com/gpu", device_ids=ids)
            devices.topology.nodes.add(ID=1)

    def claim(self, namespace: str, name: str, container: str, **resource: Any) -> None:
        """Add a pod with one container that has one device of a claim (dynamic resource allocation)."""
        pod = self.answer.pod_resources.add(name=name, namespace=namespace)
        claim = pod.containers.add(name=container).dynamic_resources.add(claim_name="gpu", claim_namespace=namespace)
        names = resource.pop("cdi", [])
        device = claim.claim_resources.add(**resource)
        for name in names:
            device.cdi_devices.add(name=name)

    def start(self) -> None:
        answer = grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: self.answer,
            request_deserializer=self.messages.ListPodResourcesRequest.FromString,
            response_serializer=self.messages.ListPodResourcesResponse.SerializeToString,
        )
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": answer}),)
        )
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server:
            self._server.stop(None).wait()
            self._server = None
            eventually(lambda: not self.socket.exists())  # gRPC removes it later, possibly the next server's socket
