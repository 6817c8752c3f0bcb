"""Descriptions of process groups that torch does not describe, by the variables in which a framework keeps them.

DeepSpeed, apex and fairscale describe no group, and of Megatron only newer versions do. DeepSpeed's pipeline even sends
in the group of all ranks, so that only a variable shows which ranks are its stages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from rankscope.foreign import attribute, items

MODULES = (
    "megatron.core.parallel_state",
    "megatron.mpu.initialize",
    "apex.transformer.parallel_state",
    "fairscale.nn.model_parallel.initialize",
    "deepspeed.utils.groups",
)
VARIABLE = re.compile(r"_(\w+_PARALLEL_GROUP(?:_WITH_CP)?)")
GRID = {"pp_proc_group": "pipe", "dp_proc_group": "data", "slice_proc_group": "tensor"}
"""Descriptions by the attributes of DeepSpeed's grid, the `mpu` of its groups."""


def describe_by_framework(process_group: Any) -> str:
    """Return the description, such as `PIPELINE_MODEL_PARALLEL_GROUP`; empty if no framework keeps the group."""
    for name in MODULES:
        variables = getattr(sys.modules.get(name), "__dict__", {})
        for description, value in _described(dict(variables)):
            if any(item is process_group for item in items(value) or (value,)):
                return description
    return ""


def _described(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in variables.items():
        if match := VARIABLE.fullmatch(name):
            yield match[1], value
    for name, description in GRID.items():
        yield description, attribute(variables.get("mpu"), name)
