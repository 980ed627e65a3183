"""Ranking protocols: which rows count, and against which items a row's target is ranked.

    full_unseen    the whole catalogue but what the user had met before the event
    full_all       the whole catalogue
    sampled_given  candidates that come with the data set
    sampled_<n>    n unseen items, drawn uniformly

Sampled ranks look far better than full ones on the same model and must not be compared with
them (Krichene & Rendle 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import ConfigError, InputDataError, TooFewRowsError, did_you_mean
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.splits import TRAIN
from conf.training.input import FilterConfig, InputConfig, describe_conditions
from conf.training.models import learns_label
from conf.training.objectives import ItemSettings
from conf.training.train import TrainConfig
from training.evaluation.item_index import (
    BLOCK_CELLS,
    ItemIndex,
    Pairs,
    build_pairs,
    count_not_below,
    number_within,
    rank_all,
    rank_among,
    read_cells,
)
from training.evaluation.metrics import FloatArray, IntArray
from training.input.batches import Features, read_split
from training.input.train_counts import find_counted_keys
from training.objectives.user_items import KnownItems, read_user_items
from training.reader.feature_columns import ROLE_OF_SPLIT
from training.reader.filters import EVALUATION_FILTER, find_passing
from training.reader.training_data import TrainingData

FULL_UNSEEN = "full_unseen"
FULL_ALL = "full_all"
FULL = (FULL_UNSEEN, FULL_ALL)
SAMPLED_GIVEN = "sampled_given"

_log = logging.getLogger("sluice.training.evaluate")


class UniformNegatives:
    """Draws `count` of the items (columns) without replacement, row after row of a split.

    The draws depend on the seed and on a row's position in the split, not on the batch size.
    """

    def __init__(self, items: int, count: int, seed: int) -> None:
        self._items, self._count, self._seed = items, count, seed
        self._rng, self._rows_done = np.random.default_rng(seed), 0

    def draw(self, seen: Pairs | None, targets: IntArray) -> Pairs:
        """Draws for the next rows: `count` items of each that are neither target nor seen."""
        rows, items = len(targets), self._items
        banned = self._find_banned(seen, targets)
        # Twice as many as needed; rejecting banned and repeated ones keeps the draw uniform.
        draws = self._rng.integers(0, items, size=(rows, 2 * self._count))
        codes = (np.arange(rows)[:, None] * np.int64(items) + draws).ravel()
        codes = codes[self._is_first(codes, banned, rows)]
        row_of = codes // items
        found = np.bincount(row_of, minlength=rows)
        short = found < self._count
        codes = codes[(number_within(found) < self._count) & ~short[row_of]]
        if short.any():
            banned = np.sort(banned)
        parts = [codes, *(self._draw_row(int(row), banned) for row in np.flatnonzero(short))]
        self._rows_done += rows
        return Pairs(*np.divmod(np.sort(np.concatenate(parts)), items))

    def _is_first(self, codes: IntArray, banned: IntArray, rows: int) -> NDArray[np.bool_]:
        order = np.arange(len(codes), dtype=np.int32)
        # Only cells written here are read; of repeated ones the last assignment stays, hence
        # the reverse order.
        first = np.empty(rows * self._items, dtype=np.int32)
        first[codes[::-1]] = order[::-1]
        first[banned] = -1
        return np.asarray(first[codes] == order)

    def _find_banned(self, seen: Pairs | None, targets: IntArray) -> IntArray:
        hit = np.flatnonzero(targets >= 0)
        codes = hit * np.int64(self._items) + targets[hit]
        if seen is not None:
            codes = np.concatenate((codes, seen.rows * np.int64(self._items) + seen.columns))
        return codes

    def _draw_row(self, row: int, banned: IntArray) -> IntArray:
        """Draws for a row whose user has met so much that too few draws were left."""
        start = row * np.int64(self._items)
        low, high = np.searchsorted(banned, (start, start + self._items))
        allowed = np.setdiff1d(np.arange(start, start + self._items), banned[low:high])
        generator = np.random.default_rng((self._seed, self._rows_done + row))
        return generator.choice(allowed, size=min(self._count, len(allowed)), replace=False)


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of train that `input.validation` holds out, and what users met; None: not masked."""

    config: InputConfig
    met: KnownItems | None

    @classmethod
    def read(
        cls, version_dir: ReadablePath, manifest: Manifest, config: InputConfig, *, mask_seen: bool
    ) -> HeldOutRows:
        """Reads what users have met from the rows that train, where it is to be masked."""
        is_known = {"user", "item"} <= set(find_counted_keys(manifest).features)
        if not mask_seen or not is_known:
            return cls(config, None)
        user, item = manifest.require_key("user"), manifest.require_key("item")
        trained = read_user_items(version_dir, manifest, config)
        size = int(manifest.schema[item].vocabulary_size or 0)
        return cls(config, KnownItems(item, (user, trained), manifest.histories, size))


def carries_seen(manifest: Manifest, split: str) -> bool:
    """Whether rows of a split hold what their user had met; those of train do not."""
    return manifest.keys.seen is not None and split != TRAIN


def find_candidates(manifest: Manifest, split: str) -> str | None:
    """Returns the feature of the candidates that rows of a split bring; None: they bring none."""
    name = manifest.keys.candidates
    values = manifest.statistics.get(split, {}).get(name or "", {}).get("values")
    return None if values == 0 else name


def headline_protocol(manifest: Manifest, mask_seen: bool, split: str) -> str:
    return FULL_UNSEEN if mask_seen and carries_seen(manifest, split) else FULL_ALL


def warn_unmasked(manifest: Manifest, mask_seen: bool, split: str) -> None:
    if mask_seen and not carries_seen(manifest, split):
        _log.warning(
            "split %r of dataset %r carries no seen items, so none can be masked: ranking %s",
            split,
            manifest.dataset_name,
            FULL_ALL,
        )


def require_rows(manifest: Manifest, split: str) -> None:
    filled = [s.name for s in manifest.splits if s.rows and s.name not in ROLE_OF_SPLIT]
    allowed = f"a split with records: {', '.join(filled) or '(none)'}"
    if split in ROLE_OF_SPLIT:
        raise InputDataError(
            f"split {split!r} holds one record per {ROLE_OF_SPLIT[split]}, and no target to rank",
            received=split,
            allowed=allowed,
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
            f"split {split!r} is empty: there is nothing to evaluate",
            received=f"dataset {manifest.dataset_name!r} version {manifest.dataset_version}",
            allowed=allowed,
        )


def require_passing(conditions: Iterable[Mapping[str, Any]], rows: int, of: str) -> None:
    """Refuses an `evaluation.filter` that leaves none of some rows."""
    if not rows:
        raise TooFewRowsError(
            f"{EVALUATION_FILTER} leaves no row to measure",
            received=f"{describe_conditions(conditions)}: none of {of}",
            fix="features hold encoded values, such as the ids of a vocabulary: `sluice inspect "
            "--head 5` shows them; or measure all rows: --set 'evaluation.filter=[]'",
        )


def describe_filter(
    data: TrainingData, split: str, evaluation_filter: tuple[FilterConfig, ...]
) -> dict[str, Any]:
    """Conditions of `evaluation.filter`, and the rows that they leave of how many."""
    if not evaluation_filter:
        return {}
    conditions = [item.model_dump(mode="json") for item in evaluation_filter]
    rows, listed = data.filtered_rows(split, evaluation_filter), data.manifest.split(split).rows
    require_passing(conditions, rows, f"{listed:,} rows of the {split} split")
    return {"filter": {"conditions": conditions, "rows": rows, "of": listed}}


@dataclass(frozen=True)
class RankingBatch:
    """Rows with what they are ranked against.

    `targets` `[rows]` are columns of the catalogue, or MISSING; `seen` (None: not read) and
    `candidates` are cells without the targets.
    """

    features: dict[str, Any]
    targets: IntArray
    seen: Pairs | None
    candidates: Pairs | None

    @property
    def rows(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class RankingReader:
    """Reads rows of a split, fewer at a time where the catalogue is large."""

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
        """Yields the rows in order; `seen` as far as rows or `held_out` tell what users had met.

        Candidates are `given` by rows, or drawn by `negatives`; records may lack `optional` ones.
        """
        require_rows(self.manifest, split)
        keys, item = self.manifest.keys, self.manifest.require_key("item")
        met = held_out.met if seen and held_out is not None else None
        seen_key = keys.seen if seen and carries_seen(self.manifest, split) else None
        given_key = keys.candidates if given else None
        ragged = [*optional, *(name for name in (seen_key, given_key) if name)]
        names = (item, *(() if met is None else met.inputs), *self.inputs, *ragged)
        rows = max(1, min(self.batch_size, BLOCK_CELLS // len(self.index)))
        how = (rows, tuple(dict.fromkeys(names)), ragged, evaluation_filter)
        own = None if held_out is None else held_out.config
        for features in read_split(self.version_dir, self.manifest, split, *how, held_out=own):
            targets = self.index.columns_of(np.asarray(features[item], dtype=np.int64))
            known = self._find_cells(features, seen_key, targets)
            candidates = self._find_cells(features, given_key, targets)
            if given_key is None and negatives is not None:
                candidates = negatives.draw(known, targets)
            batch = RankingBatch(features, targets, known, candidates)
            yield batch if met is None else replace(batch, seen=self._find_met(batch, met))

    def _find_met(self, batch: RankingBatch, met: KnownItems) -> Pairs:
        rows, items = (np.asarray(column) for column in met.find(batch.features))
        return build_pairs(rows, self.index.columns_of(items), batch.targets, len(self.index))

    def _find_cells(self, features: Features, name: str | None, targets: IntArray) -> Pairs | None:
        if name is None:
            return None
        cells = read_cells(features[name], self.index)
        return build_pairs(cells.rows, cells.columns, targets, len(self.index))


def rank_by_protocol(
    scores: NDArray[np.float32], batch: RankingBatch, sampled: str | None
) -> dict[str, FloatArray]:
    """Ranks targets by scores `[rows, items]` under each protocol that has candidates."""
    full = rank_all(scores, batch.targets)
    ranks = {}
    if batch.seen is not None:
        ranks[FULL_UNSEEN] = full - count_not_below(scores, batch.targets, batch.seen)
    ranks[FULL_ALL] = full
    if sampled is not None and batch.candidates is not None:
        ranks[sampled] = rank_among(scores, batch.targets, batch.candidates)
    return ranks


@dataclass(frozen=True)
class Relevance:
    """What says which rows have a relevant item: all conditions hold, the weight is above 0."""

    conditions: tuple[FilterConfig, ...] = ()
    weight: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        names = [item.feature for item in self.conditions]
        return tuple(dict.fromkeys((*names, *([] if self.weight is None else [self.weight]))))

    def find(self, features: Features, rows: int) -> NDArray[np.bool_]:
        relevant = np.ones(rows, bool)
        for item in self.conditions:
            relevant &= find_passing(item, *_read_optional(features[item.feature], 0))
        if self.weight is not None:
            relevant &= _read_optional(features[self.weight], 1)[0] > 0
        return relevant

    def require(self, rows: int, irrelevant: int) -> None:
        if rows:
            return
        asked = [item.model_dump(mode="json") for item in self.conditions]
        asked += [{"feature": self.weight, "op": ">", "value": 0}] if self.weight else []
        raise InputDataError(
            "no row has a relevant item: none would train as a positive",
            received=f"{irrelevant:,} rows",
            allowed=f"a row with {describe_conditions(asked)}",
            fix="measure another split, or more of it (fit.validation.batches), or say that every "
            "row counts: model.objective.positives=every_row",
        )


def _read_optional(values: Any, default: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A scalar of each row, and whether it is absent."""
    if isinstance(values, tf.RaggedTensor):
        is_absent = values.row_lengths().numpy() == 0
        padded = values.to_tensor(default_value=default, shape=[None, 1])
        return padded[:, 0].numpy(), is_absent
    found = np.asarray(values).reshape(-1)
    return found, np.zeros(len(found), bool)


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
