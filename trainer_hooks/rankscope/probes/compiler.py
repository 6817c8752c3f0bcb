"""Keeping torch.compile out of our own functions.

While compiled code runs, torch.compile takes up every Python frame that it comes across outside its graphs, ours among
them: our wrapper of DDP's forward was compiled, to its transparent path, so that the call was lost to us, and
`Timeline.enter` was, with graph breaks of its own. Frames are told apart by their code, without loading torch._dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch._C._dynamo.eval_frame as eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def skip_frame(function: Function) -> Function:
    """Have torch.compile leave the frames of `function` to Python, and still look at what it calls: a wrapper."""
    if hasattr(eval_frame, "skip_code"):  # torch < 2.7
        eval_frame.skip_code(function.__code__)
    else:
        _set_strategy(function, eval_frame._FrameAction.DEFAULT)  # noqa: SLF001 - what torch._dynamo.skip_code does
    return function


def skip_call(function: Function) -> Function:
    """Have torch.compile leave the frames of `function` and of all that it calls to Python: code of ours alone."""
    if hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(function.__code__)
    else:
        _set_strategy(function, eval_frame._FrameAction.SKIP)  # noqa: SLF001 - as above
    return function


def _set_strategy(function: Callable[..., Any], within: Any) -> None:
    skip = eval_frame._FrameAction.SKIP  # noqa: SLF001 - as above
    code = getattr(function, "__func__", function).__code__
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, within))  # noqa: SLF001 - as above
