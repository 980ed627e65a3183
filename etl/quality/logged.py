"""The two sides of a skew check as frames: the serving log, and a split of a dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from conf.dataset import find_manifest, local_path
from conf.encoders import ENCODERS_DIR, EncoderPlan
from conf.errors import ConfigError
from conf.manifest import Manifest
from etl.encoders.pipeline import read_pipeline, read_plan
from etl.quality.skew import SkewConfig
from etl.split import TRAIN
from etl.tfrecord.decode import WireFeature
from etl.tfrecord.decode_packed import Unpacking, packed_features
from etl.tfrecord.spark.schema import to_spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".tfrecord": "sluice",
    ".tfrecords": "sluice",
}
_COMPRESSED = (".gz", ".deflate")


def read_logged(spark: SparkSession, path: str, file_format: str | None = None) -> DataFrame:
    """Reads a serving log lazily.

    Args:
        spark: Session with the `sluice` format registered.
        path: Parquet, JSON lines or TFRecord: a file, or a directory of them.
        file_format: `parquet`, `json` or `tfrecord`; None tells by the name's ending.

    Raises:
        ConfigError: The format cannot be told, or there is no such file.
    """
    place = local_path(path)
    if not place.exists():
        raise ConfigError("there is no such serving log", received=path)
    known = {"parquet": "parquet", "json": "json", "tfrecord": "sluice"}
    chosen = known.get(file_format or "") or _format_of(place)
    if chosen is None:
        raise ConfigError(
            "the format of the serving log cannot be told by its name",
            received=path,
            allowed=f"a name that ends in {', '.join(_FORMATS)}, or --format",
        )
    manifest = find_manifest(place / "_") if chosen == "sluice" and place.is_dir() else None
    if manifest is not None and manifest.slots:
        return _read_packed(spark, place, manifest)
    return spark.read.format(chosen).load(str(place))


def _format_of(path: Path) -> str | None:
    if path.is_dir():
        found = {_format_of(file) for file in path.iterdir() if file.name[0] not in "._"}
        return found.pop() if len(found) == 1 else None
    name = path.name
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return _FORMATS.get(Path(name).suffix)


def read_split(spark: SparkSession, version: Path, manifest: Manifest, split: str) -> DataFrame:
    """Reads the records of a split lazily.

    Raises:
        InputDataError: The version has no such split.
    """
    manifest.split(split)
    if manifest.slots:
        return _read_packed(spark, version / split, manifest)
    reader = spark.read.format("sluice").schema(to_spark_schema(_wire(manifest)))
    return reader.load(str(version / split))


def _wire(manifest: Manifest) -> tuple[WireFeature, ...]:
    return tuple(WireFeature(s.name, s.dtype, s.is_list) for s in manifest.schema.features)


def _read_packed(spark: SparkSession, folder: Path, manifest: Manifest) -> DataFrame:
    from pyspark.sql.types import BinaryType

    wire, slots = _wire(manifest), manifest.slots
    packed = to_spark_schema(packed_features(wire, slots), string_type=BinaryType())
    place, names = str(folder), packed.names

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        unpacking = Unpacking(wire, slots)
        for numbered in batches:
            batch = numbered.rename_columns(names)
            unpacking.check(batch, place)
            yield unpacking.apply(batch)

    rows = spark.read.format("sluice").schema(packed).load(place)
    rows = rows.toDF(*map(str, range(len(names))))  # `mapInArrow` splits names at dots
    # As text where the records hold bytes, which is how the other layout is read.
    schema = to_spark_schema(wire)
    unpacked = rows.mapInArrow(unpack, to_spark_schema(wire, string_type=BinaryType()))
    return unpacked.select(*(F.col(f.name).cast(f.dataType) for f in schema.fields))


@dataclass(frozen=True)
class FoundFeatures:
    """What of a dataset's features a log tells of.

    Attributes:
        names: Features that can be compared.
        left_out: Why others cannot, by name; those of which the log has nothing are not listed.
    """

    names: tuple[str, ...]
    left_out: Mapping[str, str]


def find_features(
    plan: EncoderPlan, columns: Collection[str], encoded: bool, split: str
) -> FoundFeatures:
    """Finds the features that a log tells of.

    Args:
        plan: The dataset's encoders.
        columns: Columns of the log.
        encoded: Whether they are features as the records hold them, else raw columns.
        split: Split of the records. Those of train hold what serving never does where an encoding
            is out of fold.
    """
    names, left_out = [], {}
    for column in plan.columns:
        served = [raw.name for raw in column.inputs if raw.is_served] or [column.column]
        wanted = [column.feature] if encoded else served
        missing = [name for name in wanted if name not in columns]
        if len(missing) == len(wanted):
            continue
        if missing:
            left_out[column.feature] = f"the log lacks {', '.join(missing)}"
        elif split == TRAIN and not all(raw.is_served for raw in column.inputs):
            left_out[column.feature] = "out of fold in the train split; compare another --split"
        else:
            names.append(column.feature)
    return FoundFeatures(tuple(names), left_out)


def encode_logged(logged: DataFrame, version: Path, features: Collection[str]) -> DataFrame:
    """Encodes raw columns as the build does, by the encoders of the version.

    Args:
        logged: Raw columns, named as in the build's config.
        version: Directory of the dataset version.
        features: Features to make.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    directory, wanted = str(version / ENCODERS_DIR), tuple(features)
    schema = read_pipeline(directory, wanted).output_schema
    plan = read_plan(version / ENCODERS_DIR)
    # What exists at ETL time alone is null when serving, and so it is here.
    own = [raw.name for column in plan.columns for raw in column.inputs if not raw.is_served]
    logged = logged.withColumns({name: F.lit(None).cast("bigint") for name in own})

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pipeline = read_pipeline(directory, wanted)
        for batch in batches:
            yield pipeline.apply(batch)

    return logged.mapInArrow(encode, from_arrow_schema(schema))


def plan_skew(
    plan: EncoderPlan, manifest: Manifest, found: Collection[str], keys: tuple[str, ...]
) -> SkewConfig:
    """Chooses what is compared by what a log tells of.

    Args:
        plan: The dataset's encoders.
        manifest: Its manifest.
        found: Features that the log tells of.
        keys: Features that are the key; none for user and item.

    Raises:
        ConfigError: A key is no feature of the dataset, or a list, or the log lacks it.
    """
    chosen = keys or tuple(key for key in (manifest.keys.user, manifest.keys.item) if key)
    scalars = [spec.name for spec in manifest.schema.features if not spec.is_list]
    for key in chosen:
        if key not in scalars or key not in found:
            raise ConfigError(
                "a key must be a scalar feature of the dataset that the log holds",
                received=key,
                allowed=", ".join(name for name in scalars if name in found) or "none here",
                fix="name the key by --key; --encoded where the log holds encoded features",
            )
    vocabularies = {vocabulary.name for vocabulary in plan.vocabularies}
    return SkewConfig(
        keys=chosen,
        features=tuple(name for name in found if name not in chosen),
        id_keys=tuple(k for k in chosen if manifest.schema[k].encoding in vocabularies),
    )
