"""Deltas: what has changed of an exported model since an earlier checkpoint.

    DIR/<model>/<n>/
        delta.json                      what it leads from and to, checksums; written last
        tables/<name>.parquet           see `training.embedding.table_files`
        weights.index, weights.data-…   tensors of the SavedModel that are no rows of tables
        version/                        its other files

Applied to the newest version of the served model, it gives the next one: file by file the export
that the delta was made of. Where that version has an index, the next one gets one like it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from conf.artefacts.delta import (
    DELTA_FILE,
    DELTA_FORMAT_VERSION,
    find_delta,
    read_delta,
    require_files,
)
from conf.artefacts.export import (
    EXPORT_FILE,
    TABLES_DIR,
    ExportOptions,
    find_version,
    list_files,
    list_indexes,
    list_versions,
    read_card,
    seal_card,
)
from conf.artefacts.run import DELTA_DIR, WARM_START_FILE, read_json, write_json
from conf.errors import ConfigError, InputDataError
from conf.paths import ReadablePath
from conf.publication.entries import hold_numbers
from conf.schema import PAD_ID, fingerprint
from training.checkpoint.restore import TrainedModel, load_checkpoint, resolve_checkpoint
from training.distribution.workers import disk_errors
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import build_lookup
from training.embedding.table_files import (
    TableRows,
    compare_tables,
    read_delta_rows,
    sort_rows,
    write_delta_rows,
    write_tables,
)
from training.export.saved_model import write_models_config, write_version
from training.export.stored_models import bring, describe, is_card

_log = logging.getLogger("sluice.training.export")
START = "start"
"""Stands for the checkpoint that a run started from."""
VERSION_DIR, WEIGHTS, VARIABLES = "version", "weights", "variables/variables"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def find_base(trained: TrainedModel, since: str) -> Path:
    """Returns the checkpoint of a run, a series, a checkpoint, or `start`: of the warm start."""
    if since == START:
        file = trained.run_dir / WARM_START_FILE
        source = read_json(file).get("source") if file.exists() else None
        if source is None:
            raise ConfigError(
                "--delta-since start: this run did not start from another one",
                received=trained.run_dir,
                fix="name the run whose export is served, or train with fit.warm_start",
            )
        since = source
    return resolve_checkpoint(since)


def write_delta(trained: TrainedModel, since: Path, options: ExportOptions) -> Path:
    """Writes what has changed of a run's export since a checkpoint; returns where."""
    name = options.name or trained.config.name
    parent = (options.directory or trained.run_dir / DELTA_DIR) / name
    if list_versions(parent):
        raise ConfigError(
            "this directory holds versions of the model, which a server would take a delta for",
            received=str(parent),
            fix="set --to to another directory",
        )
    base = load_checkpoint(since)
    _require_same_tables(base, trained)
    with (
        disk_errors(f"cannot write the delta to {parent}", "free some space, then export again"),
        hold_numbers(parent, DELTA_FILE) as held,
        held.next_entry(options.keep) as (staging, target),
    ):
        version = staging / VERSION_DIR
        version.mkdir()
        identity = {"name": name, "version": ""}
        write_version(version, trained, replace(options, tables=False), identity)
        card = read_card(version)
        (version / EXPORT_FILE).unlink()
        tables = _write_changes(staging / TABLES_DIR, base, trained)
        _split_variables(version / VARIABLES, staging / WEIGHTS, tables)
        about = {
            "format_version": DELTA_FORMAT_VERSION,
            "name": name,
            "run": trained.run_dir.name,
            "since": {"run": base.run_dir.name, "checkpoint": describe(since)},
            "tables": tables,
            "version": card,
            "files": list_files(staging),
        }
        write_json(staging / DELTA_FILE, {**about, "fingerprint": fingerprint(about)})
    return target


def _require_same_tables(base: TrainedModel, trained: TrainedModel) -> None:
    before, now = ({n: t.dim for n, t in run.model.tables.items()} for run in (base, trained))
    if before != now:
        raise ConfigError(
            "the tables of the two runs are not the same: there is no delta between them",
            received=f"{before} in {base.run_dir.name}, {now} in {trained.run_dir.name}",
            fix="take a full export",
        )


def _write_changes(
    directory: Path, base: TrainedModel, trained: TrainedModel
) -> dict[str, dict[str, Any]]:
    """Writes the changes of all tables, and returns what they are."""
    directory.mkdir()
    tables = {}
    for name, table in trained.model.tables.items():
        after = table.read_by_key()
        delta = compare_tables(base.model.tables[name].read_by_key(), after)
        write_delta_rows(directory, name, delta)
        tables[name] = {
            "dim": table.dim,
            "rows": len(after[0]),
            "changed": len(delta.changed[0]),
            "removed": len(delta.removed),
            "base": delta.base,
            "result": delta.result,
            "keys": table.keys.label if isinstance(table, DynamicTable) else None,
        }
    return tables


class _Variables:
    """The variables of a SavedModel, in the `order` of their file: rows of tables, keys, others."""

    def __init__(self, prefix: Path) -> None:
        reader = tf.train.load_checkpoint(str(prefix))
        self.read = reader.get_tensor
        self.shapes: dict[str, list[int]] = reader.get_variable_to_shape_map()
        nodes = TrackableObjectGraph.FromString(self.read(_GRAPH)).nodes
        saved = [each for node in nodes for each in node.attributes]
        self._names = {each.full_name: each.checkpoint_key for each in saved}
        children = {child.local_name: child.node_id for child in nodes[0].children}
        lookups = nodes[children["lookups"]].children if "lookups" in children else []
        self._lookups = {
            child.local_name: _name_parts(nodes[child.node_id].attributes[0].checkpoint_key)
            for child in lookups
        }
        parts = {name for pair in self._lookups.values() for name in pair}
        self.order = [n for e in saved for n in (e.checkpoint_key, *_name_parts(e.checkpoint_key))
                      if n in self.shapes or n in parts]  # fmt: skip

    def find(self, table: str, keys: str | None) -> tuple[str | None, tuple[str, str] | None]:
        """Returns the tensors of a table's rows (None: no signature reads them) and its keys."""
        return self._names.get(f"{table}/rows"), self._lookups.get(keys or "")

    def read_table(self, table: str, keys: str | None) -> TableRows | None:
        """Returns keys and rows of a table by ascending key; None: no signature reads it."""
        name, lookup = self.find(table, keys)
        if name is None:
            return None
        rows = self.read(name)
        if lookup is None:
            return np.arange(PAD_ID + 1, len(rows)), rows[PAD_ID + 1 :]
        found, places = (self.read(part) for part in lookup)
        is_key = found != PAD_ID
        return sort_rows(found[is_key], rows[places[is_key]])


def _name_parts(lookup: str) -> tuple[str, str]:
    return f"{lookup}-keys", f"{lookup}-values"


def _split_variables(prefix: Path, rest: Path, tables: Mapping[str, dict[str, Any]]) -> None:
    """Keeps of a SavedModel's variables those that are no rows of keys, under another name."""
    variables = _Variables(prefix)
    kept = {name: variables.read(name) for name in variables.shapes}
    for name, about in tables.items():
        rows, lookup = variables.find(name, about["keys"])
        about["shape"] = None if rows is None else variables.shapes[rows]
        if rows is not None:  # Those of no key stay.
            kept[rows] = kept[rows][: PAD_ID + 1 if lookup is None else FIRST_ROW]
        for part in lookup or ():
            kept.pop(part, None)
    shutil.rmtree(prefix.parent)
    _save(rest, kept, variables.order)


def _save(prefix: Path, tensors: Mapping[str, Any], order: Sequence[str]) -> None:
    """Writes tensors as TensorFlow writes those of a SavedModel: the graph of objects last."""
    names = [*(name for name in order if name in tensors), _GRAPH]
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[tensors[name] for name in names],
        )


def apply_delta(path: ReadablePath, model: ReadablePath, keep: int | None = None) -> Path:
    """Makes the next version of a served model from its newest one, which stays as it is.

    Of a directory of deltas the newest one is applied; one that was applied before makes nothing.
    """
    delta, about = read_delta(bring(find_delta(path)))
    if model.resolve().name != about["name"]:
        raise ConfigError(
            "the delta is of a model of another name",
            received=f"{about['name']}, for {model}",
            fix=f"export the delta again with --name {model.resolve().name}",
        )
    find_version(model)  # Nothing is made at the place of a model that is not there.
    with (
        disk_errors(f"cannot write a version to {model}", "free some space, then apply again"),
        hold_numbers(model, EXPORT_FILE) as held,
    ):
        newest = find_version(model)
        card = read_card(newest)
        if about["version"]["fingerprint"] in (card["fingerprint"], card.get("applied")):
            return bring(newest, is_card)
        base = bring(newest)
        _require_base(card, base, about)
        with held.next_entry(keep) as (staging, target):
            result = _write_result(staging, base, delta, about)
            write_json(staging / EXPORT_FILE, seal_card({**result, "version": target.name}))
            if list_indexes(base):
                with suppress(ModuleNotFoundError):  # Where faiss is not installed.
                    from training.index.index_build import rebuild_index

                    if missing := rebuild_index(staging, base):
                        said = "%d items that were added to the index of version %s: add them again"
                        _log.warning(said, missing, base.name)
        write_models_config(model.parent)
    return target


def _require_base(card: Mapping[str, Any], base: Path, about: Mapping[str, Any]) -> None:
    """Refuses a version that the delta does not lead from, or one that is damaged."""
    found = {name: table["fingerprint"] for name, table in card["tables"].items()}
    needed = {name: table["base"] for name, table in about["tables"].items()}
    if found != needed:
        other = [name for name in needed if found.get(name) != needed[name]]
        raise InputDataError(
            "the delta is for another version of the model",
            received=f"{describe(base)}, of run {card['run']}: other rows in {', '.join(other)}",
            allowed=f"an export of run {about['since']['run']}",
            fix="apply the deltas in between first, in order, or take a full export",
        )
    variables = {n: v for n, v in card["files"].items() if n.startswith(f"{VARIABLES}.")}
    require_files(base, variables, "restore the file, or take a full export")


def _write_result(
    staging: Path, base: Path, delta: Path, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes the files of a version, and returns what its `export.json` says."""
    wanted = about["version"]
    variables = _Variables(base / VARIABLES)
    tables = {
        name: read_delta_rows(delta / TABLES_DIR, name, change).apply(rows)
        for name, change in about["tables"].items()
        if (rows := variables.read_table(name, change["keys"])) is not None
    }
    shutil.copytree(delta / VERSION_DIR, staging, dirs_exist_ok=True)
    _join_variables(delta / WEIGHTS, staging / VARIABLES, tables, about["tables"])
    require_files(staging, wanted["files"], "take a full export: TensorFlow is another one here")
    files = dict(wanted["files"])
    if (base / TABLES_DIR).is_dir():
        write_tables(staging / TABLES_DIR, tables)
        written = list_files(staging / TABLES_DIR)
        files |= {f"{TABLES_DIR}/{name}": info for name, info in written.items()}
    made_of = {"delta": about["since"], "applied": wanted["fingerprint"], "base_version": base.name}
    return {**wanted, **made_of, "files": files}


def _join_variables(
    rest: Path,
    prefix: Path,
    tables: Mapping[str, TableRows],
    changes: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes a SavedModel's variables from the rows of its tables and all others."""
    variables = _Variables(rest)
    tensors = {name: variables.read(name) for name in variables.shapes}
    for name, (keys, rows) in tables.items():
        target, lookup = variables.find(name, changes[name]["keys"])
        if target is None:
            continue
        places = keys if lookup is None else np.arange(FIRST_ROW, FIRST_ROW + len(keys))
        matrix = np.zeros(changes[name]["shape"], np.float32)
        matrix[: len(tensors[target])] = tensors[target]
        matrix[places] = rows
        tensors[target] = matrix
        if lookup is not None and lookup[0] not in tensors:
            joined = build_lookup(keys, places).export()
            tensors |= dict(zip(lookup, joined, strict=True))
    prefix.parent.mkdir()
    _save(prefix, tensors, variables.order)
