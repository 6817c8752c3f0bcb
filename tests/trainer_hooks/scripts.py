"""Training scripts that are watched without a change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

from testing.programs import Program, python, running

TRAIN = """
import os, re, signal, sys, threading, time
import torch
torch.set_num_threads(1)
weights = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weights], lr=0.1)

def step():
    weights.sum().backward()
    optimizer.step()

step()
"""
READY = "print('ready', flush=True)\n"
WAIT = "sys.stdin.read()\n"


def watched(**variables: str) -> dict[str, str]:
    """Return an environment in which torch loads the hook."""
    return {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", **variables}


@contextmanager
def job(code: str, *options: str, setup: str = "", **variables: str) -> Iterator[Program]:
    """Start a script that makes a step, runs `setup`, reports that it is ready, and runs `code`."""
    interpreter, *script = python(TRAIN + setup + READY + code)
    with running(interpreter, *options, *script, env=watched(**variables), stderr=PIPE) as program:
        yield program
