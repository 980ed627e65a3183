"""Samplers of negatives, and the logQ correction of how often an item is among the candidates.

Draws are with replacement, and a pure function of the seed of a step (and of the counts so far):
equal on all replicas, and the same in a step that is repeated after a resume.

After the candidate samplers of TensorFlow and Mikolov et al. 2013, "Distributed representations of
words and phrases and their compositionality", section 2.2: items drawn by `count ** distortion`.

A softmax whose negatives are drawn in proportion to their popularity punishes popular items;
subtracting the log of an item's expected count from its logit undoes that (Yi et al. 2019,
"Sampling-bias-corrected neural modeling for large corpus item recommendations", section 3.2;
Bengio & Senecal 2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from conf.training.input import FilterConfig, InputConfig
from conf.training.objectives import NegativesConfig, SampledSoftmaxConfig
from training.networks.network import StepContext
from training.objectives.user_items import TrainRows

DISTORTIONS = {"uniform": 0.0, "frequency": 0.75, "adaptive": 1.0, "mixed": 0.0}
NEGATIVES_STREAM = 1


class Sampler(tf.Module):
    """Draws items among `drawable`, int64 `[items]`, ascending.

    In proportion to `weights`, float64 `[items]`; None: all alike. With a `distortion`, by that
    power of how often steps have met them so far, each once before: a step then takes time in
    proportion to the items, and the counts, whole numbers, are part of checkpoints.
    """

    def __init__(
        self,
        drawable: np.ndarray,
        vocabulary_size: int,
        weights: np.ndarray | None = None,
        distortion: float | None = None,
    ) -> None:
        super().__init__(name="sampler")
        self._ids = tf.constant(drawable, tf.int64)
        positions = np.full(vocabulary_size, -1, np.int64)
        positions[drawable] = np.arange(len(drawable))
        self._positions, self._distortion = tf.constant(positions), distortion
        self._weights = tf.constant(np.ones(len(drawable)) if weights is None else weights)
        self._sums = None if weights is None else tf.constant(np.cumsum(weights))
        self.state_variables: Sequence[tf.Variable] = []
        if distortion is not None:
            ones = tf.ones([len(drawable)], tf.float64)
            self.state_variables = [tf.Variable(ones, trainable=False, name="met_items")]

    def draw(self, shape: Sequence[int | tf.Tensor], training: StepContext) -> tf.Tensor:
        """Draws ids with replacement, int64 `shape`; the same for the same seed of the pass."""
        seed = training.seed + tf.constant([0, NEGATIVES_STREAM], training.seed.dtype)
        if self._sums is None and self._distortion is None:
            size = tf.size(self._ids, tf.int64)
            positions = tf.random.stateless_uniform(
                shape, seed, minval=0, maxval=size, dtype=tf.int64
            )
            return tf.gather(self._ids, positions)
        sums = tf.cumsum(self._read_weights(training)) if self._sums is None else self._sums
        numbers = tf.random.stateless_uniform(shape, seed, dtype=tf.float64) * sums[-1]
        positions = tf.searchsorted(sums, tf.reshape(numbers, [-1]), side="right")
        # A product that is rounded up may reach the last sum.
        positions = tf.reshape(tf.minimum(positions, tf.size(sums) - 1), shape)
        return tf.gather(self._ids, positions)

    def _read_weights(self, training: StepContext) -> tf.Tensor:
        if self._distortion is None:
            return self._weights
        return tf.pow(training.read(self.state_variables[0]), self._distortion)

    def shares(self, ids: tf.Tensor, training: StepContext) -> tf.Tensor:
        """Returns the probability that a draw gives an item, float32 `[n]` of int64 `[n]`.

        Of items that cannot be drawn it is that of the least likely one.
        """
        weights = self._read_weights(training)
        positions = tf.gather(self._positions, ids)
        found = tf.gather(weights, tf.maximum(positions, 0))
        found = tf.where(positions < 0, tf.reduce_min(weights), found)
        return tf.cast(found / tf.reduce_sum(weights), tf.float32)

    def learn(self, ids: tf.Tensor, training: StepContext) -> None:
        """Counts the items of the rows of all replicas, int64 of any shape, where that is asked."""
        positions = tf.reshape(tf.gather(self._positions, ids), [-1])
        for counts in self.state_variables:
            met = tf.math.unsorted_segment_sum(
                tf.cast(positions >= 0, tf.float64),
                tf.maximum(positions, 0),
                int(counts.shape[0]),
            )
            training.write(counts, training.read(counts) + met)


def build_sampler(
    config: NegativesConfig, drawable: np.ndarray, counts: np.ndarray | None, vocabulary_size: int
) -> Sampler:
    """Builds the sampler of a source that draws, by events of train, int64 `[vocabulary_size]`."""
    distortion = find_distortion(config)
    if config.source == "adaptive":
        return Sampler(drawable, vocabulary_size, distortion=distortion)
    if distortion == 0.0 or counts is None:
        return Sampler(drawable, vocabulary_size)
    weights = np.maximum(counts[drawable], 1).astype(np.float64) ** distortion
    return Sampler(drawable, vocabulary_size, weights)


def find_distortion(config: NegativesConfig) -> float:
    """Returns the exponent of counts that items are drawn by."""
    return DISTORTIONS[config.source] if config.distortion is None else config.distortion


class LogQCorrection:
    """What is subtracted from the logits of items: a strength times the log of expected counts.

    Candidates are the batch's items, expected by `count_in_batch`, and `drawn` ones of a sampler;
    None: there are no such.
    """

    def __init__(
        self, strength: float, batch_counts: np.ndarray | None, sampler: Sampler | None, drawn: int
    ) -> None:
        self._strength, self._sampler, self._drawn = strength, sampler, drawn
        self._batch_counts = None if batch_counts is None else tf.constant(batch_counts)

    def find(self, ids: tf.Tensor, training: StepContext) -> tf.Tensor:
        """Returns the correction of items, float32 `[n]` of int64 `[n]`."""
        expected = 0.0 if self._batch_counts is None else tf.gather(self._batch_counts, ids)
        if self._sampler is not None:
            expected += float(self._drawn) * self._sampler.shares(ids, training)
        return self._strength * tf.math.log(expected)


def build_logq_correction(
    config: SampledSoftmaxConfig, train: TrainRows, sampler: Sampler | None
) -> LogQCorrection | None:
    """Builds the correction that an objective asks for; None: it asks for none."""
    if not config.logq_correction:
        return None
    counts = None
    if config.negatives.has_batch:
        counts = count_in_batch(read_batch_counts(train), train.batch_size)
    drawn = config.negatives.count or 0
    return LogQCorrection(config.logq_correction, counts, sampler, drawn)


def count_in_batch(item_counts: np.ndarray, batch_size: int) -> np.ndarray:
    """How often each item is expected among a batch's rows: `batch_size` times its share of train.

    float32 `[vocabulary_size]` of the rows that train by item; one without a row counts as one.
    """
    counts = np.where(item_counts > 0, item_counts, 1).astype(np.float64)
    return (batch_size * counts / max(1.0, float(item_counts.sum()))).astype(np.float32)


def read_batch_counts(train: TrainRows) -> np.ndarray:
    """Reads how many rows of an epoch hold each item, as batches are made, `[vocabulary_size]`.

    Of all labels, as each row's item is a candidate. With `class_balance` and `mix` they are
    expected numbers, float64: each class and each dataset has its share of the rows.
    """
    config = train.config or InputConfig()
    counts = train.count_items("rows")
    if config.class_balance is None and not config.mix:
        return counts
    shares = [
        weight * _balanced_shares(part, config)
        for part, weight in zip(train.parts, config.mix_shares, strict=True)
    ]
    return np.sum(shares, axis=0) * counts.sum()


def _balanced_shares(part: TrainRows, config: InputConfig) -> np.ndarray:
    """Share of a dataset's rows that hold each item, float64 `[vocabulary_size]`."""
    balance = config.class_balance
    if balance is None:
        counts = part.count_items("rows")
        return counts / max(1, counts.sum())
    shares = np.zeros(part.count_ids("item"))
    for label, share in balance.shares.items():
        of_class = FilterConfig(feature=balance.feature, op="==", value=label)
        chosen = config.model_copy(update={"filter": (*config.filter, of_class)})
        counts = replace(part, config=chosen).count_items("rows")
        # A class without rows leaves its share to the others.
        shares += share * counts / max(1, counts.sum())
    return shares / max(shares.sum(), np.finfo(np.float64).tiny)
