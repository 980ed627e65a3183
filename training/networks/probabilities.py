"""Networks of one's own that end in a sigmoid, where the loss has one already.

A sigmoid of a sigmoid lies between 0.5 and 0.73: it trains without an error, and its probabilities
are wrong. Keras' graph shows most of these networks; what a `Lambda` or a mean of probabilities
hides is noticed by what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from training.networks.network import Network

_SQUASHING = ("sigmoid", "softmax", "hard_sigmoid")
_OPERATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "HardSigmoid": "hard_sigmoid"}
"""Names of the activations by the class of Keras' layer or operation."""
_SAME_VALUES = (
    "Cast", "Clip", "Dropout", "ExpandDims", "Flatten", "GetItem", "Identity", "Reshape", "Squeeze",
)  # fmt: skip
"""Classes of layers and operations that let values through."""
PROBED_ROWS = 64
PROBED_SCALES = (1.0, 30.0)


def find_squashing(output: keras.KerasTensor) -> str | None:
    """Returns the activation that makes an output a probability, as far as the graph tells.

    Args:
        output: Output of a functional network.

    Returns:
        `sigmoid`, `softmax` or `hard_sigmoid`; None: the output comes of something else.
    """
    tensor = output
    while True:
        history = tensor._keras_history  # Public for as long as Keras has functional models.
        operation = history.operation
        name, activation = type(operation).__name__, _read_activation(operation)
        if activation in _SQUASHING:
            return activation
        if isinstance(operation, keras.Sequential):
            # Its own output names the model itself as where it comes from.
            return _find_in_layers(operation.layers)
        if isinstance(operation, keras.Model) and not isinstance(operation.output, (dict, list)):
            if operation.output._keras_history.operation is operation:
                return None
            tensor = operation.output
            continue
        inputs = operation._inbound_nodes[history.node_index].input_tensors
        is_plain = name in _SAME_VALUES or (name == "Activation" and activation == "linear")
        if not is_plain or len(inputs) != 1:
            return None
        tensor = inputs[0]


def _read_activation(operation: keras.Operation) -> str:
    """Returns what an operation ends in; `linear`: nothing."""
    own = getattr(getattr(operation, "activation", None), "__name__", "linear")
    return _OPERATIONS.get(type(operation).__name__, str(own))


def _find_in_layers(layers: Sequence[keras.Layer]) -> str | None:
    """Returns the activation that a chain of layers ends in, if it makes a probability."""
    for layer in reversed(layers):
        activation = _read_activation(layer)
        if activation in _SQUASHING:
            return activation
        if type(layer).__name__ not in _SAME_VALUES:
            return None
    return None


def refuse_probabilities(name: str, network: Network, tasks: Sequence[str]) -> None:
    """Refuses a network whose outputs are probabilities already.

    Args:
        name: Name of the network in the config.
        network: The network, from inputs to one output for each task.
        tasks: Names of the tasks whose loss applies the sigmoid.

    Raises:
        ConfigError: An output ends in a sigmoid or a softmax.
    """
    for task in tasks:
        squashing = find_squashing(network.keras_model.output[task])
        if squashing is not None:
            raise ConfigError(
                f"network {name} returns probabilities of task {task}, and Sluice applies the "
                "sigmoid itself",
                received=f"an output that ends in {squashing}",
                allowed="logits: any number, log-odds of label 1",
                fix="return what goes into it: end the network with keras.layers.Dense(1)",
            )


def find_bounded(network: Network, tasks: Sequence[str]) -> list[str]:
    """Returns the tasks whose outputs stay in [0, 1] for inputs of any size, and vary there.

    Arguments as for `refuse_probabilities`. A network that refuses inputs of any size has none.
    """
    rng = np.random.default_rng(0)
    scores: dict[str, list[np.ndarray]] = {task: [] for task in tasks}
    for scale in PROBED_SCALES:
        try:
            outputs = network(draw_inputs(network, rng, scale))
        except Exception:  # Numbers that no row has.
            return []
        for task in tasks:
            scores[task].append(np.asarray(outputs[task]))
    values = {task: np.concatenate(parts) for task, parts in scores.items()}
    return [
        task
        for task, own in values.items()
        if own.min() >= 0.0 and own.max() <= 1.0 and own.max() - own.min() > 1e-6
    ]


def draw_inputs(network: Network, rng: np.random.Generator, scale: float) -> dict[str, tf.Tensor]:
    """Draws inputs of a network, `PROBED_ROWS` rows of normal numbers of a scale."""
    inputs = {}
    for name, tensor in network.keras_model.input.items():
        shape = [PROBED_ROWS, *(4 if size is None else size for size in tensor.shape[1:])]
        if tensor.dtype == "bool":
            drawn = rng.random(shape) < 0.7
            drawn[..., 0] = True
            inputs[name] = tf.constant(drawn)
        else:
            inputs[name] = tf.constant(scale * rng.standard_normal(shape), tensor.dtype)
    return inputs
