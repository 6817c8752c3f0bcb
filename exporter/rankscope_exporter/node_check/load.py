"""Load one GPU and measure its rates: a program for any Python with torch, which needs no other package.

    python load.py SECONDS

Checks the first GPU of CUDA_VISIBLE_DEVICES. Prints lines of JSON: `stage` with its begin before each step, so that a
hang has a place; `rate` with its name, value, begin and end; `not_run` if torch cannot use any GPU. Times are of the
monotonic clock. Ends with the process that has started it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = 8192  # rows of the square matrices: large enough to keep all SMs of present GPUs busy
CHUNK = 2**30  # bytes of a copy: much more than the caches of present GPUs
SHARE = 1 / 8  # of the free memory that one buffer may take
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>: the signal at the end of the parent
AT_ONCE = 4  # pieces of work between two synchronizations


def emit(**value: object) -> None:
    """Print a line of JSON."""
    print(json.dumps(value), flush=True)  # noqa: T201 - for the process that has started this one


def begin(stage: str) -> None:
    """Print that a stage begins."""
    emit(stage=stage, began=time.monotonic())


def main(seconds: float) -> None:
    """Measure for about this long. An error of CUDA is raised, and its last line is the reason."""
    begin("importing torch")
    try:
        import torch
    except ImportError as error:
        emit(not_run=f"torch cannot be imported: {error}")
        return
    if torch.version.cuda is None:
        emit(not_run=f"torch {torch.__version__} has no CUDA")
        return
    begin("initializing CUDA")
    major, _ = torch.cuda.get_device_capability(0)
    kind = torch.bfloat16 if major >= 8 else torch.float16 if major == 7 else torch.float32  # as tensor cores have it
    free, _ = torch.cuda.mem_get_info(0)
    begin("allocating memory")
    works = make_works(torch, "cuda", kind, min(CHUNK, int(SHARE * free)), SIZE)
    for name, (share, work, amount) in works.items():
        begin(name)
        measure(name, share * seconds, work, amount, torch.cuda.synchronize)


def make_works(
    torch: Any, device: str, kind: Any, chunk: int, size: int
) -> dict[str, tuple[float, Callable[[], object], float]]:
    """Return each work's share of the time, its function, and the operations or bytes of a call."""
    left, right, product = (torch.randn(size, size, device=device, dtype=kind) for _ in range(3))
    source, target = (torch.ones(chunk, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(chunk // 8, dtype=torch.uint8, pin_memory=device == "cuda")
    part = target[: chunk // 8]
    return {
        "matmul": (0.6, lambda: torch.matmul(left, right, out=product), 2.0 * size**3),
        "memory_bandwidth": (0.25, lambda: target.copy_(source), 2.0 * chunk),  # read and written
        "upload": (0.15, lambda: part.copy_(host, non_blocking=True), chunk // 8),  # so that the PCIe link works
    }


def measure(
    name: str, seconds: float, work: Callable[[], object], amount: float, synchronize: Callable[[], object]
) -> None:
    """Repeat the work, the first third to warm up, and emit the rate of the rest."""
    began = time.monotonic()
    warm, ends = began + seconds / 3, began + seconds
    done, is_warm = 0, False
    while not done or not is_warm or time.monotonic() < ends:
        for _ in range(AT_ONCE):
            work()
        synchronize()
        done += AT_ONCE
        if not is_warm and time.monotonic() >= warm:
            done, began, is_warm = 0, time.monotonic(), True
    emit(rate=name, value=done * amount / (time.monotonic() - began), began=began, ended=time.monotonic())


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.pop(0)  # this folder, whose modules torch must not import
    main(float(sys.argv[1]))
