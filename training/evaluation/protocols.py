"""Ranking protocols: against which items a row's target is ranked.

    full_unseen    the whole catalogue but what the user had met before the event
    full_all       the whole catalogue
    sampled_given  candidates that come with the data set
    sampled_<n>    n unseen items, drawn uniformly

Sampled ranks look far better than full ones on the same model and must not be compared with
them (Krichene & Rendle 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import ConfigError, InputDataError, TooFewRowsError, did_you_mean
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.splits import TRAIN
from conf.training.input import FilterConfig, InputConfig, describe_conditions
from conf.training.models import ModelConfig
from conf.training.objectives import BinaryConfig, ItemSettings
from conf.training.train import TrainConfig
from training.evaluation.item_index import BLOCK_CELLS, ItemIndex, read_cells
from training.evaluation.metrics import (
    MISSING,
    IntArray,
    Pairs,
    build_pairs,
    rank_all,
    rank_among,
    rank_without,
)
from training.input.batches import (
    build_eval_dataset,
    build_held_out_dataset,
    read_batches,
)
from training.input.train_counts import find_counted_keys
from training.objectives.user_items import KnownItems, read_user_items
from training.reader.feature_columns import ROLE_OF_SPLIT
from training.reader.filters import EVALUATION_FILTER, find_passing
from training.reader.training_data import TrainingData


@dataclass
class UniformNegatives:
    """Draws candidates without replacement, row after row of a split.

    The draws depend on the seed and on a row's position in the split, not on the batch size.

    Attributes:
        items: Number of catalogue columns.
        count: Candidates per row; fewer where a user has met nearly everything.
        seed: Seed of the draws.
    """

    items: int
    count: int
    seed: int
    _rng: np.random.Generator = field(init=False)
    _rows_done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Starts at the first row of a split."""
        self._rng = np.random.default_rng(self.seed)

    def draw(self, seen: Pairs | None, targets: IntArray) -> Pairs:
        """Draws the candidates of the next rows.

        Args:
            seen: Cells that must not be drawn, or None.
            targets: `[rows]`, column of each row's target (never drawn), or MISSING.

        Returns:
            At most `count` cells per row, in row order.
        """
        rows = len(targets)
        banned = self._banned(seen, targets)
        # Twice as many as needed; rejecting banned and repeated ones keeps the draw uniform.
        draws = self._rng.integers(0, self.items, size=(rows, 2 * self.count))
        codes = (np.arange(rows)[:, None] * np.int64(self.items) + draws).ravel()
        codes = codes[self._is_first(codes, banned, rows)]
        row_of = codes // self.items
        found = np.bincount(row_of, minlength=rows)
        position = np.arange(len(codes)) - np.repeat(np.cumsum(found) - found, found)
        short = found < self.count
        codes = codes[(position < self.count) & ~short[row_of]]
        if short.any():
            banned = np.sort(banned)
        parts = [codes, *(self._draw_row(int(row), banned) for row in np.flatnonzero(short))]
        self._rows_done += rows
        merged = np.sort(np.concatenate(parts))
        return Pairs(*np.divmod(merged, self.items))

    def _is_first(self, codes: IntArray, banned: IntArray, rows: int) -> NDArray[np.bool_]:
        """Marks the first draw of each cell that is not banned, without sorting."""
        order = np.arange(len(codes), dtype=np.int32)
        # Only cells written here are read; of repeated ones the last assignment stays, hence
        # the reverse order.
        first = np.empty(rows * self.items, dtype=np.int32)
        first[codes[::-1]] = order[::-1]
        first[banned] = -1
        return first[codes] == order

    def _banned(self, seen: Pairs | None, targets: IntArray) -> IntArray:
        hit = np.flatnonzero(targets >= 0)
        codes = hit * np.int64(self.items) + targets[hit]
        if seen is not None:
            codes = np.concatenate((codes, seen.rows * np.int64(self.items) + seen.columns))
        return codes

    def _draw_row(self, row: int, banned: IntArray) -> IntArray:
        """Draws one row from its explicit complement, where rejection ran short."""
        start = row * np.int64(self.items)
        low, high = np.searchsorted(banned, (start, start + self.items))
        allowed = np.setdiff1d(np.arange(start, start + self.items), banned[low:high])
        generator = np.random.default_rng((self.seed, self._rows_done + row))
        size = min(self.count, len(allowed))
        return generator.choice(allowed, size=size, replace=False)


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of train that a config's `input.validation` keeps apart.

    Lists leave out what the user has in the rows that train, and the items of the row's own
    histories: a user who is held out whole has nothing else.

    Attributes:
        config: How the train split is read.
        met: Finds both; None: nothing is left out.
    """

    config: InputConfig
    met: KnownItems | None

    @classmethod
    def read(
        cls, version_dir: ReadablePath, manifest: Manifest, config: InputConfig, *, mask_seen: bool
    ) -> HeldOutRows:
        """Reads what users have in the rows that train, where rows have a user and an item.

        Args:
            version_dir: Directory of the dataset version.
            manifest: Its manifest.
            config: How the train split is read.
            mask_seen: Whether lists leave out what the user had met.

        Raises:
            InputDataError: A record is damaged.
        """
        is_known = {"user", "item"} <= set(find_counted_keys(manifest).features)
        if not mask_seen or not is_known:
            return cls(config, None)
        user, item = manifest.require_key("user"), manifest.require_key("item")
        trained = read_user_items(version_dir, manifest, config)
        size = int(manifest.schema[item].vocabulary_size or 0)
        return cls(config, KnownItems(item, (user, trained), manifest.histories, size))


FULL_UNSEEN = "full_unseen"
FULL_ALL = "full_all"
SAMPLED_GIVEN = "sampled_given"

_log = logging.getLogger("sluice.training.evaluate")


@dataclass(frozen=True)
class RankingBatch:
    """A batch of rows to rank.

    Attributes:
        features: The batch as it was read.
        targets: `[rows]`, catalogue column of the target, or MISSING.
        seen: Cells of items that the user had met, target and repeats excluded; None where the
            data set does not carry them.
        candidates: Cells of the sampled protocol; None where it is off.
    """

    features: dict[str, Any]
    targets: IntArray
    seen: Pairs | None
    candidates: Pairs | None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.targets)


def carries_seen(manifest: Manifest, split: str) -> bool:
    """Whether the records of a split hold the items that their user had met before."""
    return manifest.keys.seen is not None and split != TRAIN


def headline_protocol(manifest: Manifest, mask_seen: bool, split: str) -> str:
    """Returns the full protocol that a config asks for, as far as the split carries it."""
    return FULL_UNSEEN if mask_seen and carries_seen(manifest, split) else FULL_ALL


def warn_unmasked(manifest: Manifest, mask_seen: bool, split: str) -> None:
    """Says once that seen items should be masked but cannot be."""
    if mask_seen and not carries_seen(manifest, split):
        _log.warning(
            "split %r of dataset %r carries no seen items, so none can be masked: ranking %s",
            split,
            manifest.dataset_name,
            FULL_ALL,
        )


def require_rows(manifest: Manifest, split: str) -> None:
    """Refuses a split that has nothing to evaluate.

    Raises:
        ConfigError: The split does not exist.
        InputDataError: It has no record, or holds no events.
    """
    filled = [s.name for s in manifest.splits if s.rows and s.name not in ROLE_OF_SPLIT]
    allowed = f"a split with records: {', '.join(filled) or '(none)'}"
    if split in ROLE_OF_SPLIT:
        raise InputDataError(
            f"split {split!r} holds one record per {ROLE_OF_SPLIT[split]}, not events: there is "
            "no target to rank",
            received=split,
            allowed=allowed,
            fix="choose a split of events by --split",
        )
    if split not in {one.name for one in manifest.splits}:
        raise ConfigError(
            "there is no such split",
            received=split,
            allowed=allowed,
            fix=did_you_mean(split, filled),
        )
    if manifest.split(split).rows == 0:
        raise InputDataError(
            f"split {split!r} of dataset {manifest.dataset_name!r} version "
            f"{manifest.dataset_version} is empty: there is nothing to evaluate",
            received="0 records",
            allowed=allowed,
            fix="choose another split, or change `split` in the build config and build again",
        )


def describe_filter(
    data: TrainingData, split: str, evaluation_filter: tuple[FilterConfig, ...]
) -> dict[str, Any]:
    """Returns what files of metrics say of `evaluation.filter`: nothing where there is none.

    Args:
        data: The dataset version.
        split: The split that is measured.
        evaluation_filter: The filter.

    Raises:
        InputDataError: No row passes, a feature is unknown, or a shard is damaged.
        ConfigError: A value is not of its feature's type.
    """
    if not evaluation_filter:
        return {}
    conditions = [item.model_dump(mode="json") for item in evaluation_filter]
    rows, listed = data.filtered_rows(split, evaluation_filter), data.manifest.split(split).rows
    if not rows:
        raise TooFewRowsError(
            f"{EVALUATION_FILTER} leaves no row of the {split} split: there is nothing to measure",
            received=describe_conditions(conditions),
            allowed=f"a filter that at least one of its {listed:,} rows passes",
            fix="features hold encoded values, such as the ids of a vocabulary: `sluice inspect "
            "--head 5` shows them; or measure all rows: --set 'evaluation.filter=[]'",
        )
    return {"filter": {"conditions": conditions, "rows": rows, "of": listed}}


@dataclass(frozen=True)
class RankingReader:
    """Reads a split as ranking batches.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        index: Catalogue.
        inputs: Features that are needed besides the keys.
        batch_size: Rows, at most; fewer where the catalogue is large, so that memory stays flat.
    """

    version_dir: ReadablePath
    manifest: Manifest
    index: ItemIndex
    inputs: tuple[str, ...]
    batch_size: int

    def read(
        self,
        split: str,
        *,
        seen: bool,
        negatives: UniformNegatives | None = None,
        given: bool = False,
        optional: Sequence[str] = (),
        held_out: HeldOutRows | None = None,
        evaluation_filter: tuple[FilterConfig, ...] = (),
    ) -> Iterator[RankingBatch]:
        """Yields the batches of a split, each row once, in the order of the shards.

        Args:
            split: Name of the split.
            seen: Whether to read the seen items, where the split carries them.
            negatives: Draws the candidates of the sampled protocol.
            given: Whether to read the data set's own candidates.
            optional: Scalars that records may lack, read as ragged.
            held_out: Reads these rows of train alone.
            evaluation_filter: What rows must pass.

        Raises:
            InputDataError: The split is empty, or a record is damaged.
        """
        require_rows(self.manifest, split)
        keys = self.manifest.keys
        met = held_out.met if seen and held_out is not None else None
        seen = seen and carries_seen(self.manifest, split)
        ragged = [*optional, *([keys.seen] if seen and keys.seen else [])]
        ragged += [keys.candidates] if given and keys.candidates else []
        of_met = () if met is None else met.inputs
        item = self.manifest.require_key("item")
        names = tuple(dict.fromkeys((item, *of_met, *self.inputs, *ragged)))
        rows = max(1, min(self.batch_size, BLOCK_CELLS // len(self.index)))
        where = (self.version_dir, self.manifest)
        if held_out is None:
            dataset = build_eval_dataset(
                *where, split, rows, names, tuple(ragged), evaluation_filter
            )
        else:
            dataset = build_held_out_dataset(
                *where, held_out.config, rows, names, tuple(ragged), evaluation_filter
            )
        for features in read_batches(dataset, self.version_dir, self.manifest, split):
            batch = self._batch(features, seen, negatives, given)
            yield batch if met is None else replace(batch, seen=self._find_met(batch, met))

    def _batch(
        self,
        features: dict[str, tf.Tensor],
        seen: bool,
        negatives: UniformNegatives | None,
        given: bool,
    ) -> RankingBatch:
        keys = self.manifest.keys
        ids = np.asarray(features[self.manifest.require_key("item")], dtype=np.int64)
        targets = self.index.columns_of(ids)
        met = self._cells(features, keys.seen, targets) if seen and keys.seen else None
        candidates = None
        if given and keys.candidates:
            candidates = self._cells(features, keys.candidates, targets)
        elif negatives is not None:
            candidates = negatives.draw(met, targets)
        return RankingBatch(features, targets, met, candidates)

    def _find_met(self, batch: RankingBatch, met: KnownItems) -> Pairs:
        rows, items = (np.asarray(column) for column in met.find(batch.features))
        return build_pairs(rows, self.index.columns_of(items), batch.targets, len(self.index))

    def _cells(self, features: dict[str, tf.Tensor], name: str, targets: IntArray) -> Pairs:
        cells = read_cells(features[name], self.index)
        return build_pairs(cells.rows, cells.columns, targets, len(self.index))


def rank_by_protocol(
    scores: NDArray[np.float32], batch: RankingBatch, sampled: str | None
) -> dict[str, NDArray[np.float64]]:
    """Ranks the targets of a batch under every protocol that the batch allows.

    Args:
        scores: `[rows, items]`.
        batch: The rows.
        sampled: Name of the sampled protocol, or None.

    Returns:
        `[rows]` ranks by protocol name, `inf` for a target outside the catalogue.
    """
    full = rank_all(scores, batch.targets)
    ranks = {}
    if batch.seen is not None:
        ranks[FULL_UNSEEN] = rank_without(full, scores, batch.targets, batch.seen)
    ranks[FULL_ALL] = full
    if sampled is not None and batch.candidates is not None:
        ranks[sampled] = rank_among(scores, batch.targets, batch.candidates)
    return ranks


def count_missing(batch: RankingBatch, relevant: NDArray[np.bool_]) -> int:
    """Returns how many targets of the rows that are ranked are not in the catalogue."""
    return int(np.count_nonzero((batch.targets == MISSING) & relevant))


@dataclass(frozen=True)
class Relevance:
    """What says that a row's item is relevant: that such a row trains as a positive.

    Attributes:
        conditions: What its labels must pass; records may lack these.
        weight: Feature of the rows' weights, as a row of weight 0 teaches nothing; None: none.
    """

    conditions: tuple[FilterConfig, ...] = ()
    weight: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read; records may lack them."""
        names = [item.feature for item in self.conditions]
        return tuple(dict.fromkeys((*names, *([] if self.weight is None else [self.weight]))))

    def describe(self) -> str:
        """Returns in words what rows must pass."""
        asked = [item.model_dump(mode="json") for item in self.conditions]
        asked += [{"feature": self.weight, "op": ">", "value": 0}] if self.weight else []
        return describe_conditions(asked)


def find_relevant_rows(
    features: Mapping[str, Any], rows: int, relevance: Relevance
) -> NDArray[np.bool_]:
    """Returns which rows' items are relevant, `[rows]`.

    Args:
        features: A batch; what `relevance` reads is `[rows]`, or ragged where records may lack it.
        rows: Its rows.
        relevance: What says it (`find_relevance`).
    """
    relevant = np.ones(rows, bool)
    for item in relevance.conditions:
        relevant &= find_passing(item, *_read_optional(features[item.feature], 0))
    if relevance.weight is None:
        return relevant
    weights, _ = _read_optional(features[relevance.weight], 1)
    return relevant & (weights > 0)


def _read_optional(values: Any, default: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns the value of each row, and which rows lack it."""
    if isinstance(values, tf.RaggedTensor):
        is_absent = values.row_lengths().numpy() == 0
        padded = values.to_tensor(default_value=default, shape=[None, 1])
        return padded[:, 0].numpy(), is_absent
    found = np.asarray(values).reshape(-1)
    return found, np.zeros(len(found), bool)


def learns_label(model: ModelConfig) -> bool:
    """Whether the objective learns the label of rows, not which items belong to them."""
    objective = getattr(model, "objective", None)
    return isinstance(objective, BinaryConfig) and objective.reads_label


def find_relevance(config: TrainConfig, manifest: Manifest, split: str = TRAIN) -> Relevance:
    """Returns what says which rows of a split are relevant; without a condition all are.

    What trains as a positive is. An item that was shown and not taken is what a binary objective
    learns to rank below others; another one takes each row that it reads for a positive, and does
    not read rows whose label `input` leaves out. Of a split with drawn negatives these are none.
    """
    objective, label = getattr(config.model, "objective", None), manifest.keys.label
    if isinstance(objective, ItemSettings) and objective.positives == "every_row":
        return Relevance()
    asked = _list_label_conditions(config.input, manifest)
    if label is not None and (learns_label(config.model) or manifest.counts.drawn.get(split)):
        asked = [FilterConfig(feature=label, op=">", value=0), *asked]
    return Relevance(tuple(asked), manifest.find_weight())


def _list_label_conditions(config: InputConfig, manifest: Manifest) -> list[FilterConfig]:
    labels = [spec.name for spec in manifest.schema.by_role("label")]
    asked = [item for item in config.filter if item.feature in labels]
    balance = config.class_balance
    if balance is not None and balance.feature in labels:
        drawn = tuple(value for value, share in balance.shares.items() if share)
        asked.append(FilterConfig(feature=balance.feature, op="in", value=drawn))
    return asked


def require_relevant(relevance: Relevance, rows: int, irrelevant: int) -> None:
    """Refuses a split none of whose rows has a relevant item.

    Args:
        relevance: What says which are (`find_relevance`).
        rows: Rows that are.
        irrelevant: Rows that are not.

    Raises:
        InputDataError: There is none.
    """
    if not rows:
        raise InputDataError(
            "no row has a relevant item: none would train as a positive",
            received=f"{irrelevant:,} rows",
            allowed=f"a row with {relevance.describe()}",
            fix="measure another split, or more of it (fit.validation.batches), or say that every "
            "row counts: model.objective.positives=every_row",
        )
