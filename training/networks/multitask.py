"""Networks with an output for each of several tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import keras

from training.networks.factorization import HIDDEN_UNITS, flatten_inputs
from training.networks.network import NetworkInputs
from training.networks.tower import build_mlp, build_output

TASK_UNITS = (64,)


def build_shared_bottom(
    inputs: NetworkInputs,
    *,
    tasks: Sequence[str],
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    task_units: Sequence[int] = TASK_UNITS,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> dict[str, keras.KerasTensor]:
    """Builds an MLP that all tasks share, and a smaller one for each (Caruana 1997).

    Args:
        inputs: Vectors and numbers.
        tasks: Names of the tasks; Sluice sets them.
        hidden_units: Lengths of the shared hidden layers.
        task_units: Lengths of the hidden layers of each task.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]` of each task.
    """
    base = base_scores or {}
    build = partial(
        build_mlp,
        activation=activation,
        dropout=dropout,
        batch_normalization=batch_normalization,
    )
    shared = build(flatten_inputs(inputs), hidden_units)
    return {task: build_output(build(shared, task_units), base.get(task, 0.0)) for task in tasks}


def build_mmoe(
    inputs: NetworkInputs,
    *,
    tasks: Sequence[str],
    experts: int = 4,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    task_units: Sequence[int] = TASK_UNITS,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> dict[str, keras.KerasTensor]:
    """Builds a multi-gate mixture of experts (Ma et al. 2018, equations 6 and 7).

    Each task mixes the experts' outputs by a softmax over a linear map of the inputs.

    Args:
        inputs: Vectors and numbers.
        tasks: Names of the tasks; Sluice sets them.
        experts: MLPs that the tasks mix.
        hidden_units: Lengths of the hidden layers of each expert.
        task_units: Lengths of the hidden layers of each task.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]` of each task.
    """
    base = base_scores or {}
    build = partial(
        build_mlp,
        activation=activation,
        dropout=dropout,
        batch_normalization=batch_normalization,
    )
    row = flatten_inputs(inputs)
    outputs = keras.ops.stack([build(row, hidden_units) for _ in range(experts)], axis=1)
    logits = {}
    for task in tasks:
        gate = keras.layers.Dense(experts, activation="softmax", use_bias=False)(row)
        mixed = keras.ops.einsum("be,bew->bw", gate, outputs)
        logits[task] = build_output(build(mixed, task_units), base.get(task, 0.0))
    return logits
