"""Metrics of ranked lists that stand in a file, against the held-out events of a split.

Lists are JSON lines, also with `.gz`, or Parquet, as `sluice predict` writes them: `user` or `row`,
and `items`, best first; `scores` tell which items tie. Lists of users are measured against all
held-out items of the user, those of rows against the row's item.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError, InputDataError
from conf.storage.table_files import open_parquet
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import Vocabulary, read_key_vocabulary, read_whole_key
from training.evaluation.item_index import MISSING, ItemIds, read_item_features
from training.evaluation.metrics import FloatArray, IntArray, RankMeasures, measure
from training.evaluation.protocols import (
    Relevance,
    describe_filter,
    find_relevance,
    require_rows,
)
from training.evaluation.scored_rows import GroupSums
from training.evaluation.users import (
    HeldOutItems,
    UserReader,
    rank_in_lists,
    read_held_out,
    spread_ranks,
)
from training.input.batches import read_split
from training.reader.filters import EVALUATION_FILTER
from training.reader.training_data import TrainingData

Entry = tuple[int, dict[str, Any]]
"""A list of a file: its number, from 1, and what stands there."""
LISTS_AT_ONCE = 4096
UNKNOWN = -1
_MOST_ROWS = 2**63
# What no vocabulary has, such as null, is an unknown user or item.
_KEYS = (str, int, float, type(None))


def find_ids(vocabulary: Vocabulary | None, values: Iterable[Any]) -> IntArray:
    """Returns the ids of raw values by a key's vocabulary, UNKNOWN where there is none.

    Values are compared as text, as in requests: "7" is user 7, and 7 the user named "7". Without a
    vocabulary they are the ids.
    """
    if vocabulary is None:
        keys = map(read_whole_key, values)
        return np.array([UNKNOWN if key is None else key for key in keys], np.int64)
    # Half a character is in no vocabulary.
    texts = [str(v).encode(errors="surrogatepass") if isinstance(v, int | str) else None
             for v in values]  # fmt: skip
    tokens = vocabulary.tokens.cast(pa.string()).cast(pa.binary())
    found = pc.index_in(pa.array(texts, pa.binary()), tokens).fill_null(-1).to_numpy()
    return np.where(found < 0, UNKNOWN, found + vocabulary.first_id)


def measure_lists(
    trained: TrainedModel, path: Path, split: str, measures: RankMeasures
) -> dict[str, Any]:
    """Measures the lists of a file; cut-offs behind the end of the longest list are left out."""
    require_rows(trained.manifest, split)
    key, longest = _survey(path)
    evaluation_filter = trained.config.evaluation.filter
    if key == "row" and evaluation_filter:
        raise ConfigError(
            "lists named by `row` are measured against every row of the split, and "
            f"{EVALUATION_FILTER} leaves some out",
            received=str(path),
            fix="measure all rows: --set 'evaluation.filter=[]'",
        )
    data = TrainingData(trained.version_dir, trained.manifest)
    described = describe_filter(data, split, evaluation_filter)
    kept = [k for k in measures.ks if k <= longest]
    if not kept:
        raise ConfigError(
            "the lists are shorter than every cut-off",
            received=f"{longest} items, evaluation.ks = {', '.join(map(str, measures.ks))}",
            fix="write longer lists (`predict --k`), or measure smaller cut-offs",
        )
    where, per_user = (trained.version_dir, trained.manifest), key == "user"
    item, size = trained.manifest.require_key("item"), trained.config.evaluation.batch_size
    items, _ = read_item_features(*where, (item,), size)
    relevance = find_relevance(trained.config, trained.manifest, split)
    held_out = (read_held_out if per_user else _read_targets)(trained, split, items, relevance)
    users = read_key_vocabulary(*where, trained.manifest.require_key("user")) if per_user else None
    sums = _Measured(trained, items, held_out, replace(measures, ks=kept), longest)
    entries = read_entries(path)
    while lists := list(islice(entries, LISTS_AT_ONCE)):
        own = [entry.get(key) for _, entry in lists]
        sums.update(lists, find_ids(users, own) if per_user else np.array(own, np.int64), path)
    met = _count_met_before(trained, split, items, held_out) if per_user else None
    return {**described, "per": key, "ks": kept, "met_before": met, **sums.result()}


class _Measured:
    """Running metrics of lists, and which owners had one."""

    def __init__(
        self,
        trained: TrainedModel,
        items: ItemIds,
        held_out: HeldOutItems,
        measures: RankMeasures,
        longest: int,
    ) -> None:
        self._items, self._held_out, self._longest = items, held_out, longest
        where, key = (trained.version_dir, trained.manifest), trained.manifest.require_key("item")
        self._vocabulary = read_key_vocabulary(*where, key)
        self._measures, self._means = measures, GroupSums()
        self._had = np.zeros(len(held_out.users), bool)
        self._others = 0

    def update(self, lists: Sequence[Entry], owners: IntArray, path: Path) -> None:
        place = np.searchsorted(self._held_out.users, owners)
        place = np.minimum(place, max(len(self._had) - 1, 0))
        known = np.flatnonzero((self._held_out.users[place] == owners) & (owners != UNKNOWN))
        self._others += len(owners) - len(known)
        own = [lists[row] for row in known.tolist()]
        self._refuse_repeated(own, place[known], path)
        if not own:
            return
        columns, scores = self._lay_out(own, path)
        relevant = self._held_out.find(owners[known])
        ranks = rank_in_lists(scores, columns, relevant, self._longest)
        self._means.add(measure(ranks, self._measures, "user"))

    def _refuse_repeated(self, lists: Sequence[Entry], place: IntArray, path: Path) -> None:
        again = self._had[place]
        again[np.setdiff1d(np.arange(len(place)), np.unique(place, return_index=True)[1])] = True
        if again.any():
            number, entry = lists[int(again.argmax())]
            raise InputDataError(
                f"{path}, row {number}: a second list of the same name",
                received=json.dumps(entry.get("user", number)),
                fix="leave one list per user",
            )
        self._had[place] = True

    def _lay_out(self, lists: Sequence[Entry], path: Path) -> tuple[IntArray, FloatArray]:
        """Returns catalogue columns and scores `[rows, longest]`; MISSING and -inf at the ends."""
        columns = np.full((len(lists), self._longest), MISSING, np.int64)
        scores = np.full((len(lists), self._longest), -np.inf)
        for place, (number, entry) in enumerate(lists):
            items, count = entry["items"], len(entry["items"])
            scores[place, :count] = entry.get("scores") or -np.arange(count)
            if len(set(map(str, items))) < count:
                raise InputDataError(
                    f"{path}, row {number}: an item is there twice",
                    received=json.dumps(items)[:200],
                )
            if (np.diff(scores[place, :count]) > 0).any():
                raise InputDataError(
                    f"{path}, row {number}: the items are not in order",
                    received=f"scores {entry['scores'][:5]} …",
                    fix="write the best item first, or leave `scores` out",
                )
        flat = [item for _, entry in lists for item in entry["items"]]
        columns[np.isfinite(scores)] = self._items.columns_of(find_ids(self._vocabulary, flat))
        return columns, scores

    def result(self) -> dict[str, Any]:
        without = self._held_out.users[~self._had]
        if len(without):  # Nothing was recommended to them.
            relevant = self._held_out.find(without)
            nothing = np.zeros(0, np.int64)
            ranks = spread_ranks(relevant.rows, len(without), nothing, nothing.astype(float))
            self._means.add(measure(ranks, self._measures, "user"))
        return {
            **self._held_out.describe(),
            "without_list": len(without),
            "lists_of_others": self._others,
            "metrics": self._means.means(),
        }


def _count_met_before(
    trained: TrainedModel, split: str, items: ItemIds, held_out: HeldOutItems
) -> int:
    """Counts the held-out items that their user had met before the split, 0 if such are listed."""
    reader = UserReader(trained, split, items, (), held_out)
    return sum(int(batch.find_seen().sum()) for batch in reader.read()) if reader.masks else 0


def _read_targets(
    trained: TrainedModel, split: str, items: ItemIds, relevance: Relevance
) -> HeldOutItems:
    """Returns the item of each row of a split; rows are named by their numbers, from 1."""
    key, read = trained.manifest.require_key("item"), relevance.inputs
    where, size = (trained.version_dir, trained.manifest), trained.config.evaluation.batch_size
    columns, relevant = [], []
    for batch in read_split(*where, split, size, (key, *read), read):
        columns.append(items.columns_of(np.asarray(batch[key], np.int64)))
        relevant.append(relevance.find(batch, len(columns[-1])))
    is_relevant = np.concatenate(relevant)
    rows, found = 1 + np.flatnonzero(is_relevant), np.concatenate(columns)[is_relevant]
    not_relevant = len(is_relevant) - len(rows)
    relevance.require(len(rows), not_relevant)
    return HeldOutItems(rows, np.arange(len(rows) + 1), found, 0, not_relevant)


def _survey(path: Path) -> tuple[str, int]:
    """Returns what names the lists, `user` or `row`, and the length of the longest."""
    longest, key, has_rows = 0, "", True
    users: list[str] = []
    for row, entry in read_entries(path):
        users.append(str(entry.get("user")))
        has_rows = has_rows and "row" in entry
        named = next((name for name in ("user", "row") if name in entry), None)
        if named is None or (key and named != key):
            raise ConfigError(
                f"{path}, row {row}: nothing tells which events a list is to be measured against",
                received=", ".join(entry),
                allowed="`user` in every row, or `row` in every row",
            )
        key, longest = named, max(longest, len(entry["items"]))
    if not longest:
        raise InputDataError("the file has no lists", received=str(path))
    # Rows of a split have lists of their own, and a user may have several.
    return "row" if has_rows and len(set(users)) < len(users) else key, longest


def read_entries(path: Path) -> Iterator[Entry]:
    """Yields the lists of a file, numbered from 1."""
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)
    try:
        for number, row in enumerate(rows, 1):
            yield number, _parse(path, number, row)
    except FileNotFoundError as error:
        raise InputDataError("there is no such file of lists", received=str(path)) from error
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputDataError(f"{path} cannot be read", received=str(error)) from error


def _read_parquet(path: Path) -> Iterator[Any]:
    with open_parquet(path) as file:
        for batch in file.iter_batches(LISTS_AT_ONCE):
            yield from batch.to_pylist()


def _read_lines(path: Path) -> Iterator[Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        yield from lines


def _parse(path: Path, number: int, row: str | dict[str, Any]) -> dict[str, Any]:
    try:
        entry = json.loads(row) if isinstance(row, str) else row
        is_list = _is_list(entry["items"], entry.get("scores") or (), entry.get("row", 0))
        if is_list and type(entry.get("user")) in _KEYS:
            own = {"user": _read_key(entry["user"])} if "user" in entry else {}
            return {**entry, "items": list(map(_read_key, entry["items"])), **own}
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    raise InputDataError(
        f"{path}, row {number}: not a ranked list",
        received=repr(row)[:200],
        allowed='{"user": …, "items": […]} or {"row": 1, "items": […]}, with as many `scores` '
        "as items, all finite numbers, or none",
    )


def _is_list(items: Any, scores: Any, row: Any) -> bool:
    is_list = isinstance(items, list) and len(scores) in (0, len(items))
    # Of a truth value `type` is bool, of NaN the order is none.
    are_numbers = all(type(s) in (int, float) and math.isfinite(s) for s in scores)
    are_keys = is_list and all(type(key) in _KEYS for key in items)
    return are_keys and are_numbers and type(row) is int and row < _MOST_ROWS


def _read_key(key: Any) -> Any:
    """Returns a key; 10.0, which pandas makes of 10 beside a missing value, is 10."""
    is_whole = isinstance(key, float) and key.is_integer() and abs(key) < 1 << 53
    return int(key) if is_whole else key


def refuse_later_lists(card: dict[str, Any], path: Path, split: str) -> None:
    """Refuses lists of the run itself that know the events they would be measured against."""
    order = ("train", "validation", "test")
    made = card.get("recommendations") or {}
    is_own = "file" in made and Path(made["file"]).resolve() == path.resolve()
    if not is_own or made.get("input") or split not in order:
        return
    as_of = made.get("as_of") or ("test" if made.get("split") == "users" else None)
    if as_of is not None and order.index(as_of) >= order.index(split):
        raise ConfigError(
            f"these lists know the events of {split}, and leave them out as seen",
            received=f"{path}: users as of the end of {as_of}",
            fix=f"write them by `sluice predict --as-of {order[max(order.index(split) - 1, 0)]}`",
        )
