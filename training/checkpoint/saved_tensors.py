"""Training state as named tensors: what a checkpoint holds.

Names are paths in the graph of trackable objects, such as `model/user_tower/mlp/kernel`: a
variable that several objects hold is saved once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from conf.errors import InputDataError
from training.checkpoint.checkpoint_files import CheckpointLayout, CheckpointTensors
from training.distribution.workers import Workers, describe_error
from training.embedding.dynamic_table import GrowingRows, ShardedRows, TableRows, find_step_variable
from training.embedding.key_space import SAVED_KEYS
from training.models.model import Model

MODEL = "model"
OPTIMIZERS = "optimizers"
# Where Keras' optimizers hold every variable once more; slots are named by their own lists.
_LISTS_OF_ALL = {"_variables", "_trainable_variables"}


@runtime_checkable
class Saveable(Protocol):
    """State that grows, as the keys of a dynamic table; variables below it are not looked at.

    Its tensors are copies, which later updates do not change.
    """

    def state_tensors(self) -> Mapping[str, tf.Tensor]: ...

    def restore_tensors(self, tensors: Mapping[str, np.ndarray]) -> None: ...

    def find_problems(self, shapes: Mapping[str, list[int]]) -> list[str]: ...


@dataclass(frozen=True)
class TrainingState:
    """The state that is saved, by name; a matrix that grows is as long as its table has rows."""

    variables: dict[str, TableRows]
    saveables: dict[str, Saveable]

    @property
    def sharded(self) -> dict[str, ShardedRows]:
        return {n: v for n, v in self.variables.items() if isinstance(v, ShardedRows)}

    def name_of(self, variable: TableRows) -> str:
        return next(name for name, other in self.variables.items() if other is variable)

    def name_of_keys(self, rows: TableRows) -> str | None:
        """Returns the name that the keys of a matrix that grows are saved under, else None."""
        if not isinstance(rows, GrowingRows):
            return None
        label = next(name for name, other in self.saveables.items() if other is rows.keys)
        return f"{label}/{SAVED_KEYS}"


def collect_state(**roots: Any) -> TrainingState:
    """Finds every variable and every `Saveable` that trackable objects hold.

    What several of them hold is named after the first: the model comes before its optimizers.
    """
    state, seen = TrainingState({}, {}), set[int]()
    for root in roots.items():
        _collect(root, state, seen)
    return state


def _collect(root: tuple[str, Any], state: TrainingState, seen: set[int]) -> None:
    """Breadth first, so that the shortest path names what is held twice."""
    queue = deque([root])
    while queue:
        name, node = queue.popleft()
        # Keras wraps its variables; the model may hold the inner one.
        node = node.value if isinstance(node, keras.Variable) else node
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, (tf.Variable, GrowingRows)):
            state.variables[name] = node
            seen.add(id(find_step_variable(node)))
        elif isinstance(node, Saveable):
            state.saveables[name] = node
        else:
            children = tf.train.TrackableView(node).children(node)
            ordered = sorted(children, key=lambda key: (key in _LISTS_OF_ALL, key))
            queue.extend((f"{name}/{key}", children[key]) for key in ordered)


def copy_state(state: TrainingState) -> dict[str, tf.Tensor]:
    """Returns the state as tensors in host memory that later steps do not change."""
    tensors = copy_variables(state.variables)
    with tf.device("CPU:0"):
        for name, saveable in state.saveables.items():
            for key, tensor in saveable.state_tensors().items():
                tensors[f"{name}/{key}"] = tf.identity(tensor)
    return tensors


def copy_variables(variables: Mapping[str, TableRows]) -> dict[str, tf.Tensor]:
    """Returns variables as tensors in host memory that later steps do not change."""
    with tf.device("CPU:0"):
        return {name: tf.identity(variable.read_value()) for name, variable in variables.items()}


def find_non_finite(tensors: Iterable[tuple[str, tf.Tensor]]) -> str | None:
    """Returns the name of the first tensor that holds a NaN or an infinity, or None."""
    for name, tensor in tensors:
        if tensor.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(tensor))):
            return name
    return None


def restore_state(state: TrainingState, prefix: Path) -> None:
    """Sets the state to what a checkpoint holds; what is more in it is left alone.

    One that lacks a variable, or does not fit the shape of one or the keys of a table, is refused
    before anything is set.
    """
    try:
        reader = CheckpointTensors(prefix)
        shapes = reader.get_variable_to_shape_map()
        for name, variable in state.variables.items():
            found = shapes[name] if name in shapes else reader.get_tensor(name)  # It raises.
            if isinstance(variable, tf.Variable):
                variable.shape.assert_is_compatible_with(found)
        for name, saveable in state.saveables.items():
            given = {n[len(name) + 1 :]: shapes[n] for n in shapes if n.startswith(f"{name}/")}
            if problems := saveable.find_problems(given):
                raise ValueError(f"{name}: {'; '.join(problems)}")
        for name, variable in state.variables.items():
            if isinstance(variable, ShardedRows):
                variable.assign_own(reader.read_rows(name, variable.owners))
            else:
                variable.assign(reader.get_tensor(name))
        for name, saveable in state.saveables.items():
            own = [full for full in shapes if full.startswith(f"{name}/")]
            saveable.restore_tensors({n[len(name) + 1 :]: reader.get_tensor(n) for n in own})
    except Exception as error:  # Damaged bytes end in whatever the code that trips raises.
        raise InputDataError(
            "cannot restore a checkpoint: it is damaged or belongs to another model",
            received=f"{prefix.parent}: {describe_error(error)}",
            fix="train again without --resume, or restore the files",
        ) from error


def share_state(state: TrainingState, workers: Workers) -> None:
    """Sets the state, but the rows that workers own, to what it is on the chief."""
    for saveable in state.saveables.values():
        tensors = workers.share_arrays(saveable.state_tensors)
        if not workers.is_chief:
            saveable.restore_tensors(tensors)
    common = [v for v in state.variables.values() if not isinstance(v, ShardedRows)]
    for variable in common:
        if isinstance(variable, GrowingRows) and not workers.is_chief:
            variable.assign(np.zeros(variable.shape, np.float32))  # As long as the chief's.
    workers.share_variables(common)


def describe_layout(state: TrainingState, model: Model) -> CheckpointLayout:
    """Returns which tensor holds which of a model's weights."""
    tables = {name: model.tables[name].rows for name in sorted(model.tables)}
    keys = {name: state.name_of_keys(rows) for name, rows in tables.items()}
    return CheckpointLayout(
        {name: state.name_of(rows) for name, rows in tables.items()},
        tuple(state.name_of(variable) for variable in model.dense_variables),
        {name: found for name, found in keys.items() if found is not None},
        tuple(name for name in tables if name not in model.trained_tables),
    )
