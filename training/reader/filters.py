"""Which rows are kept: comparisons with a value, and a share of the keys by hash."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.input import FilterConfig, HeldOutConfig, InputConfig
from etl.tfrecord.types.parts import list_lengths
from training.reader.feature_columns import (
    FeatureColumn,
    fill_absent,
    plan_columns,
    select_features,
)

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
EVALUATION_FILTER = "evaluation.filter"
"""The setting that says which rows are measured."""
_SETTING = f"input.filter, input.validation or {EVALUATION_FILTER}"
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@dataclass(frozen=True)
class RowFilter:
    """Keeps rows that pass all filters, and whose key is held out, or is not (`is_held_out`)."""

    columns: tuple[FeatureColumn, ...]
    filters: tuple[FilterConfig, ...]
    held_out: HeldOutConfig | None
    is_held_out: bool = False

    def keep(self, batch: pa.RecordBatch, where: str) -> np.ndarray:
        """Which rows of a decoded block are kept, bool `[rows]`; `where` names it in errors."""
        kept = np.ones(batch.num_rows, bool)
        for config in self.filters:
            kept &= find_passing(config, *self._values(batch, config.feature, where))
        if self.held_out is not None:
            keys = [self._values(batch, name, where)[0] for name in self.held_out.key]
            is_inside = hash_together(keys) < np.uint64(self.held_out.share * 2**64)
            kept &= is_inside if self.is_held_out else ~is_inside
        return kept

    def _values(
        self, batch: pa.RecordBatch, name: str, where: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Values of a feature, and which are absent; None: all are there, or the schema's."""
        array, column = batch.column(name), next(c for c in self.columns if c.name == name)
        if column.wire.is_list or column.is_sequence:
            return list_lengths(array), None
        is_absent = None
        if pa.types.is_list(array.type):  # A value that records may lack, read as a list of it.
            array = _take_first(array)
            if array.null_count and column.absent is None:
                is_text = column.spec.dtype == "bytes"
                is_absent = None if is_text else array.is_null().to_numpy(zero_copy_only=False)
                # With a null left, Arrow would make whole numbers float64, which holds but some.
                array = array.fill_null(pa.scalar(b"" if is_text else 0, array.type))
        if array.null_count:
            array = fill_absent(column, array, where)
        return array.to_numpy(zero_copy_only=False), is_absent


def _take_first(lists: pa.ListArray) -> pa.Array:
    """The first value of each list, null where it is empty."""
    empty = list_lengths(lists) == 0
    starts = np.where(empty, 0, lists.offsets.to_numpy()[:-1])
    return lists.values.take(pa.array(starts, mask=empty))


def build_row_filter(
    manifest: Manifest, config: InputConfig, is_held_out: bool
) -> RowFilter | None:
    """Builds the filter of a config's `filter` and `validation`; None where all rows are kept."""
    key = () if config.validation is None else config.validation.key
    names = [*(item.feature for item in config.filter), *key]
    if not names:
        return None
    columns = plan_columns(manifest, select_features(manifest, names, f"{_SETTING}: dataset"))
    by_name = {column.name: column for column in columns}
    for item in config.filter:
        _check_value(by_name[item.feature], item)
    for name in key:
        if by_name[name].wire.is_list:
            raise ConfigError(
                "input.validation.hash_of must be one value per row",
                received=f"{name}: a list", fix="name the id of the user or of the session",
            )  # fmt: skip
    return RowFilter(columns, config.filter, config.validation, is_held_out)


def _check_value(column: FeatureColumn, config: FilterConfig) -> None:
    values: Sequence[Any] = config.value if isinstance(config.value, tuple) else (config.value,)
    is_text = column.spec.dtype == "bytes" and not column.wire.is_list
    is_whole = column.wire.is_list or column.spec.dtype == "int64"
    is_int = is_whole and config.op in ("in", "not_in")
    if not all(isinstance(v, str) if is_text else _is_number(v, is_int) for v in values):
        kind = "a list: its length is compared" if column.wire.is_list else column.spec.dtype
        raise ConfigError(
            f"{_SETTING}: feature {column.name!r} is {kind}",
            received=config.value,
            allowed="text" if is_text else "numbers of 64 bits",
        )


def _is_number(value: Any, is_int64: bool) -> bool:
    if isinstance(value, str) or not abs(value) <= sys.float_info.max:
        return False
    return not is_int64 or (value == int(value) and -(2**63) <= value < 2**63)


def find_passing(
    config: FilterConfig, values: np.ndarray, is_absent: np.ndarray | None = None
) -> np.ndarray:
    """Which values pass, bool `[rows]`; absent numbers pass `!=` and `not_in` alone."""
    if is_absent is not None:
        return np.where(is_absent, config.op in ("!=", "not_in"), find_passing(config, values))
    wanted: Sequence[Any] = config.value if isinstance(config.value, tuple) else (config.value,)
    if values.dtype == object:
        wanted = [str(text).encode() for text in wanted]
        values = np.array([value or b"" for value in values], object)
    if config.op not in ("in", "not_in"):
        return np.asarray(_COMPARE[config.op](values, wanted[0]), bool)
    found = pc.is_in(pa.array(values), value_set=pa.array(wanted, pa.array(values).type))
    inside = found.to_numpy(zero_copy_only=False)
    return inside if config.op == "in" else ~inside


def passes(config: InputConfig, feature: str, value: float) -> bool:
    """Whether rows with a value of a number pass the filters of that feature."""
    own = [item for item in config.filter if item.feature == feature]
    return all(bool(find_passing(item, np.array([value]))[0]) for item in own)


def hash_keys(values: np.ndarray) -> np.ndarray:
    """Hashes keys to uint64 `[rows]`, the same on every machine and in every run.

    Integers (and float32, by their bits) go through the finalizer of SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014); byte strings (objects, None counts as empty) first through 64-bit FNV-1a.
    """
    if values.dtype == object:
        keys = np.array([_fnv(value or b"") for value in values], np.uint64)
    elif values.dtype == np.float32:
        keys = values.view(np.uint32).astype(np.uint64)
    else:
        keys = values.astype(np.int64).view(np.uint64)
    mixed = keys + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_together(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Hashes one or more columns as `hash_keys` takes them, row by row, to uint64 `[rows]`."""
    hashed = hash_keys(columns[0])
    for column in columns[1:]:  # Hashed once more: (a, b) is not (b, a), and (a, a) no constant.
        hashed = hash_keys((hash_keys(hashed.view(np.int64)) + hash_keys(column)).view(np.int64))
    return hashed


def _fnv(data: bytes) -> int:
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME % 2**64
    return value
