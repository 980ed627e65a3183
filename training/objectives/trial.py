"""The trial of user code: a step's loss and gradients of one batch of train, nothing applied.

What raises is told with its file and line; `refuse_silent` refuses networks that raise nothing and
are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.schema import OOV_ID
from conf.training.input import InputConfig
from conf.training.models import ModelConfig, RankingConfig
from training.embedding.dynamic_table import DynamicTable
from training.input.batches import Batch, read_split
from training.models.embedded_inputs import EmbeddedInputs, vector_errors
from training.models.model import Model
from training.models.ranking import RankingModel
from training.networks.network import Network, StepContext
from training.networks.user_code import user_errors
from training.objectives.user_items import TrainRows

_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_SAME_VALUES = {"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice"}
# Part of the largest output by which those of a row may differ beside other rows.
_ROUNDING, _HALF_ROUNDING = 1e-3, 5e-2


@dataclass(frozen=True)
class UserNetwork:
    """A network or tower of the user, where its inputs come from, and its outputs of log-odds."""

    name: str
    network: Network
    embedded: EmbeddedInputs
    binary: tuple[str, ...] = ()


def try_user_code(
    config: ModelConfig,
    model: Model,
    objective: Callable[..., tf.Tensor],
    state: Sequence[tf.Variable],
    train: TrainRows,
) -> None:
    """Tries networks, towers and losses of the user on a batch of train; there may be none.

    `state` is what passes of the model and the objective set; it stays as it is.
    """
    networks = list(_find_networks(config, model))
    if not networks and not _names_loss(config):
        return
    features: Any = (*model.inputs, *getattr(objective, "inputs", ()))
    batch = read_first_batch(train, tuple(dict.fromkeys(features)))
    with user_errors("user code fails on the first rows of train"), vector_errors():
        moved = _try_step(model, objective, state, batch)
    trained = {one.name: {id(v) for v in one.network.trained_variables} for one in networks}
    still = [name for name, weights in trained.items() if weights and not weights & moved]
    if not moved or still:
        raise ConfigError(
            f"{', '.join(still) or 'the loss'} has no gradient: nothing would be learned",
            fix="compute it of the scores, without steps such as round, argmax or a comparison",
        )
    for one in networks:
        with user_errors(f"{one.name} fails on the first rows of train"), vector_errors():
            refuse_silent(one, batch)


def _find_networks(config: ModelConfig, model: Model) -> Iterator[UserNetwork]:
    if isinstance(config, RankingConfig) and isinstance(model, RankingModel):
        if ":" in config.network:
            binary = tuple(task.name for task in model.tasks if task.is_binary)
            [embedded], [network] = model.embedded_inputs, model.networks
            yield UserNetwork(f"network {config.network}", network, embedded, binary)
        return
    for side, embedded in zip(("user", "item"), model.embedded_inputs, strict=False):
        own, tower = (getattr(part, f"{side}_tower", None) for part in (config, model))
        if own is not None and tower is not None:
            yield UserNetwork(f"{side} tower {own.function}", tower, embedded)


def _names_loss(config: ModelConfig) -> bool:
    tasks = config.tasks.values() if isinstance(config, RankingConfig) else ()
    objectives = (getattr(config, "objective", None), *(task.objective for task in tasks))
    return any(getattr(objective, "loss", None) is not None for objective in objectives)


def read_first_batch(train: TrainRows, names: Sequence[str]) -> Batch:
    """Returns features of as many rows of train as a step has, in the order of the records."""
    source = train.config or InputConfig()
    how = (train.version_dir, train.manifest, "train", train.batch_size, names, (), source.filter)
    found = next(read_split(*how, on_corrupt=source.on_corrupt))
    # Training pads lists without a bound too.
    return {
        name: value.to_tensor(tf.cast(train.manifest.schema[name].pad_value or 0, value.dtype))
        if isinstance(value, tf.RaggedTensor)
        else value
        for name, value in found.items()
    }


def _try_step(
    model: Model, objective: Callable[..., tf.Tensor], state: Sequence[tf.Variable], batch: Batch
) -> set[int]:
    """Computes what a step does up to its gradients; returns which variables have one, by `id`.

    Keys of dynamic tables are unknown ones: steps alone give them rows.
    """
    variables = [*model.table_variables, *model.dense_variables]
    keyed = {n for n, t in model.embedded_features.items() if isinstance(t, DynamicTable)}
    moved: set[int] = set()

    def differentiate(rows: Batch) -> list[tf.Tensor]:
        values = [variable.read_value() for variable in state]
        training = StepContext(tf.constant([0, 0]), state, values)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            losses = objective(model, rows, training)
        gradients = zip(variables, tape.gradient(losses, variables), strict=True)
        found = {id(variable): each for variable, each in gradients if each is not None}
        moved.update(found)
        return [tf.reduce_sum(getattr(each, "values", each)) for each in found.values()]

    rows = {n: tf.minimum(v, OOV_ID) if n in keyed else v for n, v in batch.items()}
    strategy = tf.distribute.get_strategy()
    tf.function(lambda rows: strategy.run(differentiate, (rows,)), autograph=False)(rows)
    return moved


def refuse_silent(user: UserNetwork, batch: Batch) -> None:
    """Refuses what raises nothing and is wrong."""
    embedded = user.embedded(batch)
    inputs = {name: embedded[name] for name in user.network.input_names}
    specs = {name: tf.TensorSpec([None, *t.shape[1:]], t.dtype) for name, t in inputs.items()}
    infer = tf.function(lambda given: user.network(given), autograph=False)
    graph = infer.get_concrete_function(specs).graph
    for task in user.binary:
        _refuse_probabilities(user.name, task, graph.structured_outputs[task])
    _refuse_strays(user, graph)
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    if any(node.op in _PYTHON_OPERATIONS for node in nodes):
        raise ConfigError(
            f"{user.name} calls Python in each step, which no exported model can hold",
            received="tf.numpy_function or tf.py_function",
            fix="compute it by keras.ops or TensorFlow's operations",
        )
    _refuse_mixed_rows(user, inputs)


def _refuse_probabilities(name: str, task: str, output: tf.Tensor) -> None:
    """Refuses outputs that end in a sigmoid: that of a sigmoid trains, and is wrong."""
    operation = output.op
    while operation.type in _SAME_VALUES:
        operation = operation.inputs[0].op
    if operation.type in ("Sigmoid", "Softmax"):
        raise ConfigError(
            f"{name} returns probabilities of task {task}, and Sluice applies the sigmoid itself",
            received=f"an output that ends in {operation.type.lower()}",
            fix="return logits, any number: end the network with keras.layers.Dense(1)",
        )


def _refuse_strays(user: UserNetwork, graph: Any) -> None:
    strategy, known = tf.distribute.get_strategy(), set()
    for variable in user.network.keras_model.variables:
        known |= {id(v) for v in strategy.experimental_local_results(variable.value)}
        known.add(id(variable.value))
    strays = [variable for variable in graph.variables if id(variable) not in known]
    if strays:
        raise ConfigError(
            f"{user.name} has variables that Keras does not know: nothing would train or save them",
            received=", ".join(f"{v.name} of shape {tuple(v.shape)}" for v in strays),
            fix="make them by self.add_weight(...) in the layer's `build`",
        )


def _refuse_mixed_rows(user: UserNetwork, inputs: Mapping[str, tf.Tensor]) -> None:
    rows = next(iter(inputs.values())).shape[0]
    # The last ones: what is drawn by a row's place is other numbers there.
    half = {name: tensor[rows // 2 :] for name, tensor in inputs.items()}
    outputs = (tf.nest.flatten(user.network(given)) for given in (inputs, half))
    is_half = any("float16" in one.compute_dtype for one in user.network.keras_model.layers)
    for whole, alone in zip(*outputs, strict=True):
        expected, found = (np.asarray(t, np.float64) for t in (whole[-alone.shape[0] :], alone))
        most = np.abs(expected).max() * (_HALF_ROUNDING if is_half else _ROUNDING)
        if np.abs(expected - found).max() > most:
            raise ConfigError(
                f"{user.name} gives a row other numbers beside other rows, as a server has them",
                received=f"numbers that differ by up to {np.abs(expected - found).max():.3g}",
                fix="compute each row's output of that row alone: no sum, softmax or flip over "
                "the first axis, nothing that is drawn anew outside of training",
            )
