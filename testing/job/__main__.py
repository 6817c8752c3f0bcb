"""The training job, as a script under torchrun.

    torchrun --standalone --nproc-per-node 4 -m testing.job DIRECTORY gloo

DIRECTORY has the control file (control.py), which sets the faults; the job writes the starts and the process ids of its
ranks and its progress there. The other kind of device is `asynchronous`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rankscope
from rankscope import guard
from rankscope.timeline import device_clock
from testing.job.control import ControlReader
from testing.job.device import ASYNCHRONOUS, installed
from testing.job.loop import TrainingLoop, delay_transfer
from testing.leaving import leave

# Ten times as often as in the hook: at the fast speed the rules' windows are a fiftieth, and in production each has
# hundreds of measured steps. A step with fifty collectives, as in f22, has two hundred marks.
SECONDS_PER_MARK = device_clock.SECONDS_PER_MARK / 10


def main() -> None:
    """Train on the kind of device that the command line names."""
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    (directory / f"rank-{os.environ['RANK']}.began").write_text(str(time.time()))
    torch.set_num_threads(1)
    control = ControlReader(directory / "control.json", int(os.environ["RANK"]))
    at_start = control.latest()
    guard.reraise = at_start.reraises
    device_clock.SECONDS_PER_MARK = 0.0 if at_start.measures_every_step else SECONDS_PER_MARK
    with installed(kind, on_transfer=lambda: delay_transfer(control)) as device:
        if kind == ASYNCHRONOUS:
            rankscope.instrument()  # over gloo RANKSCOPE=1 has done it
        dist.init_process_group(device.backend)
        try:
            TrainingLoop(directory, device, control).run()
            dist.barrier()
        finally:
            leave()


if __name__ == "__main__":
    main()
