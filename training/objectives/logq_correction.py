"""The logQ correction: how often each item is expected among the candidates of a softmax.

A softmax whose negatives are drawn in proportion to their popularity punishes popular items;
subtracting the log of an item's expected count from its logit undoes that (Yi et al. 2019,
"Sampling-bias-corrected neural modeling for large corpus item recommendations", section 3.2;
Bengio & Senecal 2008).
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.input import FilterConfig, InputConfig
from conf.training.objectives import SampledSoftmaxConfig
from training.input.train_counts import read_train_counts
from training.networks.network import TrainingPass
from training.objectives.samplers import Sampler
from training.objectives.user_items import TrainRows


class LogQCorrection:
    """What is subtracted from the logits of items: a strength times the log of expected counts.

    Args:
        strength: Above 0; 1 is the correction of the paper.
        batch_counts: float32 `[vocabulary_size]`, how often each item is expected among a batch's
            rows; None: these are no candidates.
        sampler: What draws further candidates, or None.
        drawn: How many it draws.
    """

    def __init__(
        self, strength: float, batch_counts: np.ndarray | None, sampler: Sampler | None, drawn: int
    ) -> None:
        self._strength, self._sampler, self._drawn = strength, sampler, drawn
        self._batch_counts = None if batch_counts is None else tf.constant(batch_counts)

    def find(self, ids: tf.Tensor, training: TrainingPass) -> tf.Tensor:
        """Returns the correction of items.

        Args:
            ids: int64 `[n]`.
            training: The pass of a training step.

        Returns:
            float32 `[n]`.
        """
        expected = 0.0 if self._batch_counts is None else tf.gather(self._batch_counts, ids)
        if self._sampler is not None:
            expected += float(self._drawn) * self._sampler.shares(ids, training)
        return self._strength * tf.math.log(expected)


def build_logq_correction(
    config: SampledSoftmaxConfig, train: TrainRows, sampler: Sampler | None
) -> LogQCorrection | None:
    """Builds the correction that an objective asks for; None: it asks for none.

    Args:
        config: The objective's config.
        train: The rows that are trained on.
        sampler: What draws candidates; None: those of the batch alone.

    Raises:
        InputDataError: The counts or a record are damaged.
    """
    if not config.logq_correction:
        return None
    counts = None
    if config.negatives.has_batch:
        counts = count_in_batch(read_batch_counts(train), train.batch_size)
    drawn = config.negatives.count or 0
    return LogQCorrection(config.logq_correction, counts, sampler, drawn)


def count_in_batch(item_counts: np.ndarray, batch_size: int) -> np.ndarray:
    """How often each item is expected among a batch's rows: `batch_size` times its share of train.

    Args:
        item_counts: `[vocabulary_size]`, rows that train by item id.
        batch_size: Rows that are ranked together, over all replicas.

    Returns:
        float32 `[vocabulary_size]`, above 0: an item without a row counts as one.
    """
    counts = np.where(item_counts > 0, item_counts, 1).astype(np.float64)
    return (batch_size * counts / max(1.0, float(item_counts.sum()))).astype(np.float32)


def read_batch_counts(train: TrainRows) -> np.ndarray:
    """Reads how many rows of an epoch hold each item, as batches are made.

    With `class_balance` and `mix` these are expected numbers: each class and each dataset has its
    share of the rows.

    Args:
        train: The rows that are trained on.

    Returns:
        `[vocabulary_size]`, by id: int64, or float64 of expected numbers; of all labels, as each
        row's item is a candidate.

    Raises:
        InputDataError: The counts or a record are damaged.
    """
    config = train.config or InputConfig()
    counts = _count_rows(train.version_dir, train.manifest, config)
    if config.class_balance is None and not config.mix:
        return counts
    shares = [
        weight * _balanced_shares(part.version_dir, part.manifest, config)
        for part, weight in zip(train.parts, config.mix_shares, strict=True)
    ]
    return np.sum(shares, axis=0) * counts.sum()


def _count_rows(version_dir: ReadablePath, manifest: Manifest, config: InputConfig) -> np.ndarray:
    counts = read_train_counts(version_dir, manifest, "item", config)
    return counts.place(counts.rows, np.arange(_vocabulary_size(manifest)))


def _balanced_shares(
    version_dir: ReadablePath, manifest: Manifest, config: InputConfig
) -> np.ndarray:
    """Share of a dataset's rows that hold each item, float64 `[vocabulary_size]`."""
    balance = config.class_balance
    if balance is None:
        counts = _count_rows(version_dir, manifest, config)
        return counts / max(1, counts.sum())
    shares = np.zeros(_vocabulary_size(manifest))
    for label, share in balance.shares.items():
        of_class = FilterConfig(feature=balance.feature, op="==", value=label)
        chosen = config.model_copy(update={"filter": (*config.filter, of_class)})
        counts = _count_rows(version_dir, manifest, chosen)
        # A class without rows leaves its share to the others.
        shares += share * counts / max(1, counts.sum())
    return shares / max(shares.sum(), np.finfo(np.float64).tiny)


def _vocabulary_size(manifest: Manifest) -> int:
    return int(manifest.schema[manifest.require_key("item")].vocabulary_size or 0)
