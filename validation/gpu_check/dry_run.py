"""The parts without a GPU: on the CPU, the asynchronous device and a simulated driver, for a tenth of the time.

It shows that each part runs to its end and reports; its figures mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

VARIABLE = "RANKSCOPE_GPU_CHECK_DRY_RUN"
IS_DRY = os.environ.get(VARIABLE) == "1"
DEVICE = "cpu" if IS_DRY else "cuda"
SHORTER = 0.1
SCENARIO = {"gpus": 1, "timeline": {0: [{"at": 0, "busy": 0.5}]}}
NVIDIA_SMI = """#!/bin/sh
cat <<END
<nvidia_smi_log>
<driver_version>simulated</driver_version>
<gpu id="0">
<product_name>Dry run</product_name>
</gpu>
</nvidia_smi_log>
END
"""


def shortened(seconds: float) -> float:
    """Return the seconds of a measurement, fewer in a dry run."""
    return seconds * SHORTER if IS_DRY else seconds


def simulated(directory: Path) -> Mapping[str, str]:
    """Put a simulated driver and an nvidia-smi into the directory, and return the variables that select them."""
    from nvml_simulator import environment, install

    from rankscope_exporter.simulation.scenario import parse_scenario

    install(directory, parse_scenario(SCENARIO))
    (directory / "nvidia-smi").write_text(NVIDIA_SMI)
    (directory / "nvidia-smi").chmod(0o755)
    return {VARIABLE: "1", "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", **environment(directory)}


@contextmanager
def device() -> Iterator[None]:
    """Replace the parts of torch.cuda that the hook uses by the asynchronous device, in a dry run."""
    if not IS_DRY:
        yield
        return
    import torch
    from testing.asynchronous_device import asynchronous_device, launch

    with ExitStack() as stack:
        stack.enter_context(asynchronous_device())
        stack.enter_context(patch.object(torch.cuda, "_sleep", lambda _cycles: launch(5)))
        stack.enter_context(patch.object(torch.Tensor, "item", lambda _tensor: torch.cuda.synchronize()))
        yield
