"""Feature columns: how a feature of the schema lies in the records and in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.manifest import Manifest
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from etl.tfrecord.types.features import WireFeature
from etl.tfrecord.types.parts import list_lengths

PAD_OF_DTYPE: dict[str, int | float | str] = {"int64": 0, "float32": 0.0, "bytes": ""}
ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}
"""Role of the features that the records of a split hold, where it is one side alone."""


def list_length(spec: FeatureSpec) -> int | None:
    """Length of a padded list; None: it has no bound, or is no list."""
    return spec.max_len if spec.is_ragged else next(iter(spec.shape), None)


@dataclass(frozen=True)
class FeatureColumn:
    """One feature as it is read."""

    spec: FeatureSpec
    is_ragged: bool  # it stays a list of any length (scalars among them may be absent)
    is_sequence: bool = False  # it stands in the feature lists of a SequenceExample
    may_lack: bool = False  # a label that records may lack, NaN then

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def wire(self) -> WireFeature:
        is_list = self.spec.is_list or self.is_ragged
        return WireFeature(self.name, self.spec.dtype, is_list, self.is_sequence)

    @property
    def is_dense(self) -> bool:
        """Whether rows have one size and are numbers: they can be placed one by one."""
        return not self.is_ragged and self.spec.dtype != "bytes"

    @property
    def is_fixed_list(self) -> bool:
        """Whether a row must hold a list of the length that the schema says."""
        return self.spec.is_list and not self.spec.is_ragged and not self.is_ragged

    @property
    def length(self) -> int | None:
        """Values per row of a dense list, None for a scalar."""
        return list_length(self.spec) if self.spec.is_list else None

    @property
    def width(self) -> tuple[int, ...]:
        """Shape of a dense row."""
        return () if self.length is None or not self.is_dense else (self.length,)

    @property
    def absent(self) -> int | float | str | None:
        """What a scalar is where the record lacks it; None refuses the record."""
        if self.may_lack:
            return math.nan
        return OOV_ID if self.spec.vocabulary_size is not None else self.spec.pad_value

    @property
    def pad(self) -> int | float | str:
        if self.spec.vocabulary_size is not None:
            return PAD_ID
        given = self.spec.pad_value
        return PAD_OF_DTYPE[self.spec.dtype] if given is None else given


def plan_columns(
    manifest: Manifest, specs: Sequence[FeatureSpec], ragged: Sequence[str] = ()
) -> tuple[FeatureColumn, ...]:
    """Plans how features are read; those of `ragged` stay lists although they are bounded."""
    lists = manifest.find_feature_lists()
    return tuple(
        FeatureColumn(
            spec,
            spec.name in ragged or (spec.is_ragged and spec.max_len is None),
            spec.name in lists,
            manifest.may_lack(spec),
        )
        for spec in specs
    )


def select_features(
    manifest: Manifest, names: Sequence[str], what: str = "dataset"
) -> tuple[FeatureSpec, ...]:
    """Returns the specs of the named features."""
    schema = manifest.schema
    for name in names:
        if name not in schema:
            raise InputDataError(
                f"{what} {manifest.dataset_name!r} has no such feature",
                received=name,
                allowed=", ".join(schema.names),
                fix=did_you_mean(name, schema.names),
            )
    return tuple(schema[name] for name in dict.fromkeys(names))


def find_feature(manifest: Manifest, name: str, key: str = "the model") -> FeatureSpec:
    """Returns a feature that a key of a model's config names."""
    if name not in manifest.schema:
        problem = f"{key} names a feature that the dataset does not have"
        raise unknown_name(problem, name, manifest.schema.names)
    return manifest.schema[name]


def unknown_name(problem: str, name: str, known: Collection[str]) -> ConfigError:
    """Returns the error of a name that a config spells and nothing has."""
    return ConfigError(
        problem, received=name, allowed=", ".join(known) or "none", fix=did_you_mean(name, known)
    )


def split_features(manifest: Manifest, split: str) -> tuple[str, ...]:
    """Names of the features that the records of a split hold."""
    role = ROLE_OF_SPLIT.get(split)
    seen = manifest.keys.seen if role == "user" else None
    return tuple(
        spec.name
        for spec in manifest.schema.features
        if role is None or spec.role == role or spec.name == seen
    )


def check_specs(manifest: Manifest, expected: Sequence[FeatureSpec]) -> None:
    """Refuses a dataset whose features are not those that a model was built for."""
    select_features(manifest, [spec.name for spec in expected])
    for spec in expected:
        found = _describe(manifest.schema[spec.name])
        if found != _describe(spec):
            raise InputDataError(
                f"feature {spec.name!r} of dataset {manifest.dataset_name!r} is not what the "
                "model was built for",
                received=found,
                allowed=_describe(spec),
                fix="train on this dataset from the start, or take the version the model knows",
            )


def _describe(spec: FeatureSpec) -> str:
    bound = f", max_len {spec.max_len}" if spec.is_ragged else ""
    size = "" if spec.vocabulary_size is None else f", {spec.vocabulary_size} ids"
    return f"{spec.dtype} of shape {spec.shape}{bound}{size}"


def fill_absent(column: FeatureColumn, array: pa.Array, where: str) -> pa.Array:
    """Puts the schema's values where records lack a feature, and checks fixed lengths."""
    spec = column.spec
    if column.is_ragged:
        return array.fill_null([]) if array.null_count else array
    if column.may_lack and pc.any(pc.is_nan(array)).as_py():
        raise _unfit(column, where, "NaN", "a number, or none")
    if not spec.is_list and array.null_count:
        if column.absent is None:
            raise _unfit(column, where, "no value", "one value")
        value = column.absent.encode() if isinstance(column.absent, str) else column.absent
        return array.fill_null(pa.scalar(value, array.type))
    if column.is_fixed_list:
        lengths = list_lengths(array)
        bad = lengths != spec.shape[0]
        if spec.pad_value is not None or spec.vocabulary_size is not None:  # all padding then
            bad &= lengths != 0
        if bad.any():
            found = int(lengths[int(bad.argmax())])
            raise _unfit(column, where, f"a list of {found}", f"a list of {spec.shape[0]}")
    return array


def _unfit(column: FeatureColumn, where: str, found: str, wanted: str) -> InputDataError:
    return InputDataError(
        f"a record does not hold feature {column.name!r} as the schema says",
        received=f"{found} in {where}",
        allowed=f"{wanted} of {column.spec.dtype}",
        fix="in the build say what stands for a missing value, such as encoding: {kind: normalize, "
        "method: null, fill_missing: 0}; of imported records give the feature a pad_value",
    )


def check_binary(name: str, values: np.ndarray, where: str) -> None:
    """Refuses labels other than 0 and 1."""
    bad = (values != 0) & (values != 1)
    if bad.any():
        raise InputDataError(
            f"label {name!r} holds a value that a binary objective cannot learn",
            received=f"{values[int(bad.argmax())]} in {where}",
            allowed="0 or 1",
            fix="map the label in the build config, leave such rows out by input.filter, or "
            "choose another objective",
        )
