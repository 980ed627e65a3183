"""Tiny dataset versions, encoders included, written without the ETL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from conf.artefacts.dataset import DatasetPaths
from conf.encoders import (
    ENCODERS_FILE,
    ColumnEncoding,
    EncoderPlan,
    RawColumn,
    TokenDType,
    VocabularySpec,
)
from conf.encoders.hashing import Hash
from conf.manifest import (
    MANIFEST_FILE,
    DatasetKeys,
    FileInfo,
    Manifest,
    RowCounts,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSchema, FeatureSpec
from conf.storage.atomic_output import write_text_atomic
from etl.tfrecord.codec.crc32c import crc32c, describe_file


def write_encoders(
    version: Path, vocabularies: Mapping[str, pa.Table], schema: FeatureSchema
) -> tuple[tuple[FileInfo, ...], str]:
    """Writes the encoders of a version's features; returns their files and fingerprint."""
    directory = version / "encoders"
    directory.mkdir(parents=True, exist_ok=True)
    infos, specs = [], []
    for name, table in vocabularies.items():
        file = f"{name}.parquet"
        pq.write_table(table, directory / file)
        content = (directory / file).read_bytes()
        crc = f"{crc32c(content):08x}"
        infos.append(FileInfo(f"encoders/{file}", len(content), crc))
        kind: TokenDType = "int64" if table.schema.field("token").type == pa.int64() else "string"
        specs.append(VocabularySpec(name, kind, file, FIRST_TOKEN_ID + table.num_rows, crc))
    raw = {
        "user_id": "int64",
        "movie_id": "int64",
        "history": "int64",
        "seen": "int64",
        "bought": "int64",
        "candidates": "int64",
        "gender": "string",
        "genres": "string",
        "label": "float32",
        "time": "int64",
        "device": "string",
        "rate": "float32",
        "history_age": "float32",
        "history_time": "int64",
        "asked_at": "int64",
    }
    columns = tuple(_column(spec, raw[spec.name]) for spec in schema.features)
    plan = EncoderPlan(schema, columns, tuple(specs))
    text = plan.dumps()
    write_text_atomic(directory / ENCODERS_FILE, text)
    content = text.encode()
    infos.append(FileInfo(f"encoders/{ENCODERS_FILE}", len(content), f"{crc32c(content):08x}"))
    return tuple(infos), plan.fingerprint


def _column(spec: FeatureSpec, raw: Any) -> ColumnEncoding:
    if not spec.encoding.startswith("hash:"):
        column = SOURCE_COLUMNS.get(spec.name, spec.name)
        return ColumnEncoding(spec.name, column, raw, spec.encoding)
    inputs = (RawColumn(spec.name, raw, spec.is_list),)
    return ColumnEncoding(spec.name, spec.name, raw, spec.encoding, Hash(None), inputs)


Row = dict[str, Any]
FIRST_TIME = 1_700_000_000
SOURCE_COLUMNS = {"device": "client"}
"""Columns of features that have another name."""
CONTEXT_SOURCE: dict[str, Any] = {
    "events": {"source": "log"},
    "sources": {"log": {"columns": [{"name": "history", "type": "list<int64>", "separator": " "}]}},
}
"""How a log with `context` is written."""
TIMED_HISTORY = {
    "name": "history",
    "columns": ["time"],
    "gaps": "s",
}
RATE_SOURCE = {"rolling": [{"name": "rate", "keys": ["user_id", "genres"]}]}


@dataclass(frozen=True)
class TinyConfig:
    """Size and shape of the planted data; `keyed`: users and items are 64-bit keys.

    `timed`: rows have a feature `time`: `first_time`, and ten for each event of the user before it.
    `bought`: a second history, `bought`, of every other item, and no key names one.
    `context`: rows have a `device`, `app` or `web`, and histories are written as text.
    `rate`: rows have the rate of the user in the item's genre.
    `pairs`: users draw as often from a second group, `(u // groups) % groups`.
    `item_times`: histories have gaps, `history_age`, and times, `history_time`; `asked_at` is the
    time of the row.
    """

    users: int = 60
    items: int = 40
    groups: int = 4
    events_per_user: int = 15
    leave_out: int = 1
    own_group: float = 0.9
    max_len: int = 8
    train_shards: int = 4
    compression: str | None = None
    validation: bool = True
    candidates: int | None = None
    seed: int = 0
    keyed: bool = False
    timed: bool = False
    first_time: int = 0
    bought: bool = False
    context: bool = False
    rate: bool = False
    item_times: bool = False
    pairs: bool = False


@dataclass
class _Log:
    """Raw events per user, earliest first, with the dictionaries."""

    events: dict[int, list[int]]
    genders: dict[int, str]
    genres: dict[int, list[str]]
    vocabularies: dict[str, tuple[dict[Any, int], pa.Table]] = field(default_factory=dict)
    keyed: frozenset[str] = frozenset()


def write_tiny_dataset(
    root: Path,
    name: str = "tiny",
    config: TinyConfig | None = None,
    version_id: str = "20260101T000000Z-tiny",
    edit_train: Callable[[list[Row]], list[Row]] = list,
) -> Path:
    """Writes one published dataset version and returns its directory.

    Raw tokens: users `1000 + u`, items `100 + i`, gender F/M, genres `genre_<group>` and
    `genre_all`; item `i` and user `u` belong to group `i % groups` and `u % groups`.

    Args:
        root: Folder of datasets.
        name: The dataset's name.
        config: Size and shape.
        version_id: The version's name.
        edit_train: Makes the rows that are written to train of those that the log gives.
    """
    config = config or TinyConfig()
    paths = DatasetPaths(root, name)
    version = paths.version(version_id)
    log = _draw_log(config)
    _fit_vocabularies(log, config)
    splits = _split_rows(log, config)
    splits["train"] = edit_train(splits["train"])
    schema = _schema(log, config)
    infos = tuple(
        _write_split(
            version,
            split,
            rows,
            config.train_shards if split == "train" else 2,
            schema,
            config.compression,
        )
        for split, rows in splits.items()
    )
    encoder_files, encoders_fingerprint = write_encoders(
        version, {name: table for name, (_, table) in log.vocabularies.items()}, schema
    )
    manifest = Manifest(
        dataset_name=name,
        dataset_version=version.name,
        created_at="2026-01-01T00:00:00Z",
        record_type="Example",
        compression=config.compression,
        splits=infos,
        schema=schema,
        keys=DatasetKeys(
            user="user_id",
            item="movie_id",
            history="history",
            seen="seen",
            candidates="candidates" if config.candidates else None,
            label="label",
        ),
        encoder_files=encoder_files,
        encoders_fingerprint=encoders_fingerprint,
        statistics={},
        label_rate={
            split: _label_rate(rows)
            for split, rows in splits.items()
            if split in ("train", "validation", "test") and rows
        },
        source=SourceSnapshot(
            inputs=(),
            event_ts_ms_range=None,
            config={
                **(CONTEXT_SOURCE if config.context else {}),
                **(RATE_SOURCE if config.rate else {}),
                **({"histories": [TIMED_HISTORY]} if config.item_times else {}),
            },
            config_sha256="0" * 64,
        ),
        counts=RowCounts(
            read={},
            quarantined={},
            joined=config.users * config.events_per_user,
            kept={split: len(rows) for split, rows in splits.items()},
            dropped={},
        ),
        code_version="test",
    )
    write_text_atomic(version / MANIFEST_FILE, manifest.dumps())
    write_text_atomic(paths.current, version.name + "\n")
    return version


def encode_example(row: Row, schema: FeatureSchema) -> bytes:
    """Serializes one row; a key that is missing or None is left out of the record."""
    features = {}
    for spec in schema.features:
        value = row.get(spec.name)
        if value is None:
            continue
        values = list(value) if spec.is_list else [value]
        if spec.dtype == "int64":
            features[spec.name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        elif spec.dtype == "float32":
            features[spec.name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            features[spec.name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_shard(
    path: Path, rows: list[Row], schema: FeatureSchema, compression: str | None = None
) -> None:
    """Writes rows as one TFRecord file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = tf.io.TFRecordOptions(compression_type="GZIP" if compression == "gzip" else "")
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for row in rows:
            writer.write(encode_example(row, schema))


def _draw_log(config: TinyConfig) -> _Log:
    rng = np.random.default_rng(config.seed)
    members = [np.arange(g, config.items, config.groups) for g in range(config.groups)]
    weights = [1.0 / (1.0 + np.arange(len(m))) ** 0.5 for m in members]
    events: dict[int, list[int]] = {}
    for user in range(config.users):
        seen: list[int] = []
        while len(seen) < config.events_per_user:
            own = rng.random() < config.own_group
            number = user // config.groups if config.pairs and rng.random() < 0.5 else user
            group = number % config.groups if own else int(rng.integers(config.groups))
            p = weights[group] / weights[group].sum()
            item = 100 + int(rng.choice(members[group], p=p))
            if not seen or item != seen[-1]:
                seen.append(item)
        events[1000 + user] = seen
    return _Log(
        events=events,
        genders={1000 + u: "FM"[u % 2] for u in range(config.users)},
        genres={
            100 + i: [f"genre_{i % config.groups}"] + (["genre_all"] if i % 3 == 0 else [])
            for i in range(config.items)
        },
        keyed=frozenset({"user_id", "movie_id"} if config.keyed else ()),
    )


def _fit_vocabularies(log: _Log, config: TinyConfig) -> None:
    held_out = (2 if config.validation else 1) * config.leave_out
    train = [(u, i) for u, items in log.events.items() for i in items[:-held_out]]
    tokens: dict[str, list[Any]] = {
        "user_id": [u for u, _ in train],
        "gender": [log.genders[u] for u, _ in train],
        "movie_id": [i for _, i in train],
        "genres": [g for _, i in train for g in log.genres[i]],
        **({"device": ["app", "web"]} if config.context else {}),
    }
    for name, values in tokens.items():
        unique, counts = np.unique(np.asarray(values), return_counts=True)
        order = np.lexsort((unique, -counts))
        ids = np.arange(len(order)) + FIRST_TOKEN_ID
        kind = pa.int64() if unique.dtype.kind == "i" else pa.string()
        table = pa.table(
            {
                "token": pa.array(unique[order].tolist(), kind),
                "id": pa.array(ids, pa.int64()),
                "count": pa.array(counts[order], pa.int64()),
            }
        )
        mapping = dict(zip(unique[order].tolist(), ids.tolist(), strict=True))
        log.vocabularies[name] = (mapping, table)


@functools.cache
def hash_key(token: int) -> int:
    """The key of a token, as `{kind: hash_key}` makes it."""
    return int(tf.bitcast(tf.fingerprint([str(token)]), tf.int64)[0])


def _encode(log: _Log, name: str, token: Any) -> int:
    if name in log.keyed:
        return hash_key(token)
    return log.vocabularies[name][0].get(token, OOV_ID)


def _row(log: _Log, user: int, position: int, config: TinyConfig, *, held_out: bool) -> Row:
    items = log.events[user]
    before = [_encode(log, "movie_id", item) for item in items[:position]]
    row = _user_features(log, user, before, config)
    target = items[position]
    row |= _item_features(log, target)
    row["label"] = float(target % config.groups == user % config.groups)
    if config.timed:
        row["time"] = config.first_time + 10 * position
    if config.context:
        row["device"] = _encode(log, "device", ("app", "web")[(user + position) % 2])
    if config.rate:
        row["rate"] = (user + target) % 7 / 7
    if not held_out:
        del row["seen"]
    elif config.candidates:
        rng = np.random.default_rng([config.seed, user, position])
        unseen = sorted(
            set(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + config.items))
            - {row["movie_id"]}
            - set(before)
        )
        row["candidates"] = rng.choice(unseen, min(config.candidates, len(unseen)), replace=False)
    return row


def _user_features(log: _Log, user: int, before: list[int], config: TinyConfig) -> Row:
    bought = {"bought": before[::2][::-1][: config.max_len]} if config.bought else {}
    return {
        "user_id": _encode(log, "user_id", user),
        "gender": _encode(log, "gender", log.genders[user]),
        "history": before[::-1][: config.max_len],
        "seen": before[::-1],
        **bought,
        **(_item_times(len(before), config) if config.item_times else {}),
    }


def _item_times(events: int, config: TinyConfig) -> Row:
    """Events lie ever further apart: the n-th one 10 n (n + 1) seconds after the first."""
    times = [FIRST_TIME + 10 * n * (n + 1) for n in range(events + 1)]
    met = times[:-1][::-1][: config.max_len]
    ages = [float(times[-1] - one) for one in met]
    return {"history_age": ages, "history_time": met, "asked_at": times[-1]}


def _item_features(log: _Log, item: int) -> Row:
    return {
        "movie_id": _encode(log, "movie_id", item),
        "genres": [_encode(log, "genres", genre) for genre in log.genres[item]],
    }


def _split_rows(log: _Log, config: TinyConfig) -> dict[str, list[Row]]:
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    names = ("validation", "test") if config.validation else ("test",)
    for user, items in log.events.items():
        train = len(items) - len(names) * config.leave_out
        for position in range(len(items)):
            later = (position - train) // config.leave_out
            split = "train" if later < 0 else names[later]
            row = _row(log, user, position, config, held_out=split != "train")
            splits[split].append(row)
    order = np.random.default_rng(config.seed).permutation(len(splits["train"]))
    splits["train"] = [splits["train"][i] for i in order]
    catalog = sorted(log.vocabularies["movie_id"][0].items(), key=lambda pair: pair[1])
    splits["catalog"] = [_item_features(log, item) for item, _ in catalog]
    splits["users"] = [
        _user_features(log, user, [_encode(log, "movie_id", i) for i in items], config)
        for user, items in log.events.items()
    ]
    return splits


def _schema(log: _Log, config: TinyConfig) -> FeatureSchema:
    size = {name: FIRST_TOKEN_ID + table.num_rows for name, (_, table) in log.vocabularies.items()}

    def ids(
        name: str, role: Any, table: str, ragged: bool = False, max_len: int | None = None
    ) -> FeatureSpec:
        if table in log.keyed:
            shape = (None,) if ragged else ()
            return FeatureSpec(name, "int64", role, shape, max_len, f"hash:{name}")
        return FeatureSpec(
            name=name,
            dtype="int64",
            role=role,
            shape=(None,) if ragged else (),
            max_len=max_len,
            encoding=table,
            vocabulary_size=size[table],
            shared_embedding=table if table != name else None,
        )

    features = [
        ids("user_id", "user", "user_id"),
        ids("gender", "user", "gender"),
        ids("history", "user", "movie_id", ragged=True, max_len=config.max_len),
        ids("movie_id", "item", "movie_id"),
        ids("genres", "item", "genres", ragged=True, max_len=4),
        FeatureSpec(name="label", dtype="float32", role="label"),
        ids("seen", "id", "movie_id", ragged=True),
    ]
    if config.timed:
        features.append(FeatureSpec(name="time", dtype="int64", role="id"))
    if config.context:
        features.append(ids("device", "context", "device"))
    if config.rate:
        features.append(FeatureSpec(name="rate", dtype="float32", role="context"))
    if config.item_times:
        shape, most = (None,), config.max_len
        features += [
            FeatureSpec("history_age", "float32", "user", shape, most),
            FeatureSpec("history_time", "int64", "user", shape, most),
            FeatureSpec("asked_at", "int64", "user"),
        ]
    if config.bought:
        features.append(ids("bought", "user", "movie_id", ragged=True, max_len=config.max_len))
    if config.candidates:
        features.append(ids("candidates", "id", "movie_id", ragged=True))
    return FeatureSchema(tuple(features))


def _write_split(
    version: Path,
    split: str,
    rows: list[Row],
    shards: int,
    schema: FeatureSchema,
    compression: str | None,
) -> SplitInfo:
    infos = []
    suffix = ".tfrecord.gz" if compression == "gzip" else ".tfrecord"
    for index in range(shards if rows else 0):
        relative = f"{split}/part-{index:05d}{suffix}"
        part = rows[index::shards]
        write_shard(version / relative, part, schema, compression)
        infos.append(describe_shard(version, relative, len(part)))
    return SplitInfo(split, tuple(infos))


def describe_shard(folder: Path, name: str, rows: int) -> ShardInfo:
    """What a manifest says of a shard."""
    file = describe_file(folder, folder / name)
    return ShardInfo(name, rows, file.bytes, file.crc32c)


def _label_rate(rows: list[Row]) -> float:
    return float(np.mean([row["label"] for row in rows]))


def one_feature(
    tmp_path: Path, manifest: Manifest, spec: FeatureSpec, rows: list[dict]
) -> Manifest:
    """Writes the split `test` of rows with one feature; returns its manifest."""
    schema = FeatureSchema((spec,))
    write_shard(tmp_path / "test.tfrecord", rows, schema)
    shard = describe_shard(tmp_path, "test.tfrecord", len(rows))
    return replace(manifest, schema=schema, splits=(SplitInfo("test", (shard,)),))


def rewrite_label(version: Path, number: int, shard: int = 1) -> None:
    """Writes one record anew with another label; lengths and checksums of records hold."""
    path = version / "train" / f"part-{shard:05d}.tfrecord"
    records = [bytes(r.numpy()) for r in tf.data.TFRecordDataset(str(path))]
    example = tf.train.Example.FromString(records[number])
    label = example.features.feature["label"].float_list.value
    label[0] = 1.0 - label[0]
    changed = example.SerializeToString(deterministic=True)
    assert len(changed) == len(records[number])
    records[number] = changed
    size = path.stat().st_size
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    assert path.stat().st_size == size
