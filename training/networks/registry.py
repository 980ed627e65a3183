"""Networks of ranking models: the built-in ones by name, and users' own by their path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from conf.errors import ConfigError, did_you_mean
from conf.manifest import DatasetKeys
from training.networks.factorization import (
    build_dcn,
    build_deepfm,
    build_final_net,
    build_fm,
    build_lr,
    build_mf,
    build_mmoe,
    build_shared_bottom,
    build_wide_deep,
)
from training.networks.network import NetworkInputs
from training.networks.target_attention import build_bst, build_din, list_names
from training.networks.tower import check_output
from training.networks.user_code import call_function, import_function, pick_parameters


@dataclass(frozen=True)
class NetworkKind:
    """A network and what it reads.

    `build` makes of `inputs: dict[str, keras.KerasTensor]` and parameters the logits: one tensor
    `[batch, 1]`, or one for each task by name. A parameter that is named `tasks` is given the names
    of the tasks, one named `base_scores` the score of a constant for each.
    """

    build: Callable[..., Any]
    has_biases: bool = False  # whether it reads a weight of each id
    has_vectors: bool = True  # and a vector
    key_params: Mapping[str, str] = field(default_factory=dict)  # defaults: keys of the dataset
    position_params: tuple[str, ...] = ()  # name lists whose positions it reads
    sums_fields: bool = False  # so each element of a list is one
    has_order: bool = True  # whether it reads the order of positions
    is_grouped: bool = False  # rows of like length are worth a computation of their own

    def complete_params(self, params: Mapping[str, Any], keys: DatasetKeys) -> dict[str, Any]:
        found = {param: getattr(keys, key) for param, key in self.key_params.items()}
        return {**{param: key for param, key in found.items() if key is not None}, **params}

    def find_position_lists(self, params: Mapping[str, Any]) -> list[str]:
        named = [params.get(param) or () for param in self.position_params]
        return [name for names in named for name in list_names(names)]


_OF_HISTORY = {"history": "history", "target": "item"}

NETWORKS: dict[str, NetworkKind] = {
    "lr": NetworkKind(build_lr, has_biases=True, has_vectors=False, has_order=False),
    "fm": NetworkKind(build_fm, has_biases=True, sums_fields=True, has_order=False),
    "wide_deep": NetworkKind(build_wide_deep, has_biases=True),
    "deepfm": NetworkKind(build_deepfm, has_biases=True, sums_fields=True),
    "dcn": NetworkKind(build_dcn),
    "final_net": NetworkKind(build_final_net),
    "din": NetworkKind(build_din, key_params=_OF_HISTORY, position_params=("history",)),
    "bst": NetworkKind(
        build_bst, key_params=_OF_HISTORY, position_params=("history", "gaps"), is_grouped=True
    ),
    "mf": NetworkKind(build_mf, has_biases=True, key_params={"user": "user", "item": "item"}),
    "shared_bottom": NetworkKind(build_shared_bottom),
    "mmoe": NetworkKind(build_mmoe),
}


def find_network(name: str) -> NetworkKind:
    if ":" in name:
        return NetworkKind(import_function("network", name))
    if name not in NETWORKS:
        raise ConfigError(
            "model.network is no built-in network",
            received=name,
            allowed=f"{', '.join(NETWORKS)}, or `package.module:function`",
            fix=did_you_mean(name, NETWORKS),
        )
    return NETWORKS[name]


def build_logits(
    name: str,
    kind: NetworkKind,
    inputs: NetworkInputs,
    params: Mapping[str, Any],
    base_scores: Mapping[str, float],
) -> dict[str, keras.KerasTensor]:
    """Builds a network and checks what comes out: the logits of each task, `[batch, 1]`."""
    tasks = tuple(base_scores)
    given = pick_parameters(kind.build, {"tasks": tasks, "base_scores": dict(base_scores)})
    fault = f"network {name} cannot be built"
    outputs = call_function(fault, kind.build, inputs, **params, **given)
    return _check_outputs(name, outputs, tasks)


def _check_outputs(name: str, outputs: Any, tasks: Sequence[str]) -> dict[str, keras.KerasTensor]:
    if not isinstance(outputs, Mapping):
        outputs = {tasks[0]: outputs} if len(tasks) == 1 else {"one output": outputs}
    if set(outputs) != set(tasks):
        raise ConfigError(
            f"network {name} does not return one output for each task",
            received=", ".join(map(str, outputs)),
            allowed=", ".join(tasks),
            fix="return a dict of logits by task (a parameter `tasks` of the function is given the "
            "names); or choose shared_bottom or mmoe for several tasks",
        )
    for task in tasks:
        check_output(f"network {name}, of task {task},", outputs[task], (None, 1), (None,))
    columns = {task: outputs[task] for task in tasks}
    return {n: v if len(v.shape) == 2 else keras.ops.expand_dims(v, 1) for n, v in columns.items()}
