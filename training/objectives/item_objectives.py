"""Objectives of retrieval models: each row's item against other items.

`sampled_softmax` ranks it among items of the batch or drawn ones, which all rows share, `softmax`
among the whole catalogue; `bpr` and `binary` compare it with items that are drawn for its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.schema import FIRST_TOKEN_ID, FeatureSpec
from conf.training.objectives import (
    BinaryConfig,
    BPRConfig,
    DrawnNegativesConfig,
    NegativesConfig,
    ObjectiveConfig,
    SampledSoftmaxConfig,
    SoftmaxConfig,
)
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import read_keys
from training.input.batches import Batch
from training.models.retrieval import Queries, RetrievalModel, list_later_inputs
from training.networks.network import TrainingPass
from training.objectives.catalog_softmax import compute_catalog_softmax
from training.objectives.item_catalog import ItemFeatures, read_drawable_items, read_item_events
from training.objectives.item_losses import (
    SoftmaxItems,
    compute_drawn_loss,
    compute_sampled_softmax,
    count_replicas,
    gather_replicas,
    keep_hardest,
    replica_offset,
    score_candidates,
)
from training.objectives.logq_correction import LogQCorrection, build_logq_correction
from training.objectives.own_loss import OwnLoss, build_item_loss
from training.objectives.positive_rows import refuse_negative_rows
from training.objectives.samplers import Sampler, build_sampler, find_distortion
from training.objectives.user_items import KnownItems, TrainRows, build_known_items

DROPOUT_STREAM = 2


@dataclass(frozen=True)
class ItemData:
    """What objectives know of the items.

    Attributes:
        key: Name of the item's id.
        features: Features of catalogue items; None: the batch's own alone are embedded.
        known: Items of users and histories; None: none is left out for these.
        later: Features that the catalogue has as of the end of the log. Where there are any, items
            of rows are embedded as the catalogue has them, or the difference in time would tell
            them from those that they are compared with.
    """

    key: str
    features: ItemFeatures | None
    known: KnownItems | None
    later: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Says what differs from the rows of the dataset, and what memory is taken."""
        of_later = (
            f"items of train rows are embedded with {', '.join(self.later)} as of the end of the "
            "log, as the items that they are compared with",
        )
        of_known = () if self.known is None else self.known.notes
        return (of_later if self.later else ()) + of_known

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features of a batch that are read beside the model's own."""
        return (self.key,) if self.known is None else self.known.inputs

    def embed(self, model: RetrievalModel, ids: tf.Tensor, training: TrainingPass) -> tf.Tensor:
        """Embeds catalogue items, `[n, dim]`; with dropout that is the same on all replicas."""
        if self.features is None:
            raise TypeError("the catalogue was not read")
        with training.drawing_from(DROPOUT_STREAM):
            return model.embed_items(self.features.lookup(ids), training)

    def mark_known(self, batch: Batch, queries: Queries, ids: tf.Tensor) -> tf.Tensor | None:
        """Returns which items the user of a query has, bool `[n, items]`; None: not asked for."""
        marks = self.mark_of_rows(batch, queries, ids)
        return marks if marks is None or queries.per_row == 1 else tf.gather(marks, queries.rows)

    def mark_of_rows(self, batch: Batch, queries: Queries, ids: tf.Tensor) -> tf.Tensor | None:
        """Returns which items the user of a row has, bool `[rows, items]`; None: not asked for."""
        if self.known is None:
            return None
        return self.known.mark(self.known.find(batch), queries.row_count, ids)

    def embed_targets(
        self, model: RetrievalModel, batch: Batch, queries: Queries, training: TrainingPass
    ) -> tf.Tensor:
        """Embeds the items of queries, `[n, dim]`."""
        if queries.per_row == 1:
            return self.embed_rows(model, batch, training)
        return self.embed(model, queries.target_ids, training)

    def embed_kept_targets(
        self,
        model: RetrievalModel,
        batch: Batch,
        padded: Queries,
        queries: Queries,
        training: TrainingPass,
    ) -> tf.Tensor:
        """Embeds the items of queries, those of `padded` without padding, `[kept, dim]`.

        Several replicas embed those of padding too: what they exchange of the table has to have
        one shape, on each of them and in each step.
        """
        if padded.per_row > 1 and count_replicas() > 1:
            every = self.embed_targets(model, batch, padded, training)
            return tf.gather(every, padded.find_kept())
        return self.embed_targets(model, batch, queries, training)

    def embed_rows(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Embeds the items of rows, `[rows, dim]`."""
        if self.later:
            return self.embed(model, batch[self.key], training)
        return model.embed_items(batch, training)


class ItemObjective:
    """Base of the objectives that compare items.

    Args:
        items: What is known of the items.
        sampler: What draws negatives, or None.
        loss: A formula of one's own, or None.

    Attributes:
        inputs: Features that it reads beside the model's own.
        binary_labels: None: rows are positives.
        state_variables: What its passes set.
        notes: What to tell those who train.
    """

    def __init__(
        self, items: ItemData, sampler: Sampler | None, loss: OwnLoss | None = None
    ) -> None:
        beside = () if loss is None else loss.inputs
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys((*items.inputs, *beside)))
        self._loss = loss
        self.binary_labels: tuple[str, ...] = ()
        self.state_variables = () if sampler is None else tuple(sampler.state_variables)
        self.notes: tuple[str, ...] = items.notes
        self._items, self._sampler = items, sampler

    def _learn(self, queries: Queries, training: TrainingPass) -> None:
        """Lets an adaptive sampler count the items of all replicas' rows."""
        if self._sampler is not None and self._sampler.state_variables:
            met = tf.where(queries.weights > 0.0, tf.cast(queries.target_ids, tf.int64), 0)
            self._sampler.learn(gather_replicas(met), training)


class SampledSoftmax(ItemObjective):
    """Softmax over items of the global batch, drawn items, or both.

    Args:
        config: Negatives and corrections.
        items: What is known of the items.
        sampler: What draws negatives; None: those of the batch alone.
        logq: What is subtracted from logits; None: nothing.
    """

    def __init__(
        self,
        config: SampledSoftmaxConfig,
        items: ItemData,
        sampler: Sampler | None,
        logq: LogQCorrection | None,
    ) -> None:
        super().__init__(items, sampler, build_item_loss(config.loss))
        self._config = config
        self._from_batch = config.negatives.has_batch
        self._logq = logq

    def __call__(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        padded = model.embed_queries(batch, self._items.key, training)
        queries = padded.without_padding()
        own = self._items.embed_kept_targets(model, batch, padded, queries, training)
        targets = self._describe(own, queries.target_ids, training)
        of_rows = own if queries.per_row == 1 else None
        candidates = self._gather_candidates(model, batch, of_rows, training)
        masked = self._find_masked(batch, queries, candidates.ids)
        softmaxed, hardest = (queries.vectors, targets, candidates), self._config.negatives.hardest
        if self._loss is None:
            losses = compute_sampled_softmax(
                *softmaxed, masked, temperature=model.temperature, hardest=hardest
            )
        else:
            own_scores, scores = score_candidates(*softmaxed, model.temperature)
            counted = keep_hardest(scores, ~masked, hardest)
            losses = self._loss(own_scores, scores, counted, batch=batch, rows=queries.rows)
        self._learn(padded, training)
        return queries.sum_losses(losses)

    def _describe(self, vectors: tf.Tensor, ids: tf.Tensor, training: TrainingPass) -> SoftmaxItems:
        ids = tf.cast(ids, tf.int64)
        logq = None if self._logq is None else self._logq.find(ids, training)
        return SoftmaxItems(vectors, ids, logq)

    def _gather_candidates(
        self, model: RetrievalModel, batch: Batch, of_rows: tf.Tensor | None, training: TrainingPass
    ) -> SoftmaxItems:
        """Returns the items that all queries are ranked against, equal on all replicas."""
        vectors, ids = [], []
        if self._from_batch:
            row_ids = read_keys(batch, self._items.key)
            of_rows = self._items.embed_rows(model, batch, training) if of_rows is None else of_rows
            # Every replica ranks its rows among the whole batch's items: R replicas, same loss.
            vectors.append(gather_replicas(of_rows))
            ids.append(gather_replicas(tf.cast(row_ids, tf.int64)))
        if self._sampler is not None:
            drawn = self._sampler.draw([self._config.negatives.count or 0], training)
            # The same on every replica; each adds the gradient of its own rows.
            vectors.append(self._items.embed(model, drawn, training))
            ids.append(drawn)
        return self._describe(tf.concat(vectors, axis=0), tf.concat(ids, axis=0), training)

    def _find_masked(self, batch: Batch, queries: Queries, ids: tf.Tensor) -> tf.Tensor:
        """Returns which candidates are no negatives of a query, bool `[n, candidates]`."""
        if (known := self._items.mark_known(batch, queries, ids)) is not None:
            return known
        copies = tf.cast(queries.target_ids, tf.int64)[:, tf.newaxis] == ids[tf.newaxis, :]
        if self._config.mask != "none":
            return copies
        if not self._from_batch:
            return tf.zeros_like(copies)
        places = queries.rows + replica_offset(queries.row_count)
        return copies & (places[:, tf.newaxis] == tf.range(tf.size(ids))[tf.newaxis, :])


class CatalogSoftmax(ItemObjective):
    """Softmax over the whole catalogue, which is embedded once in each step, in blocks of items.

    Args:
        items: What is known of the items.
        catalog: int64 `[items]`, ids, ascending.
        vocabulary_size: Number of ids.
    """

    def __init__(self, items: ItemData, catalog: np.ndarray, vocabulary_size: int) -> None:
        super().__init__(items, None)
        positions = np.full(vocabulary_size, -1, np.int32)
        positions[catalog] = np.arange(len(catalog))
        self._catalog, self._positions = tf.constant(catalog), tf.constant(positions)

    def __call__(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`; 0 for an item outside the catalogue."""
        queries = model.embed_queries(batch, self._items.key, training).without_padding()
        vectors = self._items.embed(model, self._catalog, training)
        losses = compute_catalog_softmax(
            queries.vectors,
            vectors,
            tf.gather(self._positions, queries.target_ids),
            self._items.mark_of_rows(batch, queries, self._catalog),
            queries.rows,
            temperature=model.temperature,
        )
        return queries.sum_losses(losses)


class DrawnNegatives(ItemObjective):
    """Compares each row's item with items drawn for it: `bpr`, `binary`.

    The queries of a row share what is drawn for it.

    Args:
        config: Which of the two, how many are drawn, and which of them do not count.
        items: What is known of the items.
        sampler: What draws them.
    """

    def __init__(self, config: BPRConfig | BinaryConfig, items: ItemData, sampler: Sampler) -> None:
        super().__init__(items, sampler, build_item_loss(config.loss))
        self._kind, self._mask = config.kind, config.mask
        self._negatives = config.negatives or DrawnNegativesConfig()
        self._count = self._negatives.count
        self._draws = sampler

    def __call__(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        queries = model.embed_queries(batch, self._items.key, training)
        own = self._items.embed_targets(model, batch, queries, training)
        drawn = self._draw(queries.row_count, training)
        vectors = self._items.embed(model, tf.reshape(drawn, [-1]), training)
        shape = [queries.row_count, -1, int(queries.vectors.shape[1])]
        scores = tf.matmul(
            tf.reshape(queries.vectors, shape),
            tf.reshape(vectors, [queries.row_count, self._count, shape[2]]),
            transpose_b=True,
        )
        scores = tf.reshape(scores, [-1, self._count]) / model.temperature
        counted = self._find_counted(batch, queries, drawn)
        compared = (
            tf.reduce_sum(queries.vectors * own, axis=1) / model.temperature,
            scores,
            keep_hardest(scores, counted, self._negatives.hardest),
        )
        if self._loss is None:
            losses = compute_drawn_loss(self._kind, *compared)
        else:
            losses = self._loss(*compared, batch=batch, rows=queries.rows)
        self._learn(queries, training)
        return queries.sum_losses(losses)

    def _draw(self, rows: tf.Tensor, training: TrainingPass) -> tf.Tensor:
        """Draws for this replica's rows what one replica would draw for them, `[rows, count]`."""
        ids = self._draws.draw([rows * count_replicas(), self._count], training)
        first = replica_offset(rows)
        return ids[first : first + rows]

    def _find_counted(self, batch: Batch, queries: Queries, drawn: tf.Tensor) -> tf.Tensor:
        """Returns which drawn items count for a query, bool `[n, count]`."""
        each = tf.gather(drawn, queries.rows)
        if self._items.known is not None:
            counted = ~self._items.known.contains(self._items.known.find(batch), drawn)
            return tf.gather(counted, queries.rows)
        if self._mask == "none":
            return tf.ones_like(each, tf.bool)
        return each != tf.cast(queries.target_ids, tf.int64)[:, tf.newaxis]


def build_item_objective(
    config: ObjectiveConfig, train: TrainRows, model: RetrievalModel
) -> SampledSoftmax | CatalogSoftmax | DrawnNegatives:
    """Builds an objective that compares items; call it under the strategy's scope.

    Args:
        config: Its config.
        train: The rows that are trained on.
        model: The model, for the item features that it reads.

    Raises:
        ConfigError: The dataset has drawn negatives, or no items; or rows of label 0 would be
            positives; or the objective needs what keys of dynamic tables do not have.
        InputDataError: There is one item alone, or the dataset is damaged.
    """
    manifest = train.manifest
    key = manifest.require_key("item")
    for part in train.parts:
        _refuse_drawn_negatives(config, part.manifest)
    refuse_negative_rows(config, config.kind, train)
    _refuse_keyed_items(config, manifest.schema[key], model)
    size = manifest.schema[key].vocabulary_size
    if size is not None:
        _require_two(size - FIRST_TOKEN_ID, key)
    features, later = None, []
    if _names_items(config) or model.queries_per_row > 1:
        features = ItemFeatures(train.version_dir, manifest, model.item_inputs)
        later = list_later_inputs(model, manifest)
    known = build_known_items(train, model.inputs) if config.mask == "user_items" else None
    items = ItemData(key, features, known, tuple(later))
    if isinstance(config, SoftmaxConfig):
        catalog = _read_drawable(train)
        return CatalogSoftmax(items, catalog, int(size or 0))
    if isinstance(config, SampledSoftmaxConfig):
        return _build_sampled(config, train, items)
    negatives = config.negatives or NegativesConfig(source="uniform", count=1)
    return DrawnNegatives(config, items, _build_sampler(negatives, train))


def _build_sampled(
    config: SampledSoftmaxConfig, train: TrainRows, items: ItemData
) -> SampledSoftmax:
    sampler = None
    if config.negatives.source != "batch":
        sampler = _build_sampler(config.negatives, train)
    return SampledSoftmax(config, items, sampler, build_logq_correction(config, train, sampler))


def _build_sampler(config: NegativesConfig, train: TrainRows) -> Sampler:
    item = train.manifest.require_key("item")
    by_counts = config.source != "adaptive" and find_distortion(config) > 0.0
    counts = read_item_events(train) if by_counts else None
    size = int(train.manifest.schema[item].vocabulary_size or 0)
    return build_sampler(config, _read_drawable(train), counts, size)


def _names_items(config: ObjectiveConfig) -> bool:
    """Whether items are embedded that no row of the batch has brought."""
    return not (isinstance(config, SampledSoftmaxConfig) and config.negatives.source == "batch")


def _read_drawable(train: TrainRows) -> np.ndarray:
    found = read_drawable_items(train.version_dir, train.manifest)
    _require_two(len(found), train.manifest.require_key("item"))
    return found


def _require_two(items: int, key: str) -> None:
    """Refuses a catalogue in which an item has nothing to be compared with."""
    if items < 2:
        raise InputDataError(
            "this objective compares items, and the catalogue has fewer than two",
            received=f"{items} items in the vocabulary of {key!r}",
            allowed="two items or more",
            fix="build the dataset from a log of several items",
        )


def _refuse_drawn_negatives(config: ObjectiveConfig, manifest: Manifest) -> None:
    """To these objectives each row is a positive: drawn negatives would be taught as such."""
    drawn = manifest.counts.drawn.get("train", 0)
    if drawn:
        raise ConfigError(
            f"{config.kind} draws negatives itself, and the dataset has drawn ones, which it would "
            "take for positives",
            received=f"{drawn:,} drawn negatives in the train split",
            allowed="model.objective.kind = binary, or a dataset without drawn negatives",
            fix="set model.objective={kind: binary}, or build without `negatives`",
        )


def _refuse_keyed_items(config: ObjectiveConfig, item: FeatureSpec, model: RetrievalModel) -> None:
    """Refuses what needs a vocabulary where items are keys.

    Raises:
        ConfigError: Items that no vocabulary counts shall be corrected by their counts, be looked
            up among those of a user, or be named whose rows the step does not know.
    """
    if item.vocabulary_size is None:
        strength = getattr(config, "logq_correction", 0.0)
        if strength and not _names_items(config):
            raise ConfigError(
                "the logQ correction needs the counts of a vocabulary, and the item's id has none",
                received=f"model.objective.logq_correction = {strength:g}, {item.name}: "
                f"{item.encoding}",
                fix="set model.objective.logq_correction=0, or encode the item's id by a "
                "vocabulary and embed its key beside it",
            )
        if config.mask == "user_items":
            raise ConfigError(
                "the items of users are looked up by a vocabulary, and the item's id has none",
                received=f"model.objective.mask = user_items, {item.name}: {item.encoding}",
                fix="set model.objective.mask=target, or encode the item's id by a vocabulary",
            )
    keyed = [
        name
        for name in model.item_inputs
        if isinstance(model.embedded_features.get(name), DynamicTable)
    ]
    if (keyed or item.vocabulary_size is None) and _names_items(config):
        raise ConfigError(
            "this objective names items inside the step, and keys of dynamic tables get their "
            "rows before it",
            received=f"model.objective.kind = {config.kind}, {', '.join(keyed) or item.name}",
            allowed="model.objective.kind = sampled_softmax with negatives.source = batch",
            fix="set model.objective.negatives={source: batch}, or embed items by vocabularies",
        )
