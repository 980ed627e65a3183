"""The encoder files of the tiny dataset version, written without the ETL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.dataset import write_text_atomic
from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan, RawColumn, VocabularySpec
from conf.manifest import FileInfo
from conf.operations import Hash
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, FeatureSpec
from etl.tfrecord.crc32c import crc32c


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
        kind = "int64" if table.schema.field("token").type == pa.int64() else "string"
        specs.append(VocabularySpec(name, kind, file, FIRST_TOKEN_ID + table.num_rows, crc))
    raw = {
        "user_id": "int64",
        "movie_id": "int64",
        "history": "int64",
        "seen": "int64",
        "candidates": "int64",
        "gender": "string",
        "genres": "string",
        "label": "float32",
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
        return ColumnEncoding(spec.name, spec.name, raw, spec.encoding)
    inputs = (RawColumn(spec.name, raw, spec.is_list),)
    return ColumnEncoding(spec.name, spec.name, raw, spec.encoding, Hash(None), inputs)
