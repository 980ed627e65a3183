"""Rows of evaluation and how they are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf.artefacts.dataset import read_manifest
from etl.tfrecord.codec.crc32c import crc32c
from tests.training.tiny_dataset import write_tiny_dataset
from training.encoders.vocabularies import read_plan
from training.evaluation.scored_rows import MOST_VALUES, plan_slicings


def test_the_most_frequent_values_have_slices_whatever_their_ids(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path)
    manifest = read_manifest(version)
    plan = read_plan(version, manifest)
    spec = plan.vocabulary("user_id")
    file = version / "encoders" / spec.file
    table = pq.read_table(file)
    rising = pa.array(np.arange(len(table)), pa.int64())  # As of a vocabulary that has grown.
    place = table.schema.get_field_index("count")
    table = table.set_column(place, table.schema.field("count"), rising)
    pq.write_table(table, file)
    spec = replace(spec, file_crc32c=f"{crc32c(file.read_bytes()):08x}")
    vocabularies = tuple(spec if v.name == spec.name else v for v in plan.vocabularies)
    plan = replace(plan, vocabularies=vocabularies)
    (version / "encoders" / "encoders.json").write_text(plan.dumps())
    manifest = replace(manifest, encoders_fingerprint=plan.fingerprint, encoder_files=())
    [slicing] = plan_slicings(version, manifest, ["user_id"], "event")
    best = table["token"].to_pylist()[::-1][:MOST_VALUES]
    assert slicing.labels[:MOST_VALUES] == tuple(map(str, best))
    found = slicing.find_slices({"user_id": np.array([spec.size - 1, spec.size - 2, 2, 1])})
    assert found.tolist() == [0, 1, MOST_VALUES, MOST_VALUES + 1]
