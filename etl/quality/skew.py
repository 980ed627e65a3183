"""Train/serve skew: features as a server logged them against those of a dataset, by key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from conf.artefacts.dataset import find_manifest
from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR, EncoderPlan
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.local_paths import is_hidden, local_path
from conf.manifest import Manifest
from conf.splits import TRAIN
from etl.encoders.pipeline import read_pipeline
from etl.sources.parquet_files import load_parquet
from etl.tfrecord.codec.decode import listed_features
from etl.tfrecord.spark.schema import quote_name, to_spark_schema
from etl.tfrecord.types.features import WireFeature

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType


_SIDES = ("logged", "recomputed")


@dataclass(frozen=True)
class SkewConfig:
    """What is compared.

    Attributes:
        keys: Features that tell which record a logged row belongs to.
        features: Features that are compared.
        tolerance: Floats this close are equal, relative to the greater of them and to 1.
        id_keys: First id of a token, by keys of a vocabulary: those below tell nothing apart.
    """

    keys: tuple[str, ...]
    features: tuple[str, ...]
    tolerance: float = 1e-6
    id_keys: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SkewExample:
    """A row whose values differ: its key, and both values as text."""

    key: tuple[str, ...]
    logged: str | None
    recomputed: str | None


@dataclass(frozen=True)
class FeatureSkew:
    """One feature.

    Attributes:
        name: The feature.
        mismatched: Compared rows whose values differ.
        rate: Their share, in [0, 1].
        examples: One or two of them, the same in each run.
    """

    name: str
    mismatched: int
    rate: float
    examples: tuple[SkewExample, ...]


@dataclass(frozen=True)
class SkewReport:
    """The comparison.

    Attributes:
        logged: Rows that were logged.
        recomputed: Records of the dataset.
        compared: Rows with exactly one record of the same key.
        ambiguous: Keys on both sides that stand in several rows of one; not compared.
        features: The features, the most skewed first.
    """

    logged: int
    recomputed: int
    compared: int
    ambiguous: int
    features: tuple[FeatureSkew, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return asdict(self)


def compare_features(logged: DataFrame, recomputed: DataFrame, config: SkewConfig) -> SkewReport:
    """Compares both sides in one pass over their join.

    Args:
        logged: One column per key and feature, values as the records hold them.
        recomputed: The same of the dataset.
        config: What is compared.

    Raises:
        ConfigError: Nothing is to be compared, or a column is missing on a side.
    """
    for side, frame in zip(_SIDES, (logged, recomputed), strict=True):
        _check_columns(side, frame, config)
    types = {name: recomputed.schema[name].dataType for name in (*config.keys, *config.features)}
    left = _by_key(logged, config, types, _SIDES[0])
    right = _by_key(recomputed, config, types, _SIDES[1])
    joined = left.join(right, list(config.keys), "full_outer")
    once = (F.col("logged_rows") == 1) & (F.col("recomputed_rows") == 1)
    both = F.col("logged_rows").isNotNull() & F.col("recomputed_rows").isNotNull()
    aggregates = [
        F.sum("logged_rows").alias("logged"),
        F.sum("recomputed_rows").alias("recomputed"),
        F.count_if(once).alias("compared"),
        F.count_if(both & ~once).alias("ambiguous"),
    ]
    for number, name in enumerate(config.features):
        differs = once & _differs(name, types[name], config.tolerance)
        example = F.when(differs, _example(config.keys, name))
        aggregates += [
            F.count_if(differs).alias(f"bad_{number}"),
            F.min(example).alias(f"first_{number}"),
            F.max(example).alias(f"last_{number}"),
        ]
    return _report(joined.agg(*aggregates).collect()[0].asDict(), config.features)


def _check_columns(side: str, frame: DataFrame, config: SkewConfig) -> None:
    if not config.features or not config.keys:
        raise ConfigError(
            "there is no feature to compare",
            received=f"keys: {', '.join(config.keys) or 'none'}; columns: "
            f"{', '.join(frame.columns)}",
            allowed="a key, and a feature of the dataset that is no key",
        )
    for name in (*config.keys, *config.features):
        if name not in frame.columns:
            raise ConfigError(
                f"the {side} rows lack a column",
                received=name,
                allowed=", ".join(frame.columns),
                fix=did_you_mean(name, frame.columns),
            )


def _by_key(
    frame: DataFrame, config: SkewConfig, types: dict[str, DataType], side: str
) -> DataFrame:
    """One row per key: how many rows it has, and the features of one of them."""
    names = (*config.keys, *config.features)
    typed = frame.select(*[F.col(name).try_cast(types[name]).alias(name) for name in names])
    for key, first in config.id_keys.items():
        typed = typed.where(F.col(key) >= first)
    packed = typed.select(*config.keys, F.struct(*config.features).alias(side))
    return packed.groupBy(*config.keys).agg(
        F.count(F.lit(1)).alias(f"{side}_rows"), F.first(side).alias(side)
    )


def _differs(name: str, data_type: DataType, tolerance: float) -> Column:
    left, right = (F.col(side)[name] for side in _SIDES)
    kind = data_type.simpleString()
    if kind.startswith("array"):  # A list without a value and none at all are padded alike.
        left, right = (F.when(F.size(side) > 0, side) for side in (left, right))
    if kind in ("float", "double"):
        return ~_close(left, right, tolerance)
    if kind in ("array<float>", "array<double>"):
        pairs = F.zip_with(left, right, lambda x, y: _close(x, y, tolerance))
        equal = (F.size(left) == F.size(right)) & F.forall(pairs, lambda pair: pair)
        return ~F.coalesce(equal, left.isNull() & right.isNull())
    return ~left.eqNullSafe(right)


def _close(left: Column, right: Column, tolerance: float) -> Column:
    scale = F.greatest(F.abs(left), F.abs(right), F.lit(1.0))
    near = F.coalesce(F.abs(left - right) <= scale * tolerance, F.lit(False))
    return left.eqNullSafe(right) | (near & ~F.isnan(left) & ~F.isnan(right))


def _example(keys: Sequence[str], name: str) -> Column:
    shown = [F.col(key).cast("string").alias(f"key_{i}") for i, key in enumerate(keys)]
    values = [F.col(side)[name].cast("string").alias(side) for side in _SIDES]
    return F.struct(*shown, *values)


def _report(found: dict[str, Any], features: Sequence[str]) -> SkewReport:
    compared = found["compared"]
    skews = []
    for number, name in enumerate(features):
        bad = found[f"bad_{number}"]
        rows = dict.fromkeys(
            tuple(row) for row in (found[f"first_{number}"], found[f"last_{number}"]) if row
        )
        examples = tuple(SkewExample(row[:-2], row[-2], row[-1]) for row in rows)
        skews.append(FeatureSkew(name, bad, bad / compared if compared else 0.0, examples))
    return SkewReport(
        found["logged"] or 0,
        found["recomputed"] or 0,
        compared,
        found["ambiguous"],
        tuple(sorted(skews, key=lambda skew: (-skew.rate, skew.name))),
    )


def refuse_skew(report: SkewReport, max_rate: float) -> None:
    """Refuses what differs too often.

    Args:
        report: The comparison.
        max_rate: The greatest share of differing rows per feature, in [0, 1].

    Raises:
        InputDataError: Names each feature above the share, or no row could be compared.
    """
    if not report.compared:
        raise InputDataError(
            "no logged row has exactly one record of the same key: nothing was compared",
            received=f"{report.logged:,} logged rows, {report.recomputed:,} records, "
            f"{report.ambiguous:,} keys that stand in several rows",
            fix="give other keys (--key) or another split (--split)",
        )
    skewed = [skew for skew in report.features if skew.rate > max_rate]
    if skewed:
        raise InputDataError(
            f"{len(skewed)} of {len(report.features)} features are skewed between training and "
            "serving",
            received="\n            ".join(_describe(skew) for skew in skewed),
            allowed=f"at most {max_rate:.4%} of the rows of each feature differ",
            fix="compute the feature in serving as the build does; --json shows examples",
        )


def _describe(skew: FeatureSkew) -> str:
    text = f"{skew.name}: {skew.mismatched:,} rows differ ({skew.rate:.4%})"
    if skew.examples:
        first = skew.examples[0]
        text += f", as {'/'.join(first.key)}: logged {first.logged}, recomputed {first.recomputed}"
        if all(map(_differ_by_a_unit, skew.examples)):
            text += " (1000 times: seconds against milliseconds?)"
    return text


def _differ_by_a_unit(example: SkewExample) -> bool:
    """Whether one number is that of the other in a unit of time a thousand times shorter."""
    try:
        low, high = sorted((float(example.logged or ""), float(example.recomputed or "")))
    except ValueError:
        return False
    return low > 0 and math.isclose(high, 1000 * low, rel_tol=1e-6)


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
    location = local_path(path)
    if not location.exists():
        raise ConfigError("there is no such serving log", received=path)
    known = {"parquet": "parquet", "json": "json", "tfrecord": "sluice"}
    chosen = known.get(file_format or "") or _format_of(location)
    if chosen is None:
        raise ConfigError(
            "the format of the serving log cannot be told by its name",
            received=path,
            allowed=f"a name that ends in {', '.join(_FORMATS)}, or --format",
        )
    manifest = find_manifest(location / "_") if chosen == "sluice" and location.is_dir() else None
    if manifest is not None and manifest.slots:
        return _read_records(spark, location, manifest, [str(location)])
    reader = spark.read.format(chosen)
    if chosen == "parquet":
        return count_milliseconds(load_parquet(spark, reader, [str(location)]))
    return count_milliseconds(reader.load(str(location)))


def count_milliseconds(frame: DataFrame) -> DataFrame:
    """Turns times and dates into milliseconds since 1970, as a build reads them."""
    times = [name for name, kind in frame.dtypes if kind in ("timestamp", "timestamp_ntz", "date")]
    return frame.withColumns(
        {name: F.unix_millis(F.col(quote_name(name)).cast("timestamp")) for name in times}
    )


def _format_of(path: Path) -> str | None:
    if path.is_dir():
        shown = [p for p in path.iterdir() if not is_hidden(p.name, is_folder=p.is_dir())]
        formats = {_format_of(file) for file in shown}
        return formats.pop() if len(formats) == 1 else None
    name = path.name
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return _FORMATS.get(Path(name).suffix)


def read_split(spark: SparkSession, version: Path, manifest: Manifest, split: str) -> DataFrame:
    """Reads the records of a split lazily: those of its listed shards, whatever lies beside them.

    Raises:
        InputDataError: The version has no such split.
    """
    shards = [str(version / shard.path) for shard in manifest.split(split).shards]
    return _read_records(spark, version / split, manifest, shards)


def _decode_records(manifest: Manifest) -> tuple[WireFeature, ...]:
    return tuple(WireFeature(s.name, s.dtype, s.is_list) for s in manifest.schema.features)


def _read_records(
    spark: SparkSession, folder: Path, manifest: Manifest, paths: list[str]
) -> DataFrame:
    wire, slots = _decode_records(manifest), {slot.feature: slot for slot in manifest.slots}
    reader = spark.read.format("sluice").schema(
        to_spark_schema(listed_features(wire, manifest.slots))
    )
    rows = reader.option("basePath", str(folder)).load(paths)
    if not slots:
        return rows
    scalars = {n: F.col(quote_name(s.packed))[s.offset].alias(n) for n, s in slots.items()}
    return rows.select(*(scalars.get(f.name, F.col(quote_name(f.name))) for f in wire))


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
        expected = [column.feature] if encoded else served
        missing = [name for name in expected if name not in columns]
        if len(missing) == len(expected):
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
    plan = read_plan_file(version / ENCODERS_DIR)
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
    first = {vocabulary.name: vocabulary.first_token_id for vocabulary in plan.vocabularies}
    encodings = {key: manifest.schema[key].encoding for key in chosen}
    return SkewConfig(
        keys=chosen,
        features=tuple(name for name in found if name not in chosen),
        id_keys={key: first[name] for key, name in encodings.items() if name in first},
    )
