"""Trials of code of one's own on the first rows of train, before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.models import ModelConfig, RankingConfig
from training.input.batches import Batch, build_eval_dataset, read_batches
from training.models.dssm import DSSM
from training.models.embedded_inputs import EmbeddedInputs, vector_errors
from training.models.model import Model, find_feature
from training.models.ranking import RankingModel
from training.networks.network import Network
from training.networks.own_code import Fault, call_reported
from training.objectives.own_loss import OwnLoss

TRIED_ROWS = 16
_TRIED_SCALE = 3.0


def check_loss(
    loss: OwnLoss,
    version_dir: ReadablePath,
    manifest: Manifest,
    *,
    label: str | None = None,
    compared: int = 0,
) -> None:
    """Tries a loss on the first rows of train, with scores that are drawn.

    Args:
        loss: The loss.
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        label: Label that it learns; None: it compares items.
        compared: How many other items a row's is compared with; one row has none that counts.

    Raises:
        ConfigError: It fails, or gives something else than a finite number for each row that the
            scores can be moved by.
        InputDataError: A record is damaged.
    """
    names = list(loss.inputs) if label is None else [label, *loss.inputs]
    for name in names:
        find_feature(manifest, name)
    batch, rows = read_tried_rows(version_dir, manifest, names or [manifest.require_key("item")])
    rng = np.random.default_rng(0)
    scores = tf.constant(_TRIED_SCALE * rng.standard_normal(rows), tf.float32)
    others: list[tf.Tensor] = []
    if label is None:
        drawn = _TRIED_SCALE * rng.standard_normal([rows, compared])
        counted = np.repeat(np.arange(rows)[:, np.newaxis] > 0, compared, axis=1)
        others = [tf.constant(drawn, tf.float32), tf.constant(counted)]

    @tf.function(autograph=False)
    def differentiate() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch([scores, *others[:1]])
            values = (scores, *others) if label is None else (batch[label], scores)
            losses = loss(*values, batch=batch)
        gradients = tape.gradient(losses, [scores, *others[:1]])
        return losses, [g for g in gradients if g is not None]

    fault = Fault(
        f"loss {loss.path} fails on the first {rows} rows of train",
        allowed=f"TensorFlow's functions of {', '.join(loss.code.arguments)}",
        fix=f"correct the function, or {loss.code.params_key}",
    )
    losses, gradients = call_reported(fault, differentiate)
    always = "whatever the label and the score; of items also where no other item counts"
    _check_finite(f"loss {loss.path}", {"values": [losses], "gradients": gradients}, rows, always)
    if not gradients:
        raise ConfigError(
            f"loss {loss.path} has no gradient: nothing would be learned",
            received="a loss that no score moves",
            fix="compute it of the scores, without steps such as tf.round or a comparison",
        )


@dataclass(frozen=True)
class _OwnNetwork:
    """A network of one's own: what it is, what it is of, and where its inputs come from."""

    name: str
    network: Network
    embedded: EmbeddedInputs


def check_networks(
    config: ModelConfig, model: Model, version_dir: ReadablePath, manifest: Manifest
) -> None:
    """Tries a model's networks and towers of one's own on the first rows of train.

    The lists of one row are emptied, as those of a new user are.

    Args:
        config: The model's config.
        model: The model, with its first weights.
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.

    Raises:
        ConfigError: One fails, or gives something else than finite floats for each row that its
            inputs or weights can move.
        InputDataError: A record is damaged.
    """
    for own in _find_own_networks(config, model):
        batch, rows = read_tried_rows(version_dir, manifest, list(own.embedded.names))
        fault = Fault(
            f"{own.name} fails on the first {rows} rows of train",
            fix="correct the function, or its parameters",
        )
        with vector_errors():
            inputs = own.embedded(_empty_lists(batch, manifest))
        _check_outputs(own, rows, *call_reported(fault, _differentiate, own.network, inputs))


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


def _differentiate(
    network: Network, inputs: Mapping[str, tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Returns the outputs, and the gradients of their sum by inputs and weights."""
    model = network.keras_model
    known = {name: inputs[name] for name in network.input_names}
    # Tensors: gradients of a replica's variables are known inside its step alone.
    weights = [tf.convert_to_tensor(weight.value) for weight in model.trainable_variables]
    state = [tf.convert_to_tensor(weight.value) for weight in model.non_trainable_variables]
    moved = [*weights, *(tensor for tensor in known.values() if tensor.dtype.is_floating)]
    with tf.GradientTape() as tape:
        tape.watch(moved)
        found, _ = model.stateless_call(weights, state, known, training=False)
        outputs = tf.nest.flatten(found)
    return outputs, tape.gradient(outputs, moved)


def _check_outputs(
    own: _OwnNetwork,
    rows: int,
    outputs: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor | None],
) -> None:
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
    found = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    always = "also where a row's lists are empty"
    _check_finite(own.name, {"outputs": outputs, "gradients": found}, rows, always)
    if not any(bool(tf.reduce_any(gradient != 0.0)) for gradient in found):
        raise ConfigError(
            f"{own.name} has no gradient: nothing would be learned",
            received="outputs that neither an input nor a weight moves",
            fix="compute them without steps such as round, argmax or a comparison",
        )


def _check_finite(
    name: str, parts: Mapping[str, Sequence[tf.Tensor]], rows: int, always: str
) -> None:
    for what, tensors in parts.items():
        bad = sum(int(tf.reduce_sum(tf.cast(~tf.math.is_finite(t), tf.int32))) for t in tensors)
        if bad:
            raise ConfigError(
                f"{name} has {what} that are no numbers",
                received=f"{bad} that are NaN or infinite, on {rows} rows of train",
                allowed=f"finite numbers, {always}",
                fix="bound what goes into log, division and softmax (tf.math.divide_no_nan, -1e9 "
                "in the place of minus infinity)",
            )


def read_tried_rows(
    version_dir: ReadablePath, manifest: Manifest, names: list[str]
) -> tuple[Batch, int]:
    """Returns features of the first rows of train as a step has them, and how many rows."""
    dataset = build_eval_dataset(version_dir, manifest, "train", TRIED_ROWS, names)
    found = next(iter(read_batches(dataset, version_dir, manifest, "train")))
    # Training pads lists without a bound too.
    batch = {
        name: value.to_tensor(_find_pad(manifest, name, value.dtype))
        if isinstance(value, tf.RaggedTensor)
        else value
        for name, value in found.items()
    }
    return batch, int(next(iter(batch.values())).shape[0])


def _empty_lists(batch: Batch, manifest: Manifest) -> Batch:
    """Returns rows whose first one has nothing in its lists."""
    emptied = {}
    for name, values in batch.items():
        emptied[name] = values
        if manifest.schema[name].is_list:
            pads = tf.fill(tf.shape(values[:1]), _find_pad(manifest, name, values.dtype))
            emptied[name] = tf.concat([pads, values[1:]], axis=0)
    return emptied


def _find_pad(manifest: Manifest, name: str, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(manifest.schema[name].pad_value or 0, dtype)
