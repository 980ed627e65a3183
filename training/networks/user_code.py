"""User code by its path, `package.module:function`: networks, towers, losses, metrics.

It is imported as `python -m` would: from the current folder, `PYTHONPATH` or what is installed. It
runs in the process, with its rights: whoever writes a config chooses the code that runs.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import OwnCodeError, SluiceError

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_ROOT = Path(__file__).parents[2]
_SLUICE = tuple(str(_ROOT / name) + os.sep for name in ("conf", "etl", "jobs", "training"))
_FILES: set[str] = set()
"""Files of imported user modules: one that is installed lies among the libraries."""
_COLOUR = re.compile("\x1b\\[[0-9]*m")
# A line of a traceback in the text of TensorFlow's errors.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ADVICE = "correct the function or its params; a run that has a checkpoint goes on with --resume"
_WHERE = (
    "name a function in a module of the current folder, of PYTHONPATH or installed; conf, etl, "
    "jobs and training are Sluice's own"
)


def import_function(what: str, path: str) -> Callable[..., Any]:
    """Imports a function; `what` it is, such as `network`, is what an error says first."""
    module_name, _, function = path.partition(":")
    with user_errors(f"{what} {path} cannot be imported", _WHERE), _finding_modules():
        module = importlib.import_module(module_name)
        _FILES.add(str(getattr(module, "__file__", None)))
        imported: Callable[..., Any] = getattr(module, function)
        return imported


def call_function(what: str, function: Callable[..., Any], /, *values: Any, **params: Any) -> Any:
    """Calls user code, which may import modules as it runs; `what` is what an error says first."""
    with user_errors(what), _finding_modules():
        return function(*values, **params)


def pick_parameters(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the arguments that Sluice sets which a function has a parameter for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Compiled functions may tell none.
        return {}
    return {name: value for name, value in given.items() if name in parameters}


@contextmanager
def user_errors(what: str | None = None, fix: str = _ADVICE) -> Iterator[None]:
    """Tells what user code raises in the block, with its file and line.

    `what` fails where nothing but user code can; None: errors that Sluice or a library raises by
    itself pass.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        found = explain_error(error, what, fix)
        if found is None or found is error:
            raise
        raise found from error


def explain_error(
    error: BaseException, what: str | None = None, fix: str = _ADVICE
) -> SluiceError | None:
    """Returns what an error says of user code; None: it is not that code's. See `user_errors`."""
    if isinstance(error.__context__, Exception) and hasattr(error, "ag_error_metadata"):
        error = error.__context__  # AutoGraph has put one of its own in its place.
    if isinstance(error, SluiceError):
        return error
    text = str(error)
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    frames += _FRAME.findall(text)
    users = [frame for frame in frames if _is_users(frame[0])]
    ours = [frame for frame in frames if _is_users(frame[0]) or frame[0].startswith(_SLUICE)]
    if what is None and (not users or users[-1] != ours[-1]):
        return None
    where = " in {}:{}".format(*users[-1]) if users else ""
    return OwnCodeError(
        what or "user code fails",
        received=f"{type(error).__name__}{where}: {_find_reason(text)}",
        fix=fix,
    )


def _is_users(file: str) -> bool:
    is_library = file.startswith(("<", *_LIBRARIES)) and file not in _FILES
    return not is_library and not file.startswith(_SLUICE)  # Sluice may be installed too.


def _find_reason(text: str) -> str:
    """Returns what an error's text says: without tracebacks of TensorFlow, arguments of Keras."""
    text = _COLOUR.sub("", text.partition("Arguments received by")[0])
    lines = [line for line in text.splitlines() if line.strip()]
    if _FRAME.search(text):
        # The last line beside those of the tracebacks, which are indented.
        plain = [line for line in lines if not line[0].isspace() and not _FRAME.search(line)]
        lines = plain[-1:]
    return " ".join(line.strip() for line in lines)


@contextmanager
def _finding_modules() -> Iterator[None]:
    """Lets modules be imported from the current folder, as `python -m` does."""
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
