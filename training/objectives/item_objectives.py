"""Objectives of retrieval models: each row's item against other items.

`sampled_softmax` ranks it among items of the batch or drawn ones, which all rows share, `softmax`
among the whole catalogue; `bpr` and `binary` compare it with items that are drawn for its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.objectives import (
    BinaryConfig,
    BPRConfig,
    DrawnNegativesConfig,
    NegativesConfig,
    ObjectiveConfig,
    SampledSoftmaxConfig,
    SoftmaxConfig,
)
from training.distribution.strategy import count_replicas, has_gpu
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import read_keys
from training.input.batches import Batch
from training.input.train_counts import read_train_rows
from training.models.retrieval import Queries, RetrievalModel, list_later_inputs
from training.networks.network import StepContext
from training.objectives.item_catalog import ItemFeatures, read_drawable_items
from training.objectives.item_losses import (
    RowLoss,
    SoftmaxItems,
    build_user_loss,
    compute_catalog_softmax,
    compute_drawn_loss,
    compute_sampled_softmax,
    gather_replicas,
    keep_hardest,
    replica_offset,
    score_candidates,
)
from training.objectives.samplers import (
    LogQCorrection,
    Sampler,
    build_logq_correction,
    build_sampler,
    find_distortion,
)
from training.objectives.softmax_memory import BLOCK_ITEMS
from training.objectives.user_items import KnownItems, TrainRows, build_known_items
from training.reader.filters import passes

DROPOUT_STREAM = 2
_GPU_SCORES = 1 << 26  # Of the catalogue softmax, at once.


@dataclass(frozen=True)
class ItemData:
    """What objectives know of the items.

    `later` are features that the catalogue has as of the end of the log. Where there are any, items
    of rows are embedded as the catalogue has them, or the difference in time would tell them from
    those that they are compared with.
    """

    key: str
    features: ItemFeatures | None  # None: the batch's own items alone are embedded.
    known: KnownItems | None  # None: no items are left out for users and histories.
    later: tuple[str, ...] = ()

    def embed(self, model: RetrievalModel, ids: tf.Tensor, training: StepContext) -> tf.Tensor:
        """Embeds catalogue items, `[n, dim]`; with dropout that is the same on all replicas."""
        if self.features is None:
            raise TypeError("the catalogue was not read")
        with training.drawing_from(DROPOUT_STREAM):
            return model.embed_items(self.features.lookup(ids), training)

    def embed_rows(self, model: RetrievalModel, batch: Batch, training: StepContext) -> tf.Tensor:
        """Embeds the items of rows, `[rows, dim]`."""
        if self.later:
            return self.embed(model, batch[self.key], training)
        return model.embed_items(batch, training)

    def embed_targets(
        self, model: RetrievalModel, batch: Batch, queries: Queries, training: StepContext
    ) -> tf.Tensor:
        """Embeds the items of queries, `[n, dim]`."""
        if queries.per_row == 1:
            return self.embed_rows(model, batch, training)
        return self.embed(model, queries.target_ids, training)

    def mark_of_rows(self, batch: Batch, queries: Queries, ids: tf.Tensor) -> tf.Tensor | None:
        """Returns which items the user of a row has, bool `[rows, items]`; None: not asked for."""
        if self.known is None:
            return None
        return self.known.mark(self.known.find(batch), queries.row_count, ids)


class ItemObjective:
    """Base of the objectives that compare items: rows are positives, there is no label."""

    binary_labels: tuple[str, ...] = ()

    def __init__(
        self, items: ItemData, sampler: Sampler | None = None, loss: RowLoss | None = None
    ) -> None:
        self.inputs = (items.key,) if items.known is None else items.known.inputs
        self.state_variables = () if sampler is None else tuple(sampler.state_variables)
        self.notes: tuple[str, ...] = ()
        if items.later:
            self.notes = (
                f"items of train rows are embedded with {', '.join(items.later)} as of the end of "
                "the log, as the items that they are compared with",
            )
        self._items, self._sampler, self._loss = items, sampler, loss

    def _learn(self, queries: Queries, training: StepContext) -> None:
        """Lets an adaptive sampler count the items of all replicas' rows."""
        if self._sampler is not None and self._sampler.state_variables:
            met = tf.where(queries.weights > 0.0, tf.cast(queries.target_ids, tf.int64), 0)
            self._sampler.learn(gather_replicas(met), training)


class SampledSoftmax(ItemObjective):
    """Softmax over items of the global batch, drawn items, or both."""

    def __init__(
        self,
        config: SampledSoftmaxConfig,
        items: ItemData,
        sampler: Sampler | None,
        logq: LogQCorrection | None,
    ) -> None:
        super().__init__(items, sampler, build_user_loss(config.loss))
        self._config, self._logq = config, logq
        self._from_batch = config.negatives.has_batch

    def __call__(self, model: RetrievalModel, batch: Batch, training: StepContext) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        padded = model.embed_queries(batch, self._items.key, training)
        queries, own = self._embed_targets(model, batch, padded, training)
        targets = self._describe(own, queries.target_ids, training)
        of_rows = own if queries.per_row == 1 else None
        candidates = self._gather_candidates(model, batch, of_rows, training)
        masked = self._find_masked(batch, queries, candidates.ids)
        softmaxed, hardest = (queries.vectors, targets, candidates), self._config.negatives.hardest
        if self._loss is None:
            losses = compute_sampled_softmax(
                *softmaxed,
                masked,
                temperature=model.temperature,
                hardest=hardest,
                dtype=training.dtype,
            )
        else:
            own_scores, scores = score_candidates(*softmaxed, model.temperature, training.dtype)
            losses = self._loss(own_scores, scores, keep_hardest(scores, ~masked, hardest))
        self._learn(padded, training)
        return queries.sum_losses(losses)

    def _embed_targets(
        self, model: RetrievalModel, batch: Batch, padded: Queries, training: StepContext
    ) -> tuple[Queries, tf.Tensor]:
        """Returns the queries without padding, and their items' vectors, `[kept, dim]`.

        Several replicas embed those of padding too: what they exchange of the table has to have
        one shape, on each of them and in each step.
        """
        queries = padded.without_padding()
        if padded.per_row > 1 and count_replicas() > 1:
            every = self._items.embed_targets(model, batch, padded, training)
            return queries, tf.gather(every, padded.find_kept())
        return queries, self._items.embed_targets(model, batch, queries, training)

    def _describe(self, vectors: tf.Tensor, ids: tf.Tensor, training: StepContext) -> SoftmaxItems:
        ids = tf.cast(ids, tf.int64)
        logq = None if self._logq is None else self._logq.find(ids, training)
        return SoftmaxItems(vectors, ids, logq)

    def _gather_candidates(
        self, model: RetrievalModel, batch: Batch, of_rows: tf.Tensor | None, training: StepContext
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
        if (known := self._items.mark_of_rows(batch, queries, ids)) is not None:
            return known if queries.per_row == 1 else tf.gather(known, queries.rows)
        copies = tf.cast(queries.target_ids, tf.int64)[:, tf.newaxis] == ids[tf.newaxis, :]
        if self._config.mask != "none":
            return copies
        if not self._from_batch:
            return tf.zeros_like(copies)
        places = queries.rows + tf.cast(replica_offset(queries.row_count), tf.int64)
        return copies & (places[:, tf.newaxis] == tf.range(tf.size(ids, tf.int64))[tf.newaxis, :])


def _choose_block(rows: int | None, queries_per_row: int) -> int:
    """Returns how many items are scored at once: a GPU gains by few large products."""
    if rows is None or not has_gpu():
        return BLOCK_ITEMS
    return max(BLOCK_ITEMS, _GPU_SCORES // (rows * queries_per_row))


class CatalogSoftmax(ItemObjective):
    """Softmax over the whole catalogue, int64 `[items]`, which is embedded once in each step."""

    def __init__(self, items: ItemData, catalog: np.ndarray, vocabulary_size: int) -> None:
        super().__init__(items)
        positions = np.full(vocabulary_size, -1, np.int64)
        positions[catalog] = np.arange(len(catalog))
        self._catalog, self._positions = tf.constant(catalog), tf.constant(positions)

    def __call__(self, model: RetrievalModel, batch: Batch, training: StepContext) -> tf.Tensor:
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
            dtype=training.dtype,
            block=_choose_block(batch[self._items.key].shape[0], queries.per_row),
        )
        return queries.sum_losses(losses)


class DrawnNegatives(ItemObjective):
    """Compares each row's item with items drawn for it, which its queries share."""

    def __init__(self, config: BPRConfig | BinaryConfig, items: ItemData, sampler: Sampler) -> None:
        super().__init__(items, sampler, build_user_loss(config.loss))
        self._kind, self._mask, self._draws = config.kind, config.mask, sampler
        self._negatives = config.negatives or DrawnNegativesConfig()

    def __call__(self, model: RetrievalModel, batch: Batch, training: StepContext) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        queries = model.embed_queries(batch, self._items.key, training)
        own = self._items.embed_targets(model, batch, queries, training)
        drawn, count = self._draw(queries.row_count, training), self._negatives.count
        vectors = self._items.embed(model, tf.reshape(drawn, [-1]), training)
        shape = [queries.row_count, -1, int(queries.vectors.shape[1])]
        scores = tf.matmul(
            tf.reshape(queries.vectors, shape),
            tf.reshape(vectors, [queries.row_count, count, shape[2]]),
            transpose_b=True,
        )
        scores = tf.reshape(scores, [-1, count]) / model.temperature
        counted = self._find_counted(batch, queries, drawn)
        compared = (
            tf.reduce_sum(queries.vectors * own, axis=1) / model.temperature,
            scores,
            keep_hardest(scores, counted, self._negatives.hardest),
        )
        if self._loss is None:
            losses = compute_drawn_loss(self._kind, *compared)
        else:
            losses = self._loss(*compared)
        self._learn(queries, training)
        return queries.sum_losses(losses)

    def _draw(self, rows: tf.Tensor, training: StepContext) -> tf.Tensor:
        """Draws for this replica's rows what one replica would draw for them, `[rows, count]`."""
        ids = self._draws.draw([rows * count_replicas(), self._negatives.count], training)
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
    """Builds an objective that compares items; call it under the strategy's scope."""
    manifest = train.manifest
    key = manifest.require_key("item")
    refuse_negative_rows(config, train)
    _refuse_keyed_items(config, manifest, model)
    features, later = None, []
    if _names_items(config) or model.queries_per_row > 1:
        features = ItemFeatures(train.version_dir, manifest, model.item_inputs)
        later = list_later_inputs(model, manifest)
    known = build_known_items(train, model.inputs) if config.mask == "user_items" else None
    items = ItemData(key, features, known, tuple(later))
    if isinstance(config, SoftmaxConfig):
        catalog = read_drawable_items(train.version_dir, manifest)
        return CatalogSoftmax(items, catalog, train.count_ids("item"))
    if not isinstance(config, SampledSoftmaxConfig):
        negatives = config.negatives or DrawnNegativesConfig()
        return DrawnNegatives(config, items, _build_sampler(negatives, train))
    is_drawn = config.negatives.source != "batch"
    sampler = _build_sampler(config.negatives, train) if is_drawn else None
    return SampledSoftmax(config, items, sampler, build_logq_correction(config, train, sampler))


def _build_sampler(config: NegativesConfig, train: TrainRows) -> Sampler:
    by_counts = config.source != "adaptive" and find_distortion(config) > 0.0
    counts = train.count_items("events") if by_counts else None
    drawable = read_drawable_items(train.version_dir, train.manifest)
    return build_sampler(config, drawable, counts, train.count_ids("item"))


def _names_items(config: ObjectiveConfig) -> bool:
    """Whether items are embedded that no row of the batch has brought."""
    return not (isinstance(config, SampledSoftmaxConfig) and config.negatives.source == "batch")


def _refuse_keyed_items(config: ObjectiveConfig, manifest: Manifest, model: RetrievalModel) -> None:
    """Refuses what needs a vocabulary where items are keys: these get their rows before a step."""
    item, tables = manifest.schema[manifest.require_key("item")], model.embedded_features
    keyed = [n for n in model.item_inputs if isinstance(tables.get(n), DynamicTable)]
    has_ids = item.vocabulary_size is not None
    strength = getattr(config, "logq_correction", 0.0)
    if _names_items(config):
        wrong = bool(keyed) or not has_ids
    else:
        wrong = not has_ids and (bool(strength) or config.mask == "user_items")
    if wrong:
        raise ConfigError(
            "items whose ids have no vocabulary are compared with those of the batch alone, "
            "without the logQ correction and without the items of users",
            received=f"model.objective.kind = {config.kind}, mask = {config.mask}, "
            f"logq_correction = {strength:g}; keys: {', '.join(keyed) or item.name}",
            fix="set model.objective={negatives: {source: batch}, logq_correction: 0, mask: "
            "target}, or embed items by vocabularies",
        )


def refuse_negative_rows(config: ObjectiveConfig, train: TrainRows) -> None:
    """Refuses to take rows for positives that are none, those of mixed datasets too.

    Rows that the input leaves out, and rows of weight 0, teach nothing.
    """
    for part in train.parts:
        name, drawn = part.manifest.dataset_name, part.manifest.counts.drawn.get("train", 0)
        if drawn:
            raise ConfigError(
                f"{config.kind} takes every row for a positive, and some are drawn negatives",
                received=f"{drawn:,} drawn negatives in the train split of {name}",
                fix="set model.objective={kind: binary}, or build without `negatives`",
            )
        if config.positives != "every_row" and (negatives := _count_negatives(part)):
            raise ConfigError(
                f"{config.kind} takes every row for a positive, and the label says that some are "
                "negatives",
                received=f"{negatives:,} rows of {name} that are trained on have label 0",
                fix="set input.filter=[{feature: "
                f"{part.manifest.keys.label}, value: 1}}], give them weight 0 (weights.negative in "
                "the build), learn from them (model.objective={kind: binary}), or say that every "
                "row counts: model.objective.positives=every_row",
            )


def _count_negatives(train: TrainRows) -> int:
    """Rows of label 0 that teach something; 0 where the label has not two classes."""
    label, source = train.manifest.keys.label, train.config or InputConfig()
    found = train.manifest.statistics.get("train", {}).get(label or "", {})
    is_binary = (found.get("min"), found.get("max")) == (0, 1)
    if label is None or not is_binary or found.get("distinct", {}).get("count") != 2:
        return 0
    balance, weight = source.class_balance, train.manifest.find_weight()
    has_no_share = balance is not None and balance.feature == label and not balance.shares.get(0)
    if has_no_share or not passes(source, label, 0.0):
        return 0
    if weight is None and not source.filter:
        return int(found.get("zeros", 0))
    negatives = 0
    for rows in read_train_rows(
        train.version_dir, train.manifest, source, [label, weight or label]
    ):
        is_negative = np.asarray(rows.dense[label]).reshape(-1) == 0
        if weight is not None:  # A scalar may come as a list of one.
            is_negative &= np.asarray(rows.dense[weight]).reshape(len(is_negative)) > 0
        negatives += int(np.count_nonzero(is_negative))
    return negatives
