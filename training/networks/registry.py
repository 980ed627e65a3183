"""Networks of ranking models: the built-in ones by name, and one's own by its path."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from conf.errors import ConfigError, SluiceError, did_you_mean
from training.networks.cross import build_dcn
from training.networks.factorization import build_deepfm, build_fm, build_lr, build_wide_deep
from training.networks.network import NetworkInputs


@dataclass(frozen=True)
class NetworkKind:
    """A network and what it reads.

    Attributes:
        build: From `inputs: dict[str, keras.KerasTensor]` and parameters to the logits: one tensor
            `[batch, 1]`, or one for each task by name. Named `tasks`, a parameter is given the
            names of the tasks.
        has_biases: Whether it reads a weight of each id.
        has_vectors: Whether it reads a vector of each id.
    """

    build: Callable[..., Any]
    has_biases: bool = False
    has_vectors: bool = True


NETWORKS: dict[str, NetworkKind] = {
    "lr": NetworkKind(build_lr, has_biases=True, has_vectors=False),
    "fm": NetworkKind(build_fm, has_biases=True),
    "wide_deep": NetworkKind(build_wide_deep, has_biases=True),
    "deepfm": NetworkKind(build_deepfm, has_biases=True),
    "dcn": NetworkKind(build_dcn),
}


def find_network(name: str) -> NetworkKind:
    """Returns a built-in network, or the one at `package.module:function`.

    Raises:
        ConfigError: There is no such network, module or function, or importing it fails.
    """
    if ":" in name:
        return NetworkKind(_import_build(name))
    if name not in NETWORKS:
        raise ConfigError(
            "model.network is no built-in network",
            received=name,
            allowed=f"{', '.join(NETWORKS)}, or `package.module:function`",
            fix=did_you_mean(name, NETWORKS),
        )
    return NETWORKS[name]


def _import_build(path: str) -> Callable[..., Any]:
    module_name, _, function = path.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)  # As for `python -m`: one's own modules lie where one works.
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            "the module of model.network cannot be imported",
            received=f"{path}: {type(error).__name__}: {error}",
            allowed="a module in the current folder, on PYTHONPATH, or installed",
            fix="run the command in the folder of the module, or add that folder to PYTHONPATH",
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(
            "the module of model.network has no such function",
            received=path,
            allowed=", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)),
            fix="name a function of `inputs` and the keys of model.params",
        )
    return found


def build_logits(
    name: str,
    kind: NetworkKind,
    inputs: NetworkInputs,
    params: Mapping[str, Any],
    tasks: Sequence[str],
) -> dict[str, keras.KerasTensor]:
    """Builds a network and checks what comes out.

    Args:
        name: The network's name.
        kind: The network.
        inputs: Its inputs.
        params: Its parameters.
        tasks: Names of the tasks.

    Returns:
        The logits of each task, `[batch, 1]`.

    Raises:
        ConfigError: It takes other parameters, fails, or returns something else than logits.
    """
    parameters = inspect.signature(kind.build).parameters
    _check_params(name, parameters, params)
    given = {"tasks": tuple(tasks)} if "tasks" in parameters else {}
    try:
        outputs = kind.build(inputs, **params, **given)
    except SluiceError:
        raise
    except Exception as error:
        raise ConfigError(
            f"network {name} cannot be built",
            received=f"{type(error).__name__} in {_find_line(error)}: {error}",
            fix="correct the network, or model.params",
        ) from error
    return _check_outputs(name, outputs, tasks)


def _check_params(
    name: str, parameters: Mapping[str, inspect.Parameter], params: Mapping[str, Any]
) -> None:
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [key for key in list(parameters)[1:] if key != "tasks"]
    for key in params:
        if key not in known:
            raise ConfigError(
                f"network {name} takes no such parameter",
                received=f"model.params.{key}",
                allowed=", ".join(known) or "none",
                fix=did_you_mean(key, known),
            )


def _find_line(error: Exception) -> str:
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the network"


def _check_outputs(name: str, outputs: Any, tasks: Sequence[str]) -> dict[str, keras.KerasTensor]:
    if not isinstance(outputs, Mapping):
        outputs = {tasks[0]: outputs} if len(tasks) == 1 else {"one output": outputs}
    if set(outputs) != set(tasks):
        raise ConfigError(
            f"network {name} does not return one output for each task",
            received=", ".join(map(str, outputs)),
            allowed=", ".join(tasks),
            fix="return a dict from the name of each task to its logits; a parameter `tasks` of "
            "the function is given the names",
        )
    for task in tasks:
        shape = getattr(outputs[task], "shape", None)
        if not isinstance(outputs[task], keras.KerasTensor) or shape not in ((None, 1), (None,)):
            raise ConfigError(
                f"network {name} returns something else than logits of task {task}",
                received=f"{type(outputs[task]).__name__} of shape {shape}",
                allowed="a Keras tensor of shape (None, 1): one number for each row of the batch",
                fix="end the network with keras.layers.Dense(1)",
            )
    return {task: _as_column(outputs[task]) for task in tasks}


def _as_column(logits: keras.KerasTensor) -> keras.KerasTensor:
    return logits if len(logits.shape) == 2 else keras.ops.expand_dims(logits, 1)
