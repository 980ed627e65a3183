"""Code of one's own by its path, `package.module:function`: networks, towers, losses, metrics.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, OwnCodeError, SluiceError, did_you_mean

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_OWN_PACKAGES = ("conf", "etl", "jobs", "training")
_SLUICE = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in _OWN_PACKAGES)
# Begins what a step says of such code that was right as it was tried.
OWN_FAULT = "own code: "
_COLOUR = re.compile("\x1b\\[[0-9]*m")
# A line of a traceback in the text of TensorFlow's errors.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class OwnCode:
    """What a function of one's own is for, in the words of errors.

    Attributes:
        what: What it is, such as `network`.
        key: Key of the config that names it.
        params_key: Key of the config with its parameters.
        arguments: Arguments that it is called with, by position; the first ones of its signature.
        given: Further parameters that Sluice sets where the function has them.
    """

    what: str
    key: str
    params_key: str
    arguments: tuple[str, ...]
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """What an error says of a function that fails; attributes are those of `ConfigError`."""

    problem: str
    fix: str
    allowed: str | None = None


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


def import_function(path: str, code: OwnCode, built_in: Collection[str] = ()) -> Callable[..., Any]:
    """Imports the function at `package.module:function`.

    Args:
        path: Where it is.
        code: What it is for.
        built_in: Names that could stand in its place.

    Raises:
        ConfigError: There is no such module or function, or importing it fails.
    """
    module_name, _, function = path.partition(":")
    if module_name.partition(".")[0] in _OWN_PACKAGES:
        instead = f", or name a built-in {code.what}: {', '.join(built_in)}" if built_in else ""
        raise ConfigError(
            f"the module of {code.key} is one of Sluice's own",
            received=path,
            allowed=f"a module of yours; {', '.join(_OWN_PACKAGES)} are taken",
            fix=f"rename the module or its package{instead}",
        )
    try:
        with _finding_modules():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(
            error.name or module_name
        )
        raise ConfigError(
            f"the module of {code.key} cannot be imported",
            received=f"{path}: {type(error).__name__}{_find_line(error)}: {error}",
            allowed="a module in the current folder, on PYTHONPATH, or installed",
            fix="run the command in the folder of the module, or add that folder to PYTHONPATH"
            if is_missing
            else "correct the module: it was found, and importing it fails",
        ) from error
    imported = getattr(module, function, None)
    if not callable(imported):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"the module of {code.key} has no such function",
            received=path,
            allowed=", ".join(functions) or "the module has no functions",
            fix=did_you_mean(function, functions)
            or f"name a function of {', '.join(code.arguments)} and the keys of {code.params_key}",
        )
    return imported


def call_build(
    path: str,
    code: OwnCode,
    build: Callable[..., Any],
    inputs: Mapping[str, Any],
    params: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Any:
    """Calls the function that builds a network.

    Args:
        path: The function's name, as the config has it.
        code: What it is for.
        build: The function.
        inputs: Its inputs.
        params: Parameters of the config.
        given: Those that Sluice sets where the function has them.

    Raises:
        ConfigError: It takes other parameters, or fails.
    """
    parameters = read_parameters(path, code, build, params)
    given = {key: value for key, value in given.items() if key in parameters}
    fault = Fault(
        f"{code.what} {path} cannot be built", fix=f"correct the {code.what}, or {code.params_key}"
    )
    return call_reported(fault, build, inputs, **params, **given)


def call_reported(
    fault: Fault, function: Callable[..., Any], /, *values: Any, **params: Any
) -> Any:
    """Calls a function of one's own, which may import modules as it runs.

    Raises:
        ConfigError: It fails; says the fault, with the line of the function's own code.
    """
    try:
        with _finding_modules():
            return function(*values, **params)
    except SluiceError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            fault.problem,
            received=f"{type(error).__name__}{_find_line(error)}: {_find_reason(str(error))}",
            allowed=fault.allowed,
            fix=fault.fix,
        ) from error


@contextmanager
def own_errors() -> Iterator[None]:
    """Tells what code of one's own has raised in a training that has begun.

    Raises:
        OwnCodeError: Such code failed, as the block was traced or ran.
    """
    try:
        yield
    except ConfigError as error:
        raise _name_own(error) from error
    except SluiceError:
        raise
    except Exception as error:
        found = explain_error(error)
        if found is None:
            raise
        raise found from error


def explain_error(error: Exception) -> SluiceError | None:
    """Returns what an unexpected error says of code of one's own; None: it is not that code's."""
    if isinstance(error.__context__, Exception) and hasattr(error, "ag_error_metadata"):
        error = error.__context__  # AutoGraph has put one of its own in its place.
    if isinstance(error, SluiceError):
        return _name_own(error) if isinstance(error, ConfigError) else error
    text = str(error)
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    frames += _FRAME.findall(text)
    # An installed Sluice lies among the libraries.
    users = [
        frame
        for frame in frames
        if frame[0].startswith(_SLUICE)
        or not (frame[0].startswith("<") or frame[0].startswith(_LIBRARIES))
    ]
    is_own = bool(users) and not users[-1][0].startswith(_SLUICE)
    if not is_own and OWN_FAULT not in text:
        return None
    where = " in {}:{}".format(*users[-1]) if is_own else ""
    return OwnCodeError(
        "code of one's own fails",
        received=f"{type(error).__name__}{where}: {_find_reason(text)}",
        fix="correct the function; a run that has a checkpoint goes on with --resume",
    )


def _name_own(error: ConfigError) -> OwnCodeError:
    return OwnCodeError(error.what, received=error.received, allowed=error.allowed, fix=error.fix)


def _find_reason(text: str) -> str:
    """Returns what an error's text says: without tracebacks of TensorFlow, arguments of Keras."""
    text = _COLOUR.sub("", text.partition("Arguments received by")[0])
    lines = [line for line in text.splitlines() if line.strip()]
    if _FRAME.search(text):
        # The last line beside those of the tracebacks, which are indented.
        plain = [line for line in lines if not line[0].isspace() and not _FRAME.search(line)]
        lines = plain[-1:]
    return " ".join(line.strip() for line in lines)


def read_parameters(
    path: str, code: OwnCode, function: Callable[..., Any], params: Mapping[str, Any]
) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function: it takes those of a config, and needs no others.

    Args:
        path: The function's name, as the config has it.
        code: What it is for.
        function: The function.
        params: Parameters of the config.

    Raises:
        ConfigError: It takes others, or tells none, as compiled functions may not.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the {code.what} of {code.key} does not tell its parameters",
            received=f"{path}: {error}",
            allowed=f"a Python function of {', '.join(code.arguments)}",
            fix="name a Python function that calls it",
        ) from error
    _check_params(path, code, parameters, params)
    return parameters


def _check_params(
    path: str,
    code: OwnCode,
    parameters: Mapping[str, inspect.Parameter],
    params: Mapping[str, Any],
) -> None:
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names = [key for key in list(parameters)[len(code.arguments) :] if key not in code.given]
    for key in params:
        if key not in names:
            raise ConfigError(
                f"{code.what} {path} takes no such parameter",
                received=f"{code.params_key}.{key}",
                allowed=", ".join(names) or "none",
                fix=did_you_mean(key, names),
            )
    missing = [key for key in names if _is_needed(parameters[key]) and key not in params]
    if missing:
        raise ConfigError(
            f"{code.what} {path} needs a parameter that has no default",
            received=f"{code.params_key} without {', '.join(missing)}",
            fix=f"set {code.params_key}.{missing[0]}",
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


def _find_line(error: BaseException) -> str:
    """Returns the innermost line of one's own code in a traceback, as ` in FILE:LINE`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if f.filename[0] != "<"]
    own = [f for f in frames if not f.filename.startswith((*_LIBRARIES, *_SLUICE))]
    installed = [frame for frame in frames if "-packages" in frame.filename]
    return "".join(f" in {f.filename}:{f.lineno}" for f in own[-1:] or installed[:1])
