"""Keeping torch.compile out of our own functions.

While compiled code runs, torch.compile takes up every Python frame that it comes across outside its graphs, ours among
them: our wrapper of DDP's forward was compiled, to its transparent path, so that the call was lost to us, and
`Timeline.enter` was, with graph breaks of its own. Frames are told apart by their code, without loading torch._dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def skip_frame(function: Function) -> Function:
    """Have torch.compile leave the frames of `function` to Python, and still look at what it calls: a wrapper."""
    _skip(function.__code__, within="DEFAULT")
    return function


def skip_call(function: Function) -> Function:
    """Have torch.compile leave the frames of `function` and of all that it calls to Python: code of ours alone."""
    _skip(function.__code__, within="SKIP")
    return function


def _skip(code: CodeType, within: str) -> None:
    """What torch._dynamo.eval_frame.skip_code does; nothing where a version of torch has neither way."""
    api: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - no public one, and in torch 2.4 no module to import
    if hasattr(api, "skip_code"):  # torch < 2.7: of the frame alone
        api.skip_code(code)
    elif hasattr(api, "set_code_exec_strategy"):
        action = api._FrameAction  # noqa: SLF001 - torch's own name for it
        strategy = api._FrameExecStrategy(action.SKIP, getattr(action, within))  # noqa: SLF001 - as above
        api.set_code_exec_strategy(code, strategy)
