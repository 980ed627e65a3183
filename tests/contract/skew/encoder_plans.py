"""Features and vocabularies of plans that both executions of encoders are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.artefacts.dataset import read_manifest
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn, VocabularySpec
from conf.encoders.declaration import Operation
from conf.encoders.hashing import Cross
from conf.manifest import SplitInfo
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, FeatureSpec, Role
from etl.encoders.vocabulary import write_vocabulary
from tests.training.tiny_dataset import describe_shard, write_shard, write_tiny_dataset


def plan_feature(
    name: str,
    operation: Operation,
    columns: tuple[RawColumn, ...],
    max_len: int,
    role: Role = "context",
) -> tuple[FeatureSpec, ColumnEncoding]:
    """A feature that an operation makes of raw columns, as a build would describe it."""
    output = operation.output
    crosses = isinstance(operation, Cross)
    is_list = any(column.is_list for column in (columns if crosses else columns[:1]))
    shape = ((None,) if is_list else ()) if output.shape is None else output.shape
    encoding = f"{operation.kind}:{name}"
    most = max_len if shape == (None,) else None
    spec = FeatureSpec(name, output.dtype, role, shape, most, encoding, output.vocabulary_size,
                       pad_value=output.pad_value)  # fmt: skip
    first = columns[0]
    return spec, ColumnEncoding(name, first.name, first.dtype, encoding, operation, columns)


def write_tokens(
    tokens: Sequence[Any], path: Path, oov_buckets: int | None = None
) -> VocabularySpec:
    """Writes a vocabulary of tokens in the order of their ids."""
    first = FIRST_TOKEN_ID + (oov_buckets or 0)
    ids = range(first, first + len(tokens))
    table = pa.table({"token": tokens, "id": ids, "count": [9] * len(tokens)})
    return write_vocabulary(table, path, **({"oov_buckets": oov_buckets} if oov_buckets else {}))


def write_version(
    root: Path,
    plan: EncoderPlan,
    splits: Mapping[str, list[dict[str, Any]]],
    config: dict[str, Any],
    **changes: Any,
) -> Path:
    """Writes a dataset version of a plan whose vocabularies are there, of encoded rows by split."""
    base, version = read_manifest(write_tiny_dataset(root / "base")), root / "v"
    (version / "encoders" / "encoders.json").write_text(plan.dumps())
    of_items = FeatureSchema(tuple(spec for spec in plan.schema.features if spec.role == "item"))
    written = []
    for split, rows in splits.items():
        path = version / f"{split}.tfrecord"
        write_shard(path, rows, of_items if split == "catalog" else plan.schema)
        written.append(SplitInfo(split, (describe_shard(version, path.name, len(rows)),)))
    manifest = replace(base, schema=plan.schema, splits=tuple(written), encoder_files=(),
                       encoders_fingerprint=plan.fingerprint, **changes,
                       source=replace(base.source, config=config))  # fmt: skip
    (version / "manifest.json").write_text(manifest.dumps())
    return version
