"""Samplers of negatives: uniform, by counts of train, by what training has met so far.

Draws are with replacement, and a pure function of the seed of a step (and of the counts so far):
equal on all replicas, and the same in a step that is repeated after a resume.

After the candidate samplers of TensorFlow and Mikolov et al. 2013, "Distributed representations of
words and phrases and their compositionality", section 2.2: items drawn by `count ** distortion`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from conf.training.objectives import NegativesConfig
from training.networks.network import TrainingPass

DISTORTIONS = {"uniform": 0.0, "frequency": 0.75, "adaptive": 1.0, "mixed": 0.0}


class Sampler(tf.Module):
    """Draws items.

    Args:
        drawable: int64 `[items]`, ascending: ids to draw from.
        vocabulary_size: Number of ids.

    Attributes:
        state_variables: What passes of training set: counts of what they have met.
    """

    state_variables: Sequence[tf.Variable] = ()

    def __init__(self, drawable: np.ndarray, vocabulary_size: int) -> None:
        super().__init__(name="sampler")
        self._ids = tf.constant(drawable, tf.int64)
        positions = np.full(vocabulary_size, -1, np.int32)
        positions[drawable] = np.arange(len(drawable))
        self._positions = tf.constant(positions)

    @abstractmethod
    def draw(self, shape: Sequence[int | tf.Tensor], training: TrainingPass) -> tf.Tensor:
        """Draws ids, with replacement; the same for the same seed of the pass.

        Args:
            shape: Of the result.
            training: The pass of a training step.

        Returns:
            int64 `shape`.
        """

    @abstractmethod
    def read_weights(self, training: TrainingPass) -> tf.Tensor:
        """Returns what items are drawn in proportion to, float64 `[items]`."""

    def shares(self, ids: tf.Tensor, training: TrainingPass) -> tf.Tensor:
        """Returns the probability that a draw gives an item.

        Args:
            ids: int64 `[n]`.
            training: The pass of a training step.

        Returns:
            float32 `[n]`; of items that cannot be drawn, that of the least likely one.
        """
        weights = self.read_weights(training)
        positions = tf.gather(self._positions, ids)
        found = tf.gather(weights, tf.maximum(positions, 0))
        found = tf.where(positions < 0, tf.reduce_min(weights), found)
        return tf.cast(found / tf.reduce_sum(weights), tf.float32)

    def learn(self, ids: tf.Tensor, training: TrainingPass) -> None:
        """Takes note of the items of the rows of all replicas; most samplers learn nothing.

        Args:
            ids: int64, any shape; ids that cannot be drawn do not count.
            training: The pass of a training step.
        """


class UniformSampler(Sampler):
    """Draws all items alike."""

    def draw(self, shape: Sequence[int | tf.Tensor], training: TrainingPass) -> tf.Tensor:
        """Draws ids, int64 `shape`."""
        size = tf.size(self._ids, tf.int64)
        positions = tf.random.stateless_uniform(
            shape, seed_of(training), minval=0, maxval=size, dtype=tf.int64
        )
        return tf.gather(self._ids, positions)

    def read_weights(self, training: TrainingPass) -> tf.Tensor:
        """Returns ones."""
        return tf.ones_like(self._ids, tf.float64)


class FrequencySampler(Sampler):
    """Draws items by their events in train; one that has none counts as one.

    Args:
        drawable: As of `Sampler`.
        counts: int64 `[vocabulary_size]`, events of train by id.
        distortion: Exponent of the counts; 0: all items alike.
    """

    def __init__(self, drawable: np.ndarray, counts: np.ndarray, distortion: float) -> None:
        super().__init__(drawable, len(counts))
        weights = np.maximum(counts[drawable], 1).astype(np.float64) ** distortion
        self._weights, self._sums = tf.constant(weights), tf.constant(np.cumsum(weights))

    def draw(self, shape: Sequence[int | tf.Tensor], training: TrainingPass) -> tf.Tensor:
        """Draws ids, int64 `shape`."""
        return tf.gather(self._ids, _draw_positions(shape, self._sums, training))

    def read_weights(self, training: TrainingPass) -> tf.Tensor:
        """Returns the distorted counts."""
        return self._weights


class AdaptiveSampler(Sampler):
    """Draws items by how often steps have met them so far; each counts as met once before.

    A step costs time in proportion to the items, beside that of its draws.

    Args:
        drawable: As of `Sampler`.
        vocabulary_size: As of `Sampler`.
        distortion: Exponent of the counts.

    Attributes:
        counts: float64 `[items]`, whole numbers; part of checkpoints.
    """

    def __init__(self, drawable: np.ndarray, vocabulary_size: int, distortion: float) -> None:
        super().__init__(drawable, vocabulary_size)
        self._distortion = distortion
        self.counts = tf.Variable(
            tf.ones([len(drawable)], tf.float64), trainable=False, name="met_items"
        )
        self.state_variables = [self.counts]

    def draw(self, shape: Sequence[int | tf.Tensor], training: TrainingPass) -> tf.Tensor:
        """Draws ids, int64 `shape`."""
        sums = tf.cumsum(self.read_weights(training))
        return tf.gather(self._ids, _draw_positions(shape, sums, training))

    def read_weights(self, training: TrainingPass) -> tf.Tensor:
        """Returns the distorted counts so far."""
        return tf.pow(training.read(self.counts), self._distortion)

    def learn(self, ids: tf.Tensor, training: TrainingPass) -> None:
        """Counts items; those of all replicas, which so stay alike."""
        positions = tf.reshape(tf.gather(self._positions, ids), [-1])
        met = tf.math.unsorted_segment_sum(
            tf.cast(positions >= 0, tf.float64),
            tf.maximum(positions, 0),
            int(self.counts.shape[0]),
        )
        training.write(self.counts, training.read(self.counts) + met)


NEGATIVES_STREAM = 1


def seed_of(training: TrainingPass) -> tf.Tensor:
    """Returns the seed that negatives of a pass are drawn by, int32 `[2]`."""
    return training.seed + tf.constant([0, NEGATIVES_STREAM], training.seed.dtype)


def _draw_positions(
    shape: Sequence[int | tf.Tensor], sums: tf.Tensor, training: TrainingPass
) -> tf.Tensor:
    """Draws positions in proportion to weights with these running sums."""
    numbers = tf.random.stateless_uniform(shape, seed_of(training), dtype=tf.float64) * sums[-1]
    positions = tf.searchsorted(sums, tf.reshape(numbers, [-1]), side="right")
    # A product that is rounded up may reach the last sum.
    return tf.reshape(tf.minimum(positions, tf.size(sums) - 1), shape)


def build_sampler(
    config: NegativesConfig, drawable: np.ndarray, counts: np.ndarray | None, vocabulary_size: int
) -> Sampler:
    """Builds the sampler of a config whose source draws items.

    Call it under the strategy's scope.

    Args:
        config: Source and distortion.
        drawable: int64 `[items]`, ascending: ids to draw from.
        counts: int64 `[vocabulary_size]`, events of train by id; needed where they are drawn by.
        vocabulary_size: Number of ids.
    """
    distortion = find_distortion(config)
    if config.source == "adaptive":
        return AdaptiveSampler(drawable, vocabulary_size, distortion)
    if distortion == 0.0 or counts is None:
        return UniformSampler(drawable, vocabulary_size)
    return FrequencySampler(drawable, counts, distortion)


def find_distortion(config: NegativesConfig) -> float:
    """Returns the exponent of counts that items are drawn by."""
    return DISTORTIONS[config.source] if config.distortion is None else config.distortion
