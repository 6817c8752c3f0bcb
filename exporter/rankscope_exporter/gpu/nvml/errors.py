"""Every call to NVML passes through `ask`: what a device does not support becomes None here and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pynvml

CODES: dict[str, int] = {
    name.removeprefix("NVML_ERROR_"): code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")
}

# NO_PERMISSION is among them because an exporter in a container is told so, for good, about what its host hides;
# ARGUMENT_VERSION_MISMATCH and DEPRECATED are how a driver says that it is older or newer than the bindings.
UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
LOST = frozenset(
    {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND},
)


class DriverError(Exception):
    """The driver failed a call. `code` is NVML's return code."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.code = code


class DeviceLostError(DriverError):
    """The device fell off the bus or needs a reset: nothing that it was asked earlier holds any more."""


def ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the call returns, or None where device, driver or bindings do not have it.

    Text that is not UTF-8 has a replacement character for each byte that is not.

    Raises DeviceLostError for a device that is gone and DriverError for every other failure, known or not.
    """
    try:
        return call(*arguments)
    except UnicodeDecodeError as error:  # pynvml decodes what the driver returns, and insists on UTF-8
        return error.object.decode(errors="replace")
    except pynvml.NVMLLibraryMismatchError:  # what an unversioned function says when its symbol is not there
        return None
    except pynvml.NVMLError as error:
        if error.value in UNSUPPORTED:
            return None
        kind = DeviceLostError if error.value in LOST else DriverError
        raise kind(call.__name__, error.value, str(error)) from error


def perform(call: Callable[..., Any], *arguments: Any) -> bool:
    """`ask` for calls that return nothing: whether device, driver and bindings have it."""

    @functools.wraps(call)
    def performed() -> bool:
        call(*arguments)
        return True

    return ask(performed) is not None
