"""Export of a trained run as a model of TensorFlow Serving.

    DIR/models.config               what `--model_config_file` of TensorFlow Serving reads
    DIR/<model>/<n>/                a version, from 1 on; whole as soon as it has its name
        saved_model.pb, variables/  the signatures of `training.export.model_signatures`
        assets.extra/               warm-up requests
        export.json                 what it is, how to call it, checksums
        users.parquet               see `training.export.embeddings`
        embeddings/                 of a retrieval model: the same
        index/1/                    if asked for: see `training.index.index_build`

A running server loads a new version as soon as it is there; earlier ones stay to go back to. DIR
may lie in an object store, see `training.export.stored_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.export import (
    EMBEDDINGS_DIR,
    EXPORT_FILE,
    EXPORT_FORMAT_VERSION,
    MODELS_CONFIG,
    TABLES_DIR,
    ExportOptions,
    find_exports,
    list_files,
    list_models,
    seal_card,
)
from conf.artefacts.run import EXPORT_DIR, write_json
from conf.paths import ReadablePath
from conf.publication.numbered import hold_numbers
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locks import hold_file_lock
from training.checkpoint.restore import TrainedModel
from training.distribution.tensorflow_runtime import disk_errors
from training.evaluation.item_index import ItemIndex, build_item_index
from training.export.embeddings import write_embeddings, write_item_keys, write_users
from training.export.model_signatures import (
    build_encoders,
    build_ranking_signatures,
    build_retrieval_signatures,
    describe_output,
    describe_score,
    explain_no_item_scores,
)
from training.export.serving_encoders import ServingEncoders
from training.export.signatures import save_signatures
from training.export.stored_models import bring, describe, is_card, replace_file
from training.export.tables import (
    describe_tables,
    read_table_rows,
    sort_keys,
    write_tables,
)
from training.export.warmup import write_warmup
from training.models.ranking import NetworkRankingModel, Task
from training.models.retrieval import RetrievalModel, require_retrieval
from training.networks.own_code import own_errors


def write_export(trained: TrainedModel, options: ExportOptions | None = None) -> Path:
    """Writes the next version of a model; earlier ones stay as they are.

    Args:
        trained: The run's model.
        options: Where it goes.

    Returns:
        Directory of the version, or with `once` of the one that the run has already. Of one in a
        store it is a working copy: whole of a new version, `export.json` alone of one of before.

    Raises:
        InputDataError: A vocabulary or record is damaged, or a vector is not finite.
        ConfigError: An index is asked for, and there are no items to index; or the store cannot be
            reached or refuses.
        UpstreamNotReadyError: Another process is exporting the same model.
        InternalError: The disk is full, or there is no permission.
    """
    options = options or ExportOptions()
    base = options.directory or trained.run_dir / EXPORT_DIR
    name = options.name or trained.config.name
    model = base / name
    with (
        disk_errors(
            f"cannot write the export {model}; earlier versions are untouched",
            "free some space (or check the permissions), then export again",
        ),
        hold_numbers(model, EXPORT_FILE) as held,
        own_errors(),
    ):
        if options.once and (found := find_exports(model, describe(trained.run_dir.resolve()))):
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
    """Writes the files of a version into an empty directory.

    Args:
        staging: The directory.
        trained: The run's model; its keys are sorted.
        options: What is written.
        identity: What `export.json` says of its name and number.
    """
    model, manifest = trained.model, trained.manifest
    sort_keys(model)
    encoders = build_encoders(trained)
    parts: dict[str, Any]
    if isinstance(model, NetworkRankingModel):
        signatures = build_ranking_signatures(trained, model, encoders)
        parts = {"outputs": [_describe_task(model, task) for task in model.tasks],
                 "score": "one output per task, named after it, float32"}  # fmt: skip
    else:
        retrieval = require_retrieval(model)
        index = _index_items(trained, retrieval)
        signatures = build_retrieval_signatures(trained, retrieval, encoders, index, options.k)
        parts = {"score": describe_score(model)}
    save_signatures(str(staging), signatures, encoders)
    warmup = write_warmup(staging, identity["name"], signatures)
    if not isinstance(model, NetworkRankingModel):
        embeddings = staging / EMBEDDINGS_DIR
        parts["embeddings"] = write_embeddings(embeddings, trained, index)
    elif (reason := explain_no_item_scores(trained, model)) is None:
        parts["items"] = {"rows": write_item_keys(staging, trained)}
    else:
        parts["no_item_scores"] = reason
    if options.tables:
        found = {name: read_table_rows(table) for name, table in model.tables.items()}
        write_tables(staging / TABLES_DIR, found)
    users = write_users(staging, trained)
    files = list_files(staging)
    card = {
        "format_version": EXPORT_FORMAT_VERSION,
        "kind": trained.config.model.kind,
        "model": trained.config.model.name,
        **identity,
        "run": trained.run_dir.name,
        "run_path": describe(trained.run_dir.resolve()),
        "checkpoint": None if trained.checkpoint is None else trained.checkpoint.to_json(),
        "dataset": manifest.dataset_name,
        "dataset_version": manifest.dataset_version,
        "encoders_fingerprint": manifest.encoders_fingerprint,
        "tensorflow": tf.__version__,
        "tables": describe_tables(model),
        "user": manifest.keys.user,
        "users": users,
        "lists": _describe_lists(trained, encoders),
        "warmup_requests": warmup,
        **parts,
        "signatures": {name: signature.to_json() for name, signature in signatures.items()},
        "files": files,
    }
    write_json(staging / EXPORT_FILE, seal_card(card))


def _describe_lists(trained: TrainedModel, encoders: ServingEncoders) -> dict[str, Any]:
    """Returns how `sluice predict` makes lists by default, and the raw key of the items."""
    key = trained.manifest.keys.item
    keys = [item.to_json() for item in encoders.inputs if item.feature == key]
    return {
        "defaults": trained.config.predict.model_dump(mode="json"),
        "batch_size": trained.config.evaluation.batch_size,
        "item": keys[0] if len(keys) == 1 else None,
    }


def _index_items(trained: TrainedModel, model: RetrievalModel) -> ItemIndex | None:
    if trained.manifest.keys.item is None:
        return None
    batch_size = trained.config.evaluation.batch_size
    return build_item_index(model, trained.version_dir, trained.manifest, batch_size)


def _describe_task(model: NetworkRankingModel, task: Task) -> dict[str, Any]:
    found = model.calibrations.get(task.name)
    return {
        "name": task.name,
        "label": task.label,
        "kind": task.kind,
        "means": describe_output(task),
        **({} if found is None else {"calibration": found.to_json()}),
    }


def write_models_config(base: ReadablePath) -> None:
    """Writes the file that names all models of a directory to TensorFlow Serving."""
    if not isinstance(base, Path):
        replace_file(base, MODELS_CONFIG, partial(_build_models_config, base))
        return
    with hold_file_lock(base / f".{MODELS_CONFIG}.lock"):
        write_text_atomic(base / MODELS_CONFIG, _build_models_config(base))


def _build_models_config(base: ReadablePath) -> str:
    configs = "".join(
        f'  config {{\n    name: "{directory.name}"\n'
        f'    base_path: "{_quote(describe(directory.resolve()))}"\n'
        '    model_platform: "tensorflow"\n  }\n'
        for directory in list_models(base)
    )
    return f"model_config_list {{\n{configs}}}\n"


def _quote(path: str) -> str:
    return path.replace("\\", "\\\\").replace('"', '\\"')
