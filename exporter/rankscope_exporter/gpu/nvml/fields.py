"""NVML values stored in a union: fields of nvmlDeviceGetFieldValues (many per call) and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.errors import LOST, DeviceLostError, ask

FieldId = int | tuple[int, int]
"""NVML_FI_…, or a pair of it and a scope: an NVLink or ALL_LINKS."""
ALL_LINKS = 0xFFFFFFFF

_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}
# Values that mean "not available": -1 in an unsigned integer of either width.
_NOT_AVAILABLE = frozenset(
    {pynvml.NVML_VALUE_NOT_AVAILABLE_uint.value, pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value}
)


def field_values(handle: Any, ids: Sequence[FieldId]) -> list[float | None]:
    """Return the value of each field, in order. Raises DeviceLostError, DriverError."""
    values = ask(pynvml.nvmlDeviceGetFieldValues, handle, ids)
    return [None] * len(ids) if values is None else [_field_value(value) for value in values]


def value_of(value_type: int, value: Any) -> float | None:
    """Return the union's value; None if its type is newer than the bindings."""
    member = _MEMBERS.get(value_type)
    return None if member is None else known(getattr(value, member))


def known(value: float | None) -> float | None:
    """Return the value, or None if it means "not available"."""
    return None if value is None or value in _NOT_AVAILABLE else value


def _field_value(field: Any) -> float | None:
    """Return one field's value. Its failure is not raised: some drivers reject unknown fields as invalid arguments."""
    if field.nvmlReturn in LOST:
        raise DeviceLostError("nvmlDeviceGetFieldValues", field.nvmlReturn, f"field {field.fieldId}: the GPU is lost")
    return value_of(field.valueType, field.value) if field.nvmlReturn == pynvml.NVML_SUCCESS else None
