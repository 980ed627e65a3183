"""Train/serve skew: features as a server logged them against those of a dataset, by key.

The log is one Arrow table; of the dataset's shards, read one by one, the rows of its keys are kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pds

from conf.encoders import ENCODERS_DIR, EncoderPlan
from conf.errors import ConfigError, InputDataError
from conf.local_paths import is_hidden, local_path
from conf.manifest import Manifest
from conf.splits import TRAIN
from etl.encoders.pipeline import read_pipeline
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.table import infer_table_schema, read_table_batches
from etl.tfrecord.types.features import WireFeature, is_list
from etl.tfrecord.types.parts import join_steps

TOLERANCE = 1e-6
"""Floats this close are equal, relative to the greater of them and to 1."""
_ROW, _ROWS = "__row", "__rows"


@dataclass(frozen=True)
class SkewConfig:
    """The features that are compared, and the keys that tell which record a row belongs to.

    Of keys with a vocabulary `id_keys` has the first id of a token: those below tell nothing apart.
    """

    keys: tuple[str, ...]
    features: tuple[str, ...]
    id_keys: Mapping[str, int] = field(default_factory=dict)


def compare_features(
    logged: pa.Table, recomputed: Iterable[pa.Table], config: SkewConfig
) -> dict[str, Any]:
    """Compares rows of the same key: of the log, and of the dataset's shards.

    Returns:
        `logged` and `recomputed` rows; rows `compared`, with exactly one record of their key;
        `ambiguous` keys, which stand on both sides, and in several rows of one; `features`, the
        most skewed first: name, `mismatched` rows, their `rate`, and one or two `examples` (key,
        and both values as text).
    """
    if not config.features or not config.keys:
        raise ConfigError(
            "there is no feature to compare",
            received=f"keys: {', '.join(config.keys) or 'none'}",
            allowed="a log that holds a key, and a feature of the dataset that is no key",
        )
    keys, left, right, records = list(config.keys), None, [], 0
    for shard in recomputed:
        own = _keep_known(shard.select([*keys, *config.features]), config)
        left = _keep_known(_cast(logged, own.schema), config) if left is None else left
        records += own.num_rows
        for key in keys:  # The rows whose key may be in the log: each part of it is there.
            own = own.filter(pc.is_in(own[key], left[key].combine_chunks()))
        right.append(own)
    first, second, ambiguous = _match(left, pa.concat_tables(right), keys)
    skews = [_compare(name, first, second, config) for name in config.features]
    return {
        "logged": left.num_rows,  # type: ignore[union-attr]
        "recomputed": records,
        "compared": first.num_rows,
        "ambiguous": ambiguous,
        "features": sorted(skews, key=lambda skew: (-skew["rate"], skew["name"])),
    }


def _cast(logged: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        # A whole number beyond 2**24 is rounded to float32, as in records; a fraction is no id.
        return pa.table(
            {
                own.name: logged[own.name].cast(own.type, "float" not in str(own.type))
                for own in schema
            }
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputDataError(
            "a value of the log is not of the type of its feature",
            received=str(error),
            allowed=", ".join(f"{column.name}: {column.type}" for column in schema),
        ) from error


def _keep_known(rows: pa.Table, config: SkewConfig) -> pa.Table:
    for key, first in config.id_keys.items():
        rows = rows.filter(pc.greater_equal(rows[key].cast(pa.int64()), first))
    return rows


def _match(left: pa.Table, right: pa.Table, keys: list[str]) -> tuple[pa.Table, pa.Table, int]:
    """Finds the rows of keys that stand once on either side, and how many keys do not."""
    counted = [_by_key(rows, keys) for rows in (left, right)]
    both = counted[0].join(counted[1], keys, join_type="inner", right_suffix="_r")
    once = pc.and_(pc.equal(both[_ROWS], 1), pc.equal(both[f"{_ROWS}_r"], 1))
    matched = both.filter(once).sort_by([(key, "ascending") for key in keys])
    rows = left.take(matched[_ROW]), right.take(matched[f"{_ROW}_r"])
    return *rows, both.num_rows - matched.num_rows


def _by_key(rows: pa.Table, keys: list[str]) -> pa.Table:
    """One row per key: how many rows it has, and the number of one of them."""
    numbered = rows.select(keys).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    counted = numbered.group_by(keys).aggregate([(_ROW, "count"), (_ROW, "min")])
    return counted.rename_columns([*keys, _ROWS, _ROW])


def _compare(name: str, left: pa.Table, right: pa.Table, config: SkewConfig) -> dict[str, Any]:
    sides = [rows[name].combine_chunks() for rows in (left, right)]
    rows = np.flatnonzero(_differ(*sides)).tolist()
    examples = [
        {
            "key": [str(left[key][row].as_py()) for key in config.keys],
            "logged": _show(sides[0][row]),
            "recomputed": _show(sides[1][row]),
        }
        for row in sorted({*rows[:1], *rows[-1:]})
    ]
    rate = len(rows) / left.num_rows if rows else 0.0
    return {"name": name, "mismatched": len(rows), "rate": rate, "examples": examples}


def _show(value: pa.Scalar) -> str | None:
    return str(value) if value.is_valid else None


def _differ(left: pa.Array, right: pa.Array) -> np.ndarray:
    """Which rows differ; a list without a value and none at all are padded alike."""
    if not is_list(left.type):
        return ~_equal(left, right)
    lengths = [pc.fill_null(pc.list_value_length(side), 0).to_numpy() for side in (left, right)]
    differ = lengths[0] != lengths[1]
    same = pa.array(~differ)
    values = [side.filter(same).flatten() for side in (left, right)]
    rows = np.repeat(np.flatnonzero(~differ), lengths[0][~differ])
    differ[rows[~_equal(*values)]] = True
    return differ


def _equal(left: pa.Array, right: pa.Array) -> np.ndarray:
    known = [side.is_valid().to_numpy(zero_copy_only=False) for side in (left, right)]
    if pa.types.is_floating(left.type):
        x, y = (side.to_numpy(zero_copy_only=False).astype(np.float64) for side in (left, right))
        scale = np.maximum(np.maximum(np.abs(x), np.abs(y)), 1.0)
        with np.errstate(invalid="ignore"):
            same = (x == y) | (np.abs(x - y) <= scale * TOLERANCE) | (np.isnan(x) & np.isnan(y))
    else:
        same = pc.fill_null(pc.equal(left, right), False).to_numpy(zero_copy_only=False)
    return np.where(known[0] & known[1], same, known[0] == known[1])


def refuse_skew(report: Mapping[str, Any], max_rate: float) -> None:
    """Refuses features of which more than this share of the rows differ."""
    if not report["compared"]:
        raise InputDataError(
            "no logged row has exactly one record of the same key: nothing was compared",
            received=f"{report['logged']:,} logged rows, {report['recomputed']:,} records, "
            f"{report['ambiguous']:,} keys that stand in several rows",
            fix="give other keys (--key) or another split (--split)",
        )
    shown = [
        f"{skew['name']}: {skew['mismatched']:,} rows differ ({skew['rate']:.4%}), as "
        f"{'/'.join(first['key'])}: logged {first['logged']}, recomputed {first['recomputed']}"
        for skew in report["features"]
        if skew["rate"] > max_rate
        for first in skew["examples"][:1]
    ]
    if shown:
        raise InputDataError(
            f"{len(shown)} of {len(report['features'])} features are skewed between training and "
            "serving",
            received="\n            ".join(shown),
            allowed=f"at most {max_rate:.4%} of the rows of each feature differ",
            fix="compute the feature in serving as the build does; --json shows examples",
        )


_FORMATS = {
    ".parquet": "parquet",
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".tfrecord", ".tfrecords"), "tfrecord"),
}


def read_logged(path: str, file_format: str | None, types: Mapping[str, pa.DataType]) -> pa.Table:
    """Reads a serving log, a file or a directory of them: of its columns those that have a type."""
    location = local_path(path)
    if not location.exists():
        raise ConfigError("there is no such serving log", received=path)
    files = _list_files(location)
    names = [Path(file.name.removesuffix(".gz").removesuffix(".deflate")) for file in files]
    formats = {_FORMATS.get(name.suffix) for name in names}
    chosen = file_format or (formats.pop() if len(formats) == 1 else None)
    if chosen is None:
        raise ConfigError(
            "the format of the serving log cannot be told by its name",
            received=path,
            allowed=f"a name that ends in {', '.join(_FORMATS)}, or --format",
        )
    read = {"parquet": _read_parquet, "json": _read_json, "tfrecord": _read_tfrecords}[chosen]
    try:
        rows = read(files, types)
        return pa.table(list(map(_count_milliseconds, rows.columns)), rows.column_names)
    except (pa.ArrowException, ValueError) as error:
        raise InputDataError("the serving log cannot be read", received=str(error)) from error


def _list_files(location: Path) -> list[Path]:
    if not location.is_dir():
        return [location]
    files = {file: file.relative_to(location).parts for file in location.rglob("*")}
    return sorted(f for f, p in files.items() if f.is_file() and not any(map(is_hidden, p)))


def _read_parquet(files: list[Path], types: Mapping[str, pa.DataType]) -> pa.Table:
    rows = pds.dataset([str(file) for file in files], format="parquet")
    return rows.to_table(columns=[name for name in rows.schema.names if name in types])


def _read_json(files: list[Path], types: Mapping[str, pa.DataType]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for file in files:
        with pa.input_stream(str(file)) as stream:
            rows += [json.loads(line) for line in stream.read().splitlines() if line.strip()]
    names = [name for name in types if any(name in row for row in rows)]
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _read_tfrecords(files: list[Path], types: Mapping[str, pa.DataType]) -> pa.Table:
    found = [column for column in infer_table_schema(files) if column.name in types]
    schema = pa.schema(
        [c if pa.types.is_null(types[c.name]) else c.with_type(types[c.name]) for c in found]
    )
    _, batches = read_table_batches(files, schema=schema)
    return pa.Table.from_batches(batches, schema)


def _count_milliseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turns times and dates into milliseconds since 1970, as a build reads them."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    return column


def wire_types(manifest: Manifest) -> dict[str, pa.DataType]:
    """Returns the types of the features as the records hold them."""
    features = manifest.schema.features
    return {f.name: WireFeature(f.name, f.dtype, f.is_list).arrow_type for f in features}


def read_split(
    version: Path, manifest: Manifest, split: str, features: Iterable[str]
) -> Iterator[pa.Table]:
    """Reads features of a split by shard: those that the manifest lists."""
    lists, specs = manifest.find_feature_lists(), [manifest.schema[name] for name in features]
    wire = [WireFeature(s.name, s.dtype, s.is_list, s.name in lists) for s in specs]
    schema = pa.schema([(feature.name, feature.arrow_type) for feature in wire])
    for shard in manifest.split(split).shards:
        path, kind = version / shard.path, manifest.record_type
        batches = read_batches(path, wire, record_type=kind, slots=manifest.slots)
        rows = pa.Table.from_batches(batches, schema)
        for number, feature in enumerate(wire):
            if feature.is_sequence:
                steps = join_steps(rows[feature.name].combine_chunks())
                rows = rows.set_column(number, feature.name, steps)
        yield rows


def find_features(
    plan: EncoderPlan, columns: Collection[str], encoded: bool, split: str
) -> tuple[list[str], dict[str, str]]:
    """Finds the features that a log tells of, and why others are left out."""
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
    return names, left_out


def encode_logged(logged: pa.Table, version: Path, features: Collection[str]) -> pa.Table:
    """Encodes raw columns, named as in the build's config, by the encoders of the version."""
    pipeline = read_pipeline(version / ENCODERS_DIR, features)
    # What exists at ETL time alone is null when serving, and so it is here.
    inputs = [raw for column in pipeline.plan.columns for raw in column.inputs]
    for name in dict.fromkeys(raw.name for raw in inputs if not raw.is_served):
        logged = logged.append_column(name, pa.nulls(logged.num_rows, pa.int64()))
    batches = logged.combine_chunks().to_batches(max_chunksize=1 << 16)
    return pa.Table.from_batches(map(pipeline.apply, batches), pipeline.output_schema)


def plan_skew(
    plan: EncoderPlan, manifest: Manifest, found: Collection[str], keys: tuple[str, ...]
) -> SkewConfig:
    """Chooses what is compared of the features that a log tells of; the key is user and item."""
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
