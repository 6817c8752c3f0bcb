"""NVML calls and errors. All calls use `ask`, the only place that turns an unsupported value into None."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pynvml

CODES: dict[str, int] = {
    name.removeprefix("NVML_ERROR_"): code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")
}

# NO_PERMISSION is included because a container permanently gets it for calls that its host denies.
# ARGUMENT_VERSION_MISMATCH and DEPRECATED mean that the driver is older or newer than the bindings.
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
    """A failed driver call. `code` is NVML's return code."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.code = code


class DeviceLostError(DriverError):
    """The device fell off the bus or needs a reset. Its earlier values are no longer valid."""


def ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the call's result, or None if device, driver or bindings do not support it.

    Replaces each byte that is not UTF-8 by a replacement character.

    Raises DeviceLostError if the device is lost, and DriverError for every other failure.
    """
    try:
        return call(*arguments)
    except UnicodeDecodeError as error:  # pynvml decodes the driver's strings as strict UTF-8
        return error.object.decode(errors="replace")
    except pynvml.NVMLLibraryMismatchError:  # raised by an unversioned function whose symbol is missing
        return None
    except pynvml.NVMLError as error:
        if error.value in UNSUPPORTED:
            return None
        kind = DeviceLostError if error.value in LOST else DriverError
        raise kind(call.__name__, error.value, str(error)) from error


def perform(call: Callable[..., Any], *arguments: Any) -> bool:
    """Call a function without a result through `ask`. Return whether it is supported."""

    @functools.wraps(call)
    def performed() -> bool:
        call(*arguments)
        return True

    return ask(performed) is not None
