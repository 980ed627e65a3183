"""What rows get: a score, a list or a vector each, by one plan for both engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from conf.artefacts.export import DEFAULT_SIGNATURE, RANK_ITEMS, Give
from conf.errors import ConfigError, InputDataError
from conf.schema import PAD_ID
from conf.storage.table_files import to_arrow
from training.apply.export import Export, Items
from training.apply.ranker import Ranker, RowInputs, name_signature
from training.evaluation.item_index import Pairs, TopK
from training.raw_inputs.files import RawFile
from training.reader.feature_columns import ROLE_OF_SPLIT

EMBEDDING = "embedding"


@dataclass(frozen=True)
class Asked:
    """What a user asks for; None: what fits the model and the rows, as its run says."""

    give: Give | None = None
    k: int | None = None
    task: str | None = None
    candidates: RawFile | None = None
    keep_seen: bool = False

    def list_options(self) -> list[str]:
        """Returns the options that are given and are about lists alone."""
        values = {"--k": self.k, "--task": self.task, "--candidates": self.candidates}
        given = [name for name, value in values.items() if value is not None]
        return [*given, *(["--keep-seen"] if self.keep_seen else [])]


@dataclass(frozen=True)
class Source:
    """Rows of a split, of users as of one (all, or those of a file), or of a file.

    By default those of all users, or of `test`.
    """

    split: str | None = None
    as_of: str | None = None
    users: RawFile | None = None
    file: RawFile | None = None


@dataclass(frozen=True)
class Answers:
    """What each row gets; `has_pool`: all have the same candidates, whatever their own."""

    give: Give
    k: int
    task: str | None = None
    mask_seen: bool = False
    has_pool: bool = False


@dataclass(frozen=True)
class Rows:
    """Some rows; `key` is the column that names them: `user`, `row`, `id`, or that of a file."""

    key: str
    names: pa.Array  # null of a user whose name is not known
    inputs: RowInputs
    first: int = 1  # number of the first one
    seen: Pairs | None = None  # cells of items that each has met; None: not asked, or not known
    candidates: Pairs | None = None  # cells of items to rank for each; None: all items
    numbers: pa.Array | None = None  # in their split, beside the names of users; None: names alone


def plan_answers(export: Export, asked: Asked, source: Source) -> Answers:
    """Returns what each row gets; refuses what the model cannot give, and options without use."""
    options, give = asked.list_options(), asked.give
    holds_items = source.split is not None and source.split not in ROLE_OF_SPLIT
    is_scored = export.is_ranking and (source.file is not None or not export.has_items)
    if give is None and (options or source.as_of or source.users):
        give = Give.LISTS
    elif give is None:
        give = Give.SCORES if holds_items or is_scored else Give.LISTS
    if options and give is not Give.LISTS:
        raise ConfigError(f"these options are about lists, and rows get {give}",
                          received=" ".join(options), fix="say --give lists")  # fmt: skip
    for signature in find_signatures(export.card, give):
        export.find_inputs(signature)
    defaults = export.card["lists"]["defaults"]
    return Answers(
        give,
        asked.k or int(defaults["k"]),
        asked.task or (defaults["task"] if export.is_ranking else None),
        give is Give.LISTS and bool(defaults["mask_seen"]) and not asked.keep_seen,
        asked.candidates is not None,
    )


def find_signatures(card: Mapping[str, Any], give: Give) -> tuple[str, ...]:
    """Returns the names of the signatures that are called for rows of raw values."""
    is_ranking = "outputs" in card
    if give is Give.LISTS:
        return (RANK_ITEMS if is_ranking else Give.USER_EMBEDDING,)
    if give is Give.SCORES and not is_ranking:
        return (Give.USER_EMBEDDING, Give.ITEM_EMBEDDING)
    return (DEFAULT_SIGNATURE if give is Give.SCORES else give,)


def find_row_inputs(
    export: Export, give: Give, *, is_encoded: bool = False
) -> list[Mapping[str, Any]]:
    """Returns what `export.json` says of the features that are read of a row."""
    names = (name_signature(s, is_encoded) for s in find_signatures(export.card, give))
    found = {item["name"]: item for name in names for item in export.find_inputs(name)}
    return list(found.values())


def answer(ranker: Ranker, answers: Answers, rows: Rows) -> dict[str, pa.Array]:
    """Returns what rows get, in columns; what names them is the first."""
    if answers.give is Give.LISTS:
        found = ranker.rank(rows.inputs, answers.k, rows.candidates, rows.seen)
        return build_lists(rows, found, ranker.items)
    if answers.give is Give.SCORES:
        values = ranker.score(rows.inputs)
    else:
        values = {EMBEDDING: ranker.embed(rows.inputs, answers.give)}
    if rows.key in values:
        raise ConfigError("the id has the name of a score, which is a column too",
                          received=rows.key, fix="rename the column of the input")  # fmt: skip
    check_numbers(values, rows.first)
    return {rows.key: rows.names, **{name: to_arrow(value) for name, value in values.items()}}


def build_lists(rows: Rows, found: TopK, items: Items) -> dict[str, pa.Array]:
    """Returns the lists of rows, best first, without those of users whose name is not known."""
    kept = rows.names.is_valid().to_numpy(zero_copy_only=False) | (rows.key != "user")
    lengths = np.count_nonzero(found.ids != PAD_ID, axis=1)[kept]
    inside = np.arange(found.ids.shape[1]) < lengths[:, np.newaxis]
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    columns = items.columns_of(found.ids[kept][inside]).astype(np.int32)
    entries = pa.DictionaryArray.from_arrays(pa.array(columns), items.keys)
    lists = {
        rows.key: rows.names.filter(pa.array(kept)),
        "items": pa.ListArray.from_arrays(ends, entries),
        "scores": pa.ListArray.from_arrays(ends, pa.array(found.scores[kept][inside])),
    }
    return lists if rows.numbers is None else {**lists, "row": rows.numbers.filter(pa.array(kept))}


def check_numbers(scores: Mapping[str, np.ndarray], first: int) -> None:
    """Refuses scores `[rows, …]` that are not finite; `first` is the number of the first row."""
    for task, values in scores.items():
        bad = ~np.isfinite(values)
        if bad.any():
            row = first + int(np.argwhere(bad)[0][0])
            raise InputDataError(
                f"the score of task {task} is no number",
                received=f"{values[bad][0]} in row {row}",
                fix="look for numbers in that row that are far from all that the model was trained "
                "on, or train again",
            )
