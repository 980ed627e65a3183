from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest, SplitInfo
from training.input import build_eval_dataset
from training.item_counts import read_drawable_items, read_item_counts
from training.vocabularies import Vocabulary


def test_counts_are_those_of_the_train_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    batch = next(
        iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000, ["movie_id"]))
    )
    found = np.bincount(batch["movie_id"].numpy(), minlength=42)
    np.testing.assert_array_equal(read_item_counts(tiny_version, tiny_manifest), found)


def test_rows_outside_the_vocabulary_count_as_oov(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    train = tiny_manifest.split("train")
    shards = (replace(train.shards[0], rows=train.shards[0].rows + 5), *train.shards[1:])
    manifest = replace(tiny_manifest, splits=(SplitInfo("train", shards),))
    assert read_item_counts(tiny_version, manifest)[1] == 5


def test_a_missing_vocabulary_is_named(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    (version / "encoders" / "movie_id.parquet").unlink()
    with pytest.raises(InputDataError, match="movie_id"):
        read_item_counts(version, tiny_manifest)


def test_a_changed_vocabulary_is_refused(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """A count that was changed would quietly bias every logQ correction."""
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    file = version / "encoders" / "movie_id.parquet"
    table = pq.read_table(file)
    doubled = pc.multiply(table["count"], 2)
    pq.write_table(table.set_column(2, "count", doubled), file)
    with pytest.raises(InputDataError, match="checksum"):
        read_item_counts(version, tiny_manifest)


def test_another_version_s_encoders_are_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises(InputDataError, match="not the one"):
        read_item_counts(tiny_version, replace(tiny_manifest, encoders_fingerprint="0" * 64))


def test_all_tokens_may_be_drawn(tiny_version: Path, tiny_manifest: Manifest) -> None:
    drawable = read_drawable_items(tiny_version, tiny_manifest)
    assert drawable.dtype == np.int64
    np.testing.assert_array_equal(drawable, np.arange(2, 42))


def test_neither_oov_buckets_nor_retired_tokens_are_drawn(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    retired = np.array([False, True, False, False, True])
    vocabulary = Vocabulary("movie_id", "int64", pa.array(range(5)), 3, retired)
    monkeypatch.setattr("training.item_counts.read_key_vocabulary", lambda *_: vocabulary)
    # 0 pad, 1 OOV, 2 to 4 its buckets, tokens from 5 on.
    assert read_drawable_items(tiny_version, tiny_manifest).tolist() == [5, 7, 8]
    none_left = replace(vocabulary, retired=np.ones(5, bool))
    monkeypatch.setattr("training.item_counts.read_key_vocabulary", lambda *_: none_left)
    with pytest.raises(ConfigError, match="items to draw from"):
        read_drawable_items(tiny_version, tiny_manifest)


def test_ids_without_a_vocabulary_are_drawn_from_the_schema_s_range(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    monkeypatch.setattr("training.item_counts.read_key_vocabulary", lambda *_: None)
    np.testing.assert_array_equal(
        read_drawable_items(tiny_version, tiny_manifest), np.arange(2, 42)
    )
