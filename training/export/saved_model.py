"""Export of a trained run as a model of TensorFlow Serving.

    DIR/models.config               what `--model_config_file` of TensorFlow Serving reads
    DIR/<model>/<n>/                a version, from 1 on; whole as soon as it has its name
        saved_model.pb, variables/  the signatures of `training.export.signatures`
        assets.extra/               warm-up requests
        export.json                 what it is, how to call it, checksums
        users.parquet, embeddings/, items.parquet, tables/   see `training.export.embeddings`
        index/1/                    if asked for: see `training.index.index_build`

A running server loads a new version as soon as it is there; earlier ones stay to go back to. DIR
may lie in an object store, see `training.export.stored_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog
from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

from conf.artefacts.export import (
    EXPORT_FILE,
    EXPORT_FORMAT_VERSION,
    MODELS_CONFIG,
    TABLES_DIR,
    WARMUP_FILE,
    ExportOptions,
    find_exports,
    list_files,
    list_models,
    seal_card,
)
from conf.artefacts.run import EXPORT_DIR, write_json
from conf.paths import ReadablePath
from conf.publication.entries import hold_numbers
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import StoredPath
from conf.storage.processes import hold_file_lock
from training.checkpoint.restore import TrainedModel
from training.distribution.workers import disk_errors
from training.embedding.dynamic_table import DynamicTable
from training.embedding.static_table import EmbeddingTable
from training.embedding.table_files import fingerprint_rows, write_tables
from training.encoders.serving import ServingEncoders
from training.export.embeddings import (
    ExportedItems,
    read_items,
    write_embeddings,
    write_item_keys,
    write_users,
)
from training.export.signatures import (
    Signature,
    build_encoders,
    build_signatures,
    describe_output,
    describe_score,
    explain_no_items,
    save_signatures,
)
from training.export.stored_models import bring, describe, is_card
from training.models.ranking import NetworkRankingModel, Task
from training.models.retrieval import require_retrieval
from training.networks.user_code import user_errors

WARMUP_ROWS = (1, 32)
WARMUP_CANDIDATES, WARMUP_LENGTH, MOST_VALUES = 100, 10, 100
"""Items of a row, values of a list that nothing bounds, and of any."""


def write_export(trained: TrainedModel, options: ExportOptions | None = None) -> Path:
    """Writes the next version of a model; returns it, or with `once` what the run has already.

    Of one in a store it is a working copy: of a version of before its `export.json` alone.
    """
    options = options or ExportOptions()
    base = options.directory or trained.run_dir / EXPORT_DIR
    name = options.name or trained.config.name
    failure = f"cannot write the export {base / name}; earlier versions are untouched"
    with (
        disk_errors(failure, "free some space (or check the permissions), then export again"),
        hold_numbers(base / name, EXPORT_FILE) as held,
        user_errors(),
    ):
        run = describe(trained.run_dir.resolve())
        if options.once and (found := find_exports(base / name, run)):
            return bring(found[-1].path, is_card)
        with held.next_entry(options.keep) as (staging, target):
            write_version(staging, trained, options, {"name": name, "version": target.name})
            if options.index is not None:
                from training.index.index_build import write_index  # needs faiss

                write_index(staging, options.index)
        write_models_config(base)
    return target


def write_version(
    staging: Path, trained: TrainedModel, options: ExportOptions, identity: Mapping[str, str]
) -> None:
    """Writes the files of a version, by name and number, into a directory; sorts keys of tables."""
    tables = dict(sorted(trained.model.tables.items()))
    for space in {table.keys for table in tables.values() if isinstance(table, DynamicTable)}:
        space.sort_keys()
    encoders = build_encoders(trained)
    reason = explain_no_items(trained, encoders.plan)
    items = read_items(trained) if reason is None else None
    signatures = build_signatures(trained, encoders, items, options.k)
    save_signatures(str(staging), signatures, encoders)
    if options.tables:
        rows = {name: table.read_by_key() for name, table in tables.items()}
        write_tables(staging / TABLES_DIR, rows)
    about = {
        **_describe_run(trained),
        **identity,
        "tables": {name: _describe_table(table) for name, table in tables.items()},
        "user": trained.manifest.keys.user,
        "users": write_users(staging, trained),
        "lists": _describe_lists(trained, encoders),
        "warmup_requests": _write_warmup(staging, identity["name"], signatures),
        **_write_answers(staging, trained, items, reason),
        "signatures": {name: signature.to_json() for name, signature in signatures.items()},
    }
    write_json(staging / EXPORT_FILE, seal_card({**about, "files": list_files(staging)}))


def _write_answers(
    staging: Path, trained: TrainedModel, items: ExportedItems | None, reason: str | None
) -> dict[str, Any]:
    """Writes the files that one kind of model has, and returns what is said of its answers."""
    model = trained.model
    if not isinstance(model, NetworkRankingModel):
        score = describe_score(require_retrieval(model))
        return {"score": score, "embeddings": write_embeddings(staging, trained, items)}
    known = {"no_item_scores": reason} if items is None else write_item_keys(staging, items)
    outputs = [_describe_task(model, task) for task in model.tasks]
    return {"outputs": outputs, "score": "one output per task, named after it, float32", **known}


def _describe_run(trained: TrainedModel) -> dict[str, Any]:
    manifest = trained.manifest
    return {
        "format_version": EXPORT_FORMAT_VERSION,
        "kind": trained.config.model.kind,
        "model": trained.config.model.name,
        "run": trained.run_dir.name,
        "run_path": describe(trained.run_dir.resolve()),
        "checkpoint": trained.checkpoint,
        "dataset": manifest.dataset_name,
        "dataset_version": manifest.dataset_version,
        "encoders_fingerprint": manifest.encoders_fingerprint,
        "tensorflow": tf.__version__,
    }


def _describe_table(table: EmbeddingTable) -> dict[str, Any]:
    keys, rows = table.read_by_key()
    return {"rows": len(keys), "dim": table.dim, "fingerprint": fingerprint_rows((keys, rows))}


def _describe_lists(trained: TrainedModel, encoders: ServingEncoders) -> dict[str, Any]:
    """Returns how `sluice predict` makes lists by default, and the raw key of the items."""
    key = trained.manifest.keys.item
    keys = [item.to_json() for item in encoders.inputs if item.feature == key]
    return {
        "defaults": trained.config.predict.model_dump(mode="json"),
        "batch_size": trained.config.evaluation.batch_size,
        "item": keys[0] if len(keys) == 1 else None,
    }


def _describe_task(model: NetworkRankingModel, task: Task) -> dict[str, Any]:
    about = {"name": task.name, "label": task.label, "kind": task.kind}
    found = model.calibrations.get(task.name)
    calibration = {} if found is None else {"calibration": found.to_json()}
    return {**about, "means": describe_output(task), **calibration}


def write_models_config(base: ReadablePath) -> None:
    """Writes the file that names all models of a directory to TensorFlow Serving."""
    if isinstance(base, StoredPath):  # What two processes write at a time is built again.
        base.update(MODELS_CONFIG, lambda _: _build_models_config(base).encode())
        return
    directory = Path(str(base))
    with hold_file_lock(directory / f".{MODELS_CONFIG}.lock"):
        write_text_atomic(directory / MODELS_CONFIG, _build_models_config(base))


def _build_models_config(base: ReadablePath) -> str:
    found = ModelServerConfig()
    for place in list_models(base):
        found.model_config_list.config.add(
            name=place.name, base_path=describe(place.resolve()), model_platform="tensorflow"
        )
    return text_format.MessageToString(found, as_utf8=True)


def _write_warmup(directory: Path, name: str, signatures: Mapping[str, Signature]) -> int:
    """Writes the requests that TensorFlow Serving replays before a version is served.

    Each calls a signature with rows of missing values. Returns how many there are.
    """
    file = directory / WARMUP_FILE
    file.parent.mkdir(exist_ok=True)
    calls = [(*item, rows) for item in signatures.items() for rows in WARMUP_ROWS]
    with tf.io.TFRecordWriter(str(file)) as writer:
        for signature_name, signature, rows in calls:
            spec = {"name": name, "signature_name": signature_name}
            request = {"model_spec": spec, **_fill_request(signature, rows)}
            log = PredictionLog(**{f"{signature.method}_log": {"request": request}})
            writer.write(log.SerializeToString())
    return len(calls)


def _fill_request(signature: Signature, rows: int) -> dict[str, Any]:
    examples, inputs = [], {}
    for about, spec in zip(signature.form.inputs, signature.form.specs.values(), strict=True):
        if holds := about.get("holds"):
            examples = [_fill_example(holds)] * rows
            values = np.array([one.SerializeToString() for one in examples], object)
        else:
            values = _fill(spec, about, rows)
        inputs[spec.name] = tf.make_tensor_proto(values)
    if signature.method == "predict":
        return {"inputs": inputs}
    return {"input": {"example_list": {"examples": examples}}}


def _fill(spec: tf.TensorSpec, about: Mapping[str, Any], rows: int) -> np.ndarray:
    width = min(about.get("max_len") or WARMUP_LENGTH, MOST_VALUES)
    free = [WARMUP_CANDIDATES if about.get("per") == "candidate" else width, width]
    shape = [rows, *(free.pop(0) if size is None else size for size in spec.shape[1:])]
    return np.full(shape, _find_filler(about), spec.dtype.as_numpy_dtype)


def _fill_example(holds: list[dict[str, Any]]) -> tf.train.Example:
    """Returns an Example that holds one value of each input."""
    kinds, features = {"string": "bytes_list", "int64": "int64_list"}, {}
    for about in holds:
        values = [_find_filler(about)] * (about["length"] or 1)
        kind = kinds.get(about["dtype"], "float_list")
        features[about["name"]] = tf.train.Feature(**{kind: {"value": values}})
    return tf.train.Example(features={"feature": features})


def _find_filler(about: Mapping[str, Any]) -> Any:
    tokens = [about.get("null_token"), about.get("pad_token")]
    plain = b"" if about["dtype"] in ("string", "bytes") else 1
    token = next((token for token in tokens if token is not None), plain)
    return token.encode() if isinstance(token, str) else token
