"""The trial of networks and towers of one's own on the first rows of train.

They are tried before training starts, in training and in inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.training.models import ModelConfig, RankingConfig
from training.input.batches import Batch
from training.models.embedded_inputs import EmbeddedInputs, vector_errors
from training.models.model import Model
from training.models.ranking import RankingModel
from training.models.two_towers import DSSM
from training.networks.network import Network
from training.networks.own_code import Fault, call_reported
from training.networks.probabilities import draw_inputs
from training.objectives.tried_rows import check_finite, empty_lists, read_tried_rows
from training.objectives.user_items import TrainRows

_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
# Part of the largest output by which those of a row may differ beside other rows.
_ROUNDING = {tf.float64: 1e-3, tf.float32: 1e-3}
_HALF_ROUNDING = 5e-2
_ALWAYS = "also where a row's lists are empty"

_Inputs = Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class _OwnNetwork:
    """A network of one's own: what it is, what it is of, and where its inputs come from."""

    name: str
    network: Network
    embedded: EmbeddedInputs


def check_networks(config: ModelConfig, model: Model, train: TrainRows) -> None:
    """Tries a model's networks and towers of one's own on the first rows of train.

    The lists of one row are emptied, as those of a new user are.

    Args:
        config: The model's config.
        model: The model, with its first weights.
        train: The rows that are trained on.

    Raises:
        ConfigError: One fails; gives something else than finite floats for each row, by that row
            alone, that its inputs or weights can move; or holds what no export can hold.
        InputDataError: A record is damaged, or a feature holds NaN.
    """
    for own in _find_own_networks(config, model):
        batch, rows = read_tried_rows(train, own.embedded.names)
        _refuse_metrics(own)
        fault = Fault(
            f"{own.name} fails on the first {rows} rows of train",
            fix="correct the function, or its parameters",
        )
        with vector_errors():
            inputs = own.embedded(empty_lists(batch, train.manifest))
        known = {name: inputs[name] for name in own.network.input_names}
        trained, gradients = call_reported(fault, _differentiate, own.network, known)
        for outputs in (trained, call_reported(fault, _infer, own.network, known)):
            _check_outputs(own, outputs, batch, rows)
        _check_gradients(own, gradients, batch, rows)
        _check_graph(own, fault, known)
        # The last ones: what is drawn by a row's place is other numbers there.
        half = {name: tensor[rows // 2 :] for name, tensor in known.items()}
        if rows > 1:
            _check_rows(own, outputs, call_reported(fault, _infer, own.network, half))


def _find_own_networks(config: ModelConfig, model: Model) -> Iterator[_OwnNetwork]:
    if isinstance(config, RankingConfig) and isinstance(model, RankingModel):
        if ":" in config.network:
            [embedded] = model.embedded_inputs
            yield _OwnNetwork(f"network {config.network}", model.network, embedded)
    elif isinstance(model, DSSM):
        towers = {"user": model.user_tower, "item": model.item_tower}
        for (side, tower), embedded in zip(towers.items(), model.embedded_inputs, strict=True):
            own = getattr(config, f"{side}_tower", None)
            if own is not None and tower is not None:
                yield _OwnNetwork(f"{side} tower {own.function}", tower, embedded)


def _refuse_metrics(own: _OwnNetwork) -> None:
    metrics = own.network.keras_model.metrics
    if metrics:
        raise ConfigError(
            f"{own.name} has Keras metrics in its layers: no step shows or resets them",
            received=", ".join(metric.name for metric in metrics),
            fix="leave them out, or name metrics under evaluation.metrics",
        )


def _infer(network: Network, inputs: _Inputs) -> list[tf.Tensor]:
    with keras.StatelessScope():
        found: list[tf.Tensor] = tf.nest.flatten(network.keras_model(dict(inputs), training=False))
    return found


def _differentiate(
    network: Network, inputs: _Inputs
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Returns the outputs in training, and the gradients of a sum of them by weights and inputs.

    Each number has a weight of its own in the sum: that of a softmax is 1 whatever goes into it.
    """
    model, rng = network.keras_model, np.random.default_rng(1)
    # Tensors: gradients of a replica's variables are known inside its step alone.
    weights = [tf.convert_to_tensor(weight.value) for weight in model.trainable_variables]
    state = [tf.convert_to_tensor(weight.value) for weight in model.non_trainable_variables]
    moved = [*weights, *(tensor for tensor in inputs.values() if tensor.dtype.is_floating)]
    with tf.GradientTape() as tape:
        tape.watch(moved)
        found, _ = model.stateless_call(weights, state, dict(inputs), training=True)
        outputs = tf.nest.flatten(found)
        sums = [
            tf.reduce_sum(tf.cast(rng.standard_normal(output.shape), output.dtype) * output)
            for output in outputs
        ]
    return outputs, tape.gradient(sums, moved)


def _check_outputs(own: _OwnNetwork, outputs: Sequence[tf.Tensor], batch: Batch, rows: int) -> None:
    for output in outputs:
        if output.shape[0] != rows:
            raise ConfigError(
                f"{own.name} does not give one output for each row",
                received=f"{output.shape[0]} of {rows} rows",
                fix="keep the first axis of the inputs, the batch, as it is",
            )
        if not output.dtype.is_floating:
            raise ConfigError(
                f"{own.name} gives something else than floating-point numbers",
                received=output.dtype.name,
                allowed="float32, or what the layers compute in (compute.mixed_precision)",
                fix="end it with a layer such as keras.layers.Dense, without a cast to integers",
            )
    check_finite(own.name, {"outputs": outputs}, batch, rows, _ALWAYS)


def _check_gradients(
    own: _OwnNetwork, gradients: Sequence[tf.Tensor | None], batch: Batch, rows: int
) -> None:
    found = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    check_finite(own.name, {"gradients": found}, batch, rows, _ALWAYS)
    if found and (_is_any(found) or _moves_drawn(own.network)):
        return
    raise ConfigError(
        f"{own.name} has no gradient: nothing would be learned",
        received="outputs that neither an input nor a weight moves",
        fix="compute them without steps such as round, argmax or a comparison",
    )


def _is_any(gradients: Sequence[tf.Tensor]) -> bool:
    return any(bool(tf.reduce_any(gradient != 0.0)) for gradient in gradients)


def _moves_drawn(network: Network) -> bool:
    """Whether inputs that are drawn move it: rows may all have empty lists, of which zeros come."""
    drawn = draw_inputs(network, np.random.default_rng(0), 1.0)
    try:
        _, gradients = _differentiate(network, drawn)
    except Exception:  # It may refuse numbers that no row has.
        return True
    return _is_any([tf.convert_to_tensor(g) for g in gradients if g is not None])


def _check_graph(own: _OwnNetwork, fault: Fault, inputs: _Inputs) -> None:
    """Refuses what neither a checkpoint nor an export holds."""
    specs = {name: tf.TensorSpec([None, *t.shape[1:]], t.dtype) for name, t in inputs.items()}
    infer = tf.function(lambda given: _infer(own.network, given), autograph=False)
    graph = call_reported(fault, infer.get_concrete_function, specs).graph
    strategy, known = tf.distribute.get_strategy(), set()
    for variable in own.network.keras_model.variables:
        known |= {id(v) for v in strategy.experimental_local_results(variable.value)}
        known.add(id(variable.value))
    strays = [variable for variable in graph.variables if id(variable) not in known]
    if strays:
        raise ConfigError(
            f"{own.name} has variables that Keras does not know: nothing would train or save them",
            received=", ".join(f"{v.name} of shape {tuple(v.shape)}" for v in strays),
            allowed="weights of layers",
            fix="make them by self.add_weight(...) in the layer's `build`",
        )
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    if any(node.op in _PYTHON_OPERATIONS for node in nodes):
        raise ConfigError(
            f"{own.name} calls Python in each step, which no exported model can hold",
            received="tf.numpy_function or tf.py_function",
            fix="compute it by keras.ops or TensorFlow's operations",
        )


def _check_rows(
    own: _OwnNetwork, outputs: Sequence[tf.Tensor], of_half: Sequence[tf.Tensor]
) -> None:
    """Refuses outputs of a row that other rows of the batch change: a server has others."""
    for whole, half in zip(outputs, of_half, strict=True):
        both = (np.asarray(tf.cast(t, tf.float64)) for t in (whole[-half.shape[0] :], half))
        expected, found = both
        most = np.abs(expected).max() * _ROUNDING.get(whole.dtype, _HALF_ROUNDING)
        if np.abs(expected - found).max() > most:
            raise ConfigError(
                f"{own.name} gives a row other numbers beside other rows of the batch, or in "
                "another call",
                received=f"numbers that differ by up to {np.abs(expected - found).max():.3g}",
                fix="compute each row's output of that row alone: no sum, softmax or flip over "
                "the first axis, nothing that is drawn anew outside of training",
            )
