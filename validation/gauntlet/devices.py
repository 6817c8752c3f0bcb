"""The two kinds of device that the job trains on."""

from __future__ import annotations

GLOO = "gloo"
"""The host is the device, and waits for other ranks in every collective."""
ASYNCHRONOUS = "asynchronous"
"""As with CUDA and NCCL (testing/asynchronous_device): the host runs ahead, and waits where it reads a value."""
DEVICES = (GLOO, ASYNCHRONOUS)
