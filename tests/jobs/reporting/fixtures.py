"""A finished run on a small dataset version, written without Spark and without TensorFlow."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.run import (
    HISTORY_FILE,
    METRICS_FILE,
    RECOMMENDATIONS_FILE,
    RUN_CARD_FILE,
    STEPS_FILE,
    RunPaths,
    write_json,
)
from conf.artefacts.train_counts import CountedKeys, KeyCounts, TrainCounter
from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.manifest import (
    MANIFEST_FILE,
    DatasetKeys,
    FileInfo,
    InputFile,
    InputTable,
    Manifest,
    RowCounts,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.schema import FeatureSchema, FeatureSpec
from conf.storage.atomic_output import write_text_atomic
from etl.encoders.vocabulary import write_vocabulary
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import StatisticsAccumulator, merge_statistics, summarize_statistics
from etl.quality.version_view import write_statistics
from etl.records.train_counts import CountedColumns, write_counts
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import TableWriter


def build_steps(lines: int = 40) -> str:
    """Returns `metrics.jsonl`, a line per ten steps."""
    entries = [
        {"step": 10 * n, "epoch": 1, "loss": 1 / n, "examples_per_s": 9e4, "input_wait_share": 0.02}
        for n in range(1, lines + 1)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def build_epochs() -> list[dict[str, Any]]:
    """Returns eight epochs, the sixth the best on validation."""
    ndcg = (0.061, 0.084, 0.102, 0.113, 0.1181, 0.1207, 0.1199, 0.1192)
    return [
        {
            "epoch": epoch + 1,
            "loss": 3.1 + 2.2 * float(np.exp(-epoch / 2.2)),
            "seconds": 5.3 + 0.1 * (epoch % 3),
            "examples": 93_184,
            "examples_per_s": 17_400 - 110 * epoch,
            "input_wait_share": 0.031,
            "validation": {"ndcg@10": ndcg[epoch], "hit_rate@10": ndcg[epoch] * 1.9},
        }
        for epoch in range(8)
    ]


def build_metrics() -> dict[str, Any]:
    """Returns an evaluation in which the model is well ahead of popularity."""
    protocols = [
        _protocol("full_unseen", True, 803, (0.052, 0.146, 0.2213, 0.322, 0.497), 0.42),
        _protocol("full_all", False, 803, (0.041, 0.121, 0.187, 0.281, 0.452), 0.3),
        _protocol("sampled_99", True, 100, (0.21, 0.47, 0.6202, 0.77, 0.935), 0.62),
    ]
    return {
        "split": "test", "rows": 1500, "users": 1500, "oov_targets": 3, "headline": "full_unseen",
        "protocols": protocols,
        "labels": {"rows": 1500, "auc": 0.6831, "log_loss": None,
                   "constant": {"auc": 0.5, "log_loss": 0.6854}},
        "beyond_accuracy": {"coverage@10": 0.638, "popularity_percentile@10": 0.7812},
        "slices": {
            "user_frequency": [
                {"value": band, "rows": rows,
                 "systems": {name: {"hit_rate@10": 0.2, "recall@10": 0.2, "ndcg@10": value,
                                    "mrr": 0.1}
                             for name, value in (("model", found), ("popularity", 0.0511))}}
                for band, rows, found in (("1-9", 400, 0.0912), ("10-99", 1100, 0.1473))
            ]
        },
    }  # fmt: skip


def _protocol(
    name: str, mask: bool, candidates: int, hits: tuple[float, ...], weaker: float
) -> dict[str, Any]:
    def system(factor: float) -> dict[str, float]:
        values = {"mrr": hits[1] * factor * 0.7}
        for k, hit in zip((1, 5, 10, 20, 50), hits, strict=True):
            values[f"hit_rate@{k}"] = values[f"recall@{k}"] = hit * factor
            values[f"ndcg@{k}"] = hit * factor * (1.0 if k == 1 else 0.62 - 0.002 * k)
        return values

    systems = {"model": system(1.0), "popularity": system(weaker), "random": system(0.06)}
    against = {
        other: {
            metric: {"difference": (gap := value - systems[other][metric]), "low": 0.8 * gap,
                     "high": 1.2 * gap, "method": "bootstrap over users"}
            for metric, value in systems["model"].items()
        }
        for other in ("popularity", "random")
    }  # fmt: skip
    return {
        "name": name, "mask_seen": mask, "candidates": candidates, "systems": systems,
        "differences": {"level": 0.95, "groups": 1500, "against": against},
    }  # fmt: skip


VERSION_ID = "20261101T101500000000Z-0badcafe"
RUN_ID = "20261101T102000Z-feedbeef"
MAX_LEN = 50


@dataclass(frozen=True)
class FakeConfig:
    """Size of the dataset, and the names that users choose."""

    users: int = 200
    items: int = 60
    events_per_user: int = 12
    train_shards: int = 4
    compression: Any = None
    dataset_name: str = "demo"
    run_name: str = "demo"
    reason: str = "rating: not a number"
    title: str | None = "Film"
    seed: int = 7
    version_id: str = VERSION_ID
    contract: tuple[dict[str, Any], ...] = ()


def write_dataset(root: Path, config: FakeConfig | None = None) -> Path:
    """Publishes a dataset version and returns its directory."""
    config = config or FakeConfig()
    paths = DatasetPaths(root, config.dataset_name)
    version = paths.version(config.version_id)
    items = _item_counts(config)
    schema = build_schema(config)
    tables = _split_tables(config, schema, items)
    splits: list[SplitInfo] = []
    statistics: dict[str, Any] = {}
    unabridged: dict[str, Any] = {}
    for name, table in tables.items():
        shards = config.train_shards if name == "train" else 2
        info, parts = _write_split(version, name, table, shards, config)
        splits.append(info)
        unabridged[name] = merge_statistics(parts)
        statistics[name] = summarize_statistics(unabridged[name])
    stored = write_statistics(version, unabridged)
    files, fingerprint = _write_encoders(version, schema, items, config)
    manifest = Manifest(
        dataset_name=config.dataset_name,
        dataset_version=config.version_id,
        created_at="2026-11-01T10:15:00+00:00",
        record_type="Example",
        compression=config.compression,
        splits=tuple(splits),
        schema=schema,
        keys=DatasetKeys(
            user="user_id", item="movie_id", history="history", seen="seen", label="label"
        ),
        encoder_files=files,
        encoders_fingerprint=fingerprint,
        statistics=statistics,
        label_rate={"train": 0.575, "validation": 0.561, "test": 0.554},
        source=_source(),
        counts=_counts(tables, config),
        code_version="0.1.0",
        statistics_file=stored,
        train_counts=write_counts(version, _count_train(tables["train"])),
        contract=config.contract,
        stage_seconds={"read sources": 3.21, "join and split events": 5.9, "fit encoders": 4.4,
                       "write records": 8.1},
        peak_memory_bytes={"driver_jvm": 1_310_000_000, "driver_python": 214_000_000},
    )  # fmt: skip
    write_text_atomic(version / MANIFEST_FILE, manifest.dumps())
    write_text_atomic(paths.current, config.version_id + "\n")
    return version


def _count_train(train: pa.Table) -> KeyCounts:
    keys = CountedKeys("user_id", "movie_id", "label")
    counter, columns = TrainCounter(keys), CountedColumns(keys)
    for batch in train.to_batches():
        counter.add(columns.read(batch))
    return counter.result()


def write_run(root: Path, version: Path, config: FakeConfig | None = None) -> Path:
    """Writes a run that is trained, evaluated and has ranked lists; returns its directory."""
    config = config or FakeConfig()
    paths = RunPaths(root, config.run_name)
    run = paths.run(RUN_ID)
    run.mkdir(parents=True)
    write_json(run / RUN_CARD_FILE, build_card(version, config))
    write_text_atomic(run / HISTORY_FILE, json.dumps(build_epochs()))
    write_text_atomic(run / STEPS_FILE, build_steps())
    write_json(run / METRICS_FILE, build_metrics())
    write_lists(run / RECOMMENDATIONS_FILE, config)
    write_text_atomic(paths.current, RUN_ID + "\n")
    return run


def build_schema(config: FakeConfig) -> FeatureSchema:
    """Returns the schema of the fake dataset, of every kind of feature."""
    items, users = config.items + 2, config.users + 2
    item: dict[str, Any] = {
        "encoding": "movie_id", "vocabulary_size": items, "shared_embedding": "movie_id",
        "pad_value": 0,
    }  # fmt: skip
    specs = [
        FeatureSpec("user_id", "int64", "user", encoding="user_id", vocabulary_size=users),
        FeatureSpec("history", "int64", "user", (None,), MAX_LEN, **item),
        FeatureSpec("movie_id", "int64", "item", **item),
        FeatureSpec("rating", "float32", "context"),
        FeatureSpec("timestamp", "int64", "id"),
        FeatureSpec("seen", "int64", "id", (None,), **item),
        FeatureSpec("label", "float32", "label"),
    ]
    if config.title is not None:
        specs.insert(3, FeatureSpec("title", "bytes", "item"))
    return FeatureSchema(tuple(specs))


def build_card(version: Path, config: FakeConfig) -> dict[str, Any]:
    """Returns a run card as training leaves it."""
    return {
        "status": "trained",
        "config": {
            "name": config.run_name,
            "dataset": str(version.parent.parent),
            "seed": 42,
            "model": {"name": "dssm", "embedding_dim": 32, "temperature": 0.07},
            "fit": {"epochs": 8, "early_stopping": {"metric": "ndcg@10", "patience": 3}},
            "evaluation": {"ks": [1, 5, 10, 20, 50], "mask_seen": True},
        },
        "dataset": {"path": str(version), "version": VERSION_ID},
        "versions": {"python": "3.11.9", "sluice": "0.1.0", "tensorflow": "2.21.0"},
        "timing": {"train_seconds": 41.7, "validation_seconds": 2.3, "evaluate_seconds": 3.4},
        "model": {"name": "dssm", "parameters": 91_264},
        "training": {"best_epoch": 6, "epochs": 8, "peak_memory_bytes": 1_912_602_624},
        "error": None,
    }


def write_lists(file: Path, config: FakeConfig, rows: int = 20, per_row: int = 8) -> None:
    """Writes ranked lists as prediction does: one JSON object per line, gzip'ed."""
    generator = np.random.default_rng(config.seed)
    with gzip.open(file, "wt", encoding="utf-8") as handle:
        for row in range(rows):
            items = generator.choice(config.items, per_row, replace=False) + 1
            scores = np.sort(generator.uniform(0.2, 0.9, per_row))[::-1].round(4)
            line = {"user": row + 1, "items": items.tolist(), "scores": scores.tolist()}
            handle.write(json.dumps(line) + "\n")


def _item_counts(config: FakeConfig) -> np.ndarray:
    ranks = np.arange(1, config.items + 1)
    return np.maximum((config.users * 3 / ranks**0.8).astype(np.int64), 1)


def _split_tables(
    config: FakeConfig, schema: FeatureSchema, counts: np.ndarray
) -> dict[str, pa.Table]:
    generator = np.random.default_rng(config.seed)
    share = counts / counts.sum()
    rows = config.users * config.events_per_user
    sizes = {"train": rows, "validation": config.users // 4, "test": config.users,
             "catalog": config.items, "users": config.users}  # fmt: skip
    return {
        name: _rows(schema, name, size, share, generator, config) for name, size in sizes.items()
    }


def _rows(
    schema: FeatureSchema, split: str, size: int, share: np.ndarray,
    generator: np.random.Generator, config: FakeConfig,
) -> pa.Table:  # fmt: skip
    is_event = split in ("train", "validation", "test")
    items = generator.choice(len(share), size, p=share) + 2
    lengths = np.minimum(generator.geometric(0.08, size) - 1, MAX_LEN)
    histories = [(generator.choice(len(share), n, p=share) + 2).tolist() for n in lengths]
    ratings = generator.integers(1, 6, size).astype(np.float32)
    columns: dict[str, Any] = {
        "user_id": generator.integers(1, config.users + 2, size) if split != "catalog" else None,
        "history": histories if split != "catalog" else None,
        "movie_id": np.arange(size) + 2 if split == "catalog" else items if is_event else None,
        "title": [f"{config.title} {i + 1}".encode() for i in range(size)],
        "rating": ratings if is_event else None,
        "timestamp": generator.integers(956_000_000, 1_046_000_000, size) if is_event else None,
        "seen": histories if split in ("validation", "test", "users") else None,
        "label": (ratings >= 4).astype(np.float32) if is_event else None,
    }
    columns["title"] = columns["title"] if split == "catalog" else None
    fields = [(spec.name, _arrow_type(spec)) for spec in schema.features]
    arrays = [
        pa.nulls(size, kind) if columns[name] is None else pa.array(columns[name], kind)
        for name, kind in fields
    ]
    return pa.table(arrays, schema=pa.schema(fields))


def _arrow_type(spec: FeatureSpec) -> pa.DataType:
    scalar = {"int64": pa.int64(), "float32": pa.float32(), "bytes": pa.binary()}[spec.dtype]
    return pa.list_(scalar) if spec.is_list else scalar


def _write_split(
    version: Path, name: str, table: pa.Table, shards: int, config: FakeConfig
) -> tuple[SplitInfo, list[dict[str, Any]]]:
    (version / name).mkdir(parents=True)
    infos, statistics = [], []
    step = -(-table.num_rows // shards)
    suffix = ".tfrecord.gz" if config.compression else ".tfrecord"
    for shard in range(shards):
        path = version / name / f"part-{shard:05d}-of-{shards:05d}{suffix}"
        accumulator = StatisticsAccumulator(table.schema, LabelFocus("label", ("rating",)))
        with TableWriter(path, table.schema, ShardOptions(compression=config.compression)) as out:
            for batch in table.slice(shard * step, step).combine_chunks().to_batches():
                out.write(batch)
                accumulator.update(batch)
        info = out.info
        infos.append(ShardInfo(f"{name}/{path.name}", info.rows, info.bytes, info.crc32c))
        statistics.append(accumulator.to_dict())
    return SplitInfo(name, tuple(infos)), statistics


def _write_encoders(
    version: Path, schema: FeatureSchema, counts: np.ndarray, config: FakeConfig
) -> tuple[tuple[FileInfo, ...], str]:
    directory = version / "encoders"
    directory.mkdir()
    user_counts = np.full(config.users, config.events_per_user, np.int64)
    vocabularies = []
    for name, numbers in (("movie_id", counts), ("user_id", user_counts)):
        tokens = np.arange(1, len(numbers) + 1)
        table = pa.table({"token": tokens, "id": tokens + 1, "count": numbers})
        vocabularies.append(write_vocabulary(table, directory / f"{name}.parquet"))
    columns = tuple(
        ColumnEncoding(
            spec.name, spec.name, "bytes" if spec.dtype == "bytes" else spec.dtype, spec.encoding
        )
        for spec in schema.features
    )
    plan = EncoderPlan(schema, columns, tuple(vocabularies))
    (directory / ENCODERS_FILE).write_text(plan.dumps(), encoding="utf-8")
    files = []
    for file in sorted(directory.iterdir()):
        files.append(_file_info(version, file))
    return tuple(files), plan.fingerprint


def _file_info(version: Path, file: Path) -> FileInfo:
    data = file.read_bytes()
    return FileInfo(str(file.relative_to(version)), len(data), f"{crc32c(data):08x}")


def _source() -> SourceSnapshot:
    inputs = tuple(
        InputFile(name, f"/data/logs/{name}.dat", size, 1_790_000_000_000)
        for name, size in (("ratings", 2_412_300), ("users", 30_120), ("movies", 41_876))
    )
    return SourceSnapshot(
        inputs=inputs,
        event_ts_ms_range=(956_703_932_000, 1_046_454_590_000),
        config={"name": "demo", "events": {"source": "ratings"}, "split": {"test": None}},
        config_sha256="0badcafe" * 8,
        tables=(InputTable("prices", "shop.prices", "delta:7:1790000000.0"),),
    )


def _counts(tables: dict[str, pa.Table], config: FakeConfig) -> RowCounts:
    kept = {name: table.num_rows for name, table in tables.items()}
    joined = kept["train"] + kept["validation"] + kept["test"]
    bad = {config.reason: joined // 40, "wrong number of fields": joined // 90}
    dropped = {"duplicate": joined // 30, "no users entry": joined // 100}
    return RowCounts(
        read={"ratings": joined + sum(bad.values()) + sum(dropped.values()),
              "users": config.users + 2, "movies": config.items},
        quarantined={"ratings": bad, "users": {"age: null": 2}, "movies": {}},
        joined=joined,
        kept=kept,
        dropped=dropped,
    )  # fmt: skip
