"""Train counts of a run: the version's files, or its shards, without rows that are left out."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.train_counts import IdCounts
from conf.errors import InputDataError
from conf.manifest import FileInfo, Manifest
from conf.training.input import InputConfig
from etl.tfrecord.codec.crc32c import crc32c
from tests.datasets import Counts, count_train_records, read_train_records
from training.input import train_counts
from training.input.train_counts import read_train_counts


def to_dict(found: IdCounts) -> Counts:
    columns = zip(found.rows, found.events, found.positives, strict=True)
    return {int(i): [int(n) for n in row] for i, row in zip(found.ids, columns, strict=True)}


def read(version: Path, manifest: Manifest, **config: Any) -> dict[str, Counts]:
    given = InputConfig(**config) if config else None
    return {p: to_dict(read_train_counts(version, manifest, p, given)) for p in ("user", "item")}


def built_by(manifest: Manifest, **config: Any) -> Manifest:
    return replace(manifest, source=replace(manifest.source, config=config))


def test_a_version_without_files_is_counted_once_and_says_so(
    tiny_version: Path, tiny_manifest: Manifest, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(train_counts, "_COUNTED", {})
    with caplog.at_level(logging.INFO, "sluice.training.input"):
        found = read(tiny_version, tiny_manifest)
    assert found == count_train_records(tiny_version, tiny_manifest)
    assert caplog.text.count("built without counts") == 1
    labels = [record["label"][0] for record in read_train_records(tiny_version, tiny_manifest)]
    assert 0 < sum(labels) < len(labels) == sum(rows for rows, _, _ in found["user"].values())
    assert sum(positives for *_, positives in found["item"].values()) == sum(labels)


@pytest.mark.parametrize("config", [{"train_samples": "last"}, {"train_samples": 5}])
def test_rows_that_are_sequences_count_with_their_histories(
    config, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    manifest = built_by(tiny_manifest, **config)
    found, rows = read(tiny_version, manifest), read(tiny_version, tiny_manifest)
    assert found == count_train_records(tiny_version, manifest) != rows
    assert {i: n[0] for i, n in found["item"].items() if n[0]} == {
        i: n[0] for i, n in rows["item"].items()
    }


def test_drawn_negatives_are_rows_and_no_events(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    negatives = {"strategy": "uniform", "splits": ["train"]}
    manifest = built_by(tiny_manifest, negatives=negatives)
    found = read(tiny_version, manifest)
    assert found == count_train_records(tiny_version, manifest)
    assert all(events == positives for _, events, positives in found["item"].values())
    of_test = built_by(tiny_manifest, negatives={**negatives, "splits": ["test"]})
    assert all(rows == events for rows, events, _ in read(tiny_version, of_test)["item"].values())


FILTERS: list[dict[str, Any]] = [
    {"filter": [{"feature": "label", "value": 1}]},
    {"filter": [{"feature": "history", "op": ">=", "value": 3}]},
    {"validation": {"hash_of": "user_id", "share": 0.3}},
]


@pytest.mark.parametrize("config", FILTERS, ids=lambda config: next(iter(config)))
def test_rows_that_the_input_leaves_out_do_not_count(
    config, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """Whatever the version's files say: the rows are those that batches are made of."""
    from training.input.batches import build_train_dataset

    listed = replace(tiny_manifest, train_counts={"item": FileInfo("none", 0, "0")})
    found = to_dict(read_train_counts(tiny_version, listed, "item", InputConfig(**config)))
    one = InputConfig(batch_size=1, **config)
    met: Counter[int] = Counter()
    where = tiny_version, tiny_manifest, one
    for batch in build_train_dataset(*where, epoch=0, seed=0, features=["movie_id"]):
        met.update(batch["movie_id"].numpy().tolist())
    assert {i: rows for i, (rows, _, _) in found.items()} == met
    assert 0 < sum(met.values()) < tiny_manifest.split("train").rows


def test_a_file_is_read_as_it_is_and_another_one_refused(
    tmp_path: Path, tiny_manifest: Manifest
) -> None:
    file = tmp_path / "train_counts" / "item.parquet"
    file.parent.mkdir()
    columns = {"id": [1, 7], "rows": [4, 3], "events": [3, 3], "positives": [2, 1]}
    pq.write_table(pa.table(columns), file)
    content = file.read_bytes()
    info = FileInfo("train_counts/item.parquet", len(content), f"{crc32c(content):08x}")
    manifest = replace(tiny_manifest, train_counts={"item": info})
    found = read_train_counts(tmp_path, manifest, "item", InputConfig(batch_size=7))
    assert to_dict(found) == {1: [4, 3, 2], 7: [3, 3, 1]}
    np.testing.assert_array_equal(found.place(found.rows, np.array([7, 8, 0, 1])), [3, 0, 0, 4])
    pq.write_table(pa.table({**columns, "rows": [8, 6]}), file)
    with pytest.raises(InputDataError, match="not the file"):
        read_train_counts(tmp_path, manifest, "item")
