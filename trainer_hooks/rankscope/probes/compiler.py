"""Keeping torch.compile out of the hook's own functions.

While compiled code runs, torch.compile compiles every Python frame outside its graphs, also the hook's. It compiled the
wrapper of DDP's forward to its path without the hook, so the call was not seen, and `Timeline.enter` with graph breaks.
Frames are identified by their code objects, without loading torch._dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def skip_frame(function: Function) -> Function:
    """Keep torch.compile from compiling `function`, but not from compiling what it calls. For wrappers."""
    _skip(function.__code__, within="DEFAULT")
    return function


def skip_call(function: Function) -> Function:
    """Keep torch.compile from compiling `function` and everything that it calls. For code of the hook alone."""
    _skip(function.__code__, within="SKIP")
    return function


def skip_package() -> None:
    """Keep torch.compile from compiling each function of this package, where torch skips single frames only (< 2.7)."""
    if not hasattr(torch._C._dynamo.eval_frame, "skip_code"):  # noqa: SLF001 - as below
        return
    package = __name__.partition(".")[0]
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == package]:
        for value in vars(module).values():
            for function in (value, *vars(value).values()) if isinstance(value, type) else (value,):
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    _skip_with_nested(function.__code__)


def _skip_with_nested(code: CodeType) -> None:
    _skip(code, within="DEFAULT")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip_with_nested(constant)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap `function` to run with torch.compile off, also in torch < 2.7, where `skip_call` skips one frame only.

    For rare calls of foreign code: before torch 2.7, publishing the record from compiled code compiled a hundred frames
    of json and pathlib.
    """
    api: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - as below
    if not hasattr(api, "skip_code"):
        return skip_call(function)

    def paused(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        callback = api.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            api.set_eval_frame(callback)

    return skip_frame(paused)


def _skip(code: CodeType, within: str) -> None:
    """Do what torch._dynamo.eval_frame.skip_code does; nothing if this version of torch has no such function."""
    api: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - no public one, and in torch 2.4 no module to import
    if hasattr(api, "skip_code"):  # torch < 2.7: skips the frame alone
        api.skip_code(code)
    elif hasattr(api, "set_code_exec_strategy"):
        action = api._FrameAction  # noqa: SLF001 - torch's own name for it
        strategy = api._FrameExecStrategy(action.SKIP, getattr(action, within))  # noqa: SLF001 - as above
        api.set_code_exec_strategy(code, strategy)
