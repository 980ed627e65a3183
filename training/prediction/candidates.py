"""Candidates from a file: items to rank instead of the whole catalogue.

A file that holds nothing but the item's key names items of the catalogue. One that holds the raw
inputs of an item too describes items, which the dataset need not know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.errors import InputDataError
from conf.key_lists import describe_unmatched
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import Vocabulary, find_named_ids, is_named
from training.evaluation.item_index import ItemIds
from training.evaluation.metrics import MISSING, IntArray
from training.evaluation.users_as_of import take_rows
from training.export.serving_encoders import ServingEncoders
from training.input.batches import Batch
from training.prediction.result_files import render_ids
from training.prediction.scores import read_encoders
from training.raw_inputs.files import RawFile, RawReader, find_key_input, read_key_rows
from training.raw_inputs.inputs import SourceNames

_log = logging.getLogger("sluice.training.predict")


@dataclass(frozen=True)
class Candidates(ItemIds):
    """Items of a file, each once.

    Attributes:
        ids: `[items]` int64, ascending; below 0 for items that the dataset does not know.
        tokens: Their raw keys, `[items]`.
        features: What the model reads of them, a row each; None: they are those of the catalogue.
        file: Where they are from.
        rows: Where each stands there, from 0.
    """

    tokens: pa.Array
    features: Batch | None
    file: RawFile
    rows: IntArray

    def find_in(self, catalog: ItemIds) -> IntArray:
        """Returns the columns of the catalogue that are candidates, ascending.

        Candidates that the catalogue does not have are left out with a warning.

        Raises:
            InputDataError: The catalogue has none of them.
        """
        columns = catalog.columns_of(self.ids)
        unknown = np.flatnonzero(columns == MISSING)
        unknown = unknown[np.argsort(self.rows[unknown])]
        report_unknown(self.file, len(self), self.tokens.take(pa.array(unknown)))
        return np.sort(columns[columns != MISSING])


def report_unknown(file: RawFile, given: int, unknown: pa.Array) -> None:
    """Warns of candidates that the catalogue does not have: they are left out.

    Args:
        file: Where they are from.
        given: How many candidates it has.
        unknown: Raw keys of those that the catalogue does not have, in the file's order.

    Raises:
        InputDataError: The catalogue has none of them.
    """
    names = render_ids(unknown)
    if len(names) == given:
        raise InputDataError(
            f"no candidate of {file.path} is in the catalogue",
            received=", ".join(names[:3]),
            fix="check the raw values of the item's column; `sluice predict` also ranks items "
            "that the file describes by their inputs",
        )
    if len(names):
        _log.warning(
            "%s, in the catalogue: they are left out",
            describe_unmatched(file.path, given, unknown.to_pylist()),
        )


def read_candidates(trained: TrainedModel, file: RawFile, inputs: Sequence[str]) -> Candidates:
    """Reads candidates.

    Args:
        trained: The model and its dataset.
        file: The file; the item's key is among its columns.
        inputs: Features that the model reads of an item.

    Raises:
        ConfigError: The file's format is not known by its name.
        InputDataError: The file is missing, damaged or empty, lacks a column, a key or another
            value that is needed, holds a key twice, or describes two items of one id.
    """
    key = trained.manifest.require_key("item")
    names = tuple(dict.fromkeys((key, *inputs)))
    encoders = read_encoders(trained, names)
    reader = RawReader(file, encoders.inputs)
    is_described = bool(set(reader.find_columns()) & _other_columns(reader, key))
    if not is_described:
        encoders = read_encoders(trained, (key,))
    tokens, features = _read(file, encoders, key, trained.config.evaluation.batch_size)
    named = find_named_ids(trained.version_dir, trained.manifest, key)
    ids = _number(np.asarray(features[key], np.int64), named)
    order = np.argsort(ids, kind="stable")
    tokens = tokens.take(pa.array(order))
    _refuse_alike(ids[order], tokens, file)
    described = take_rows(features, order) if is_described else None
    return Candidates(ids[order], tokens, described, file, order)


def _other_columns(reader: RawReader, key: str) -> set[str]:
    """Names of the inputs that are not made of the key's own column, and of their columns."""
    own = {item.column for item in reader.inputs if item.feature == key}
    sources = SourceNames(reader.inputs).sources
    names = {item.name for item in reader.inputs if item.column not in own}
    return names | {sources[name] for name in names & sources.keys()}


def _read(
    file: RawFile, encoders: ServingEncoders, key: str, batch_size: int
) -> tuple[pa.Array, dict[str, Any]]:
    """Returns each row's key, and the encoded features of all rows."""
    item = find_key_input(encoders.inputs, key)
    tokens, parts = [], []
    for keys, rows in read_key_rows(file, encoders.inputs, item, batch_size):
        tokens += keys
        raw = {name: tf.constant(values) for name, values in rows.inputs.items()}
        parts.append(encoders.encode(raw))
    return pa.array(tokens), {name: _join([part[name] for part in parts]) for name in parts[0]}


def _join(parts: list[tf.Tensor]) -> tf.Tensor:
    """Concatenates rows; lists are padded to the longest with 0, as encoded lists are."""
    if parts[0].shape.rank < 2:
        return tf.concat(parts, 0)
    width = max(part.shape[1] for part in parts)
    return tf.concat([tf.pad(p, [[0, 0], [0, width - p.shape[1]]]) for p in parts], 0)


def _number(ids: IntArray, named: range | None) -> IntArray:
    """Gives items that the dataset does not know numbers of their own, from -1 down."""
    unknown = ~is_named(ids, named)
    return np.where(unknown, -np.cumsum(unknown, dtype=np.int64), ids)


def _refuse_alike(ids: IntArray, tokens: pa.Array, file: RawFile) -> None:
    alike = np.flatnonzero(ids[1:] == ids[:-1])
    if len(alike):
        one, other = render_ids(tokens.slice(int(alike[0]), 2))
        raise InputDataError(
            f"two candidates of {file.path} have the same id",
            received=f"{one} and {other}: id {ids[alike[0]]}",
            fix="leave one of them out, or hash the item into more buckets",
        )


def find_tokens(ids: np.ndarray, vocabulary: Vocabulary | None) -> pa.Array:
    """Returns each id's raw token, null where it has none; `[ids]`."""
    return pa.array(ids) if vocabulary is None else vocabulary.take(ids)
