"""Kubernetes pods that hold GPUs, from the kubelet's pod resources API (v1) on its Unix socket.

Only gRPC's transport is used (`pip install 'rankscope[kubernetes]'`), and only imported if a socket is configured.
The response is parsed here: ten fields of seven nested messages need few lines, and generated code would tie the
exporter to a version of the protobuf runtime (docs/decisions).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from rankscope_exporter.gpu.allocation.claims import SchedulerError
from rankscope_exporter.gpu.allocation.holder import Holder

LIST = "/v1.PodResourcesLister/List"
ANSWER_TIMEOUT = 5.0  # seconds
ANSWER_LIMIT = 16 * 2**20  # bytes; gRPC's own is 4 MiB, which a node with hundreds of pods and many CPUs may exceed

# Device ids of NVIDIA's device plugin (NVIDIA/k8s-device-plugin, internal/rm): GPU-<uuid>, or MIG-<uuid> for a MIG
# device (before driver 470: MIG-GPU-<uuid of the GPU>/<gi>/<ci>); a replica of a shared device (time slicing, MPS) ends
# in ::<n>. HAMi and Volcano: GPU-<uuid>-<n>. GKE's plugin: nvidia<minor number>, like the device file, optionally with
# /gi<n> or /vgpu<n> (GoogleCloudPlatform/container-engine-accelerators).
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
DEVICE_ID = re.compile(
    rf"(?:(?:MIG-)?(?P<gpu>GPU-{_UUID})(?:/\d+/\d+|-\d+)?|(?P<instance>MIG-{_UUID})|(?P<file>nvidia\d+)(?:/[^:]+)?)"
    r"(?:::\d+)?"
)
# Plugins that number devices: <index> or <index>:<mig index>. Numbers of other resources are not GPU indices.
NUMBER_ID = re.compile(r"(\d+)(?::\d+)?(?:::\d+)?")
GPU_RESOURCE = re.compile(r"nvidia\.com/(?:gpu|mig-).*")
# Dynamic resource allocation with NVIDIA's driver (NVIDIA/k8s-dra-driver-gpu, cmd/gpu-kubelet-plugin): gpu-<minor
# number>, for a MIG device with -mig-<profile and placement>. Kubelets before 1.31 report only CDI device names: the
# same after the kind, and after the claim's UID if the claim configures the device.
DRA_DRIVER = "gpu.nvidia.com"
DRA_DEVICE = re.compile(
    rf"(?:k8s\.gpu\.nvidia\.com/(?:device|claim)=(?:{_UUID}-)?)?gpu-(?P<minor>\d+)(?:-mig-[0-9a-z][0-9a-z-]*)?"
)

VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = 0, 1, 2, 5  # protobuf.dev/programming-guides/encoding


class KubeletError(SchedulerError):
    """gRPC is missing, or the kubelet did not respond with a valid message."""


class PodResources:
    """Pods that hold GPUs of this node, running or pending: the kubelet lists them once it assigns devices."""

    name = "kubernetes"

    def __init__(self, socket: Path) -> None:
        """Initialize the source. Raises KubeletError if gRPC is not installed."""
        if importlib.util.find_spec("grpc") is None:
            raise KubeletError("grpc missing; install with: pip install 'rankscope[kubernetes]'")
        self._socket = socket

    def holders(self) -> Mapping[str, Sequence[Holder]]:
        """Return the holders by index, UUID or device file. Raises KubeletError."""
        found: dict[str, list[Holder]] = {}
        try:
            for gpu, holder in parse_pods(self._list()):
                found.setdefault(gpu, []).append(holder)
        except (ValueError, IndexError) as error:
            raise KubeletError(f"{self._socket}: invalid pod resources response: {error}") from error
        return found

    def _list(self) -> bytes:
        """Return the raw response. Uses a new connection each time, because the kubelet may have restarted."""
        import grpc

        # A Go server rejects the authority that some versions of gRPC derive from a socket path (grpc/grpc-go#2628).
        options = [
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", ANSWER_LIMIT),
            # Otherwise a channel shares a failed connection and its 1 s of backoff with the next channel.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        try:
            with grpc.insecure_channel(f"unix:{self._socket}", options=options) as channel:
                ask = channel.unary_unary(LIST, request_serializer=None, response_deserializer=None)
                return cast("bytes", ask(b"", timeout=ANSWER_TIMEOUT))
        except grpc.RpcError as error:
            raise KubeletError(f"{self._socket}: {error.code().name}: {error.details()}") from error


def parse_pods(answer: bytes) -> Iterator[tuple[str, Holder]]:
    """Yield every GPU of a ListPodResourcesResponse, by index, UUID or device file, with its pod and container.

    Raises ValueError or IndexError if the message is invalid.
    """
    for pod in _all(answer, 1):
        name, namespace = _text(pod, 1), _text(pod, 2)
        for container in _all(pod, 3):
            holder = Holder("kubernetes", k8s_namespace=namespace, k8s_pod=name, k8s_container=_text(container, 1))
            for devices in _all(container, 2):
                gpus = {gpu_of_device(device, _text(devices, 1)) for device in _all(devices, 2)}
                yield from ((gpu, holder) for gpu in sorted(filter(None, gpus)))
            claimed = {
                gpu for claim in _all(container, 5) for device in _all(claim, 4) for gpu in _gpus_of_claim(device)
            }
            yield from ((gpu, holder) for gpu in sorted(claimed))


def _gpus_of_claim(device: bytes) -> Iterator[str]:
    """Yield the device files of the GPUs that a ClaimResource names."""
    driver, name = _text(device, 2), _text(device, 4)
    names = [name] if driver == DRA_DRIVER else [] if driver else [_text(cdi, 1) for cdi in _all(device, 1)]
    yield from (f"nvidia{found['minor']}" for found in map(DRA_DEVICE.fullmatch, names) if found)


def gpu_of_device(device: bytes, resource: str = "") -> str | None:
    """Return the index, UUID or device file of the GPU, or the UUID of the MIG device, that a device id names.

    Return None for other devices.
    """
    text = device.decode(errors="replace")
    if found := DEVICE_ID.fullmatch(text):
        return found["gpu"] or found["instance"] or found["file"]
    numbered = NUMBER_ID.fullmatch(text) if GPU_RESOURCE.fullmatch(resource) else None
    return numbered[1] if numbered else None


def _text(message: bytes, number: int) -> str:
    return b"".join(_all(message, number)[-1:]).decode(errors="replace")


def _all(message: bytes, number: int) -> list[bytes]:
    return [value for field, value in _fields(message) if field == number]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each length-delimited field (strings and messages). Other fields are skipped."""
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        kind, length = tag & 7, {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(tag & 7, 0)
        if kind == VARINT:
            _, offset = _varint(message, offset)
        elif kind == LENGTH_DELIMITED:
            length, offset = _varint(message, offset)
        elif not length:
            raise ValueError(f"unknown field type {kind}")
        if offset + length > len(message):
            raise ValueError("message ends within a field")
        if kind == LENGTH_DELIMITED:
            yield tag >> 3, message[offset : offset + length]
        offset += length


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the number at the offset (seven bits per byte, lowest first) and the offset after it."""
    value = shift = 0
    while message[offset] & 0x80:
        value |= (message[offset] & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
    return value | message[offset] << shift, offset + 1
