"""Bare TFRecord files are read as a split: described by reading them, batches as of a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from etl.tfrecord import write_table
from etl.tfrecord.files.writer import ShardOptions
from training import open_batches
from training.reader.rows import RaggedList

COLUMNS = ["movie_id", "history", "label"]


def write_files(folder: Path, compression: Any = None) -> list[Path]:
    """Two files of 30 rows: a number, a list of 0 to 3 numbers, a word."""
    paths = []
    for number in range(2):
        ids = np.arange(30) + 30 * number
        rows = {
            "id": ids,
            "tags": [[int(row)] * (row % 4) for row in ids],
            "word": [f"word {row}" for row in ids],
        }
        path = folder / f"{number}.tfrecord"
        write_table(pa.table(rows), path, options=ShardOptions(compression=compression))
        paths.append(path)
    return paths


def test_files_of_a_version_give_its_batches(tiny_version: Path, tiny_manifest: Manifest) -> None:
    specs = [tiny_manifest.schema[name] for name in COLUMNS]
    files = [tiny_version / shard.path for shard in tiny_manifest.split("train").shards]
    options: dict[str, Any] = {"seed": 4, "shuffle_buffer": 200, "features": COLUMNS}
    bare = open_batches(files, 48, schema=specs, **options)
    for ours, theirs in zip(bare, open_batches(tiny_version, 48, **options), strict=True):
        for name in COLUMNS:
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_what_files_hold_is_found_out(compression: Any, tmp_path: Path) -> None:
    reader = open_batches(write_files(tmp_path, compression), 7, seed=1, shuffle_buffer=20)
    assert reader.batches_per_epoch == 9
    assert [(s.name, s.dtype, s.shape) for s in reader.features] == [
        ("id", "int64", ()),
        ("tags", "int64", (None,)),
        ("word", "bytes", ()),
    ]
    found = []
    for batch in reader:
        ids, tags = batch["id"], batch["tags"]
        assert isinstance(ids, np.ndarray)
        assert isinstance(tags, RaggedList)
        assert batch["word"].tolist() == [b"word %d" % row for row in ids]
        np.testing.assert_array_equal(np.diff(tags.offsets), ids % 4)
        np.testing.assert_array_equal(tags.values, np.repeat(ids, ids % 4))
        found += ids.tolist()
    assert found != sorted(found) == list(range(60))


def test_a_state_tells_files_apart(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    state = open_batches(files, 8).state()
    open_batches(list(map(str, files)), 8).restore(state)
    content = bytearray(files[1].read_bytes())
    content[-5] ^= 1  # within the last payload: rows and bytes stay
    files[1].write_bytes(content)
    with pytest.raises(ConfigError, match="another version"):
        open_batches(files, 8, schema=[FeatureSpec("id", "int64", "context")]).restore(state)


@pytest.mark.parametrize("checksum", ["length", "payload"])
@pytest.mark.parametrize("has_schema", [True, False])
def test_one_damaged_record_costs_no_other_one(
    checksum: str, has_schema: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.tfrecord"
    write_table(pa.table({"id": [100 + row for row in range(10)]}), path)
    content = bytearray(path.read_bytes())
    size = len(content) // 10
    content[{"length": 3 * size + 8, "payload": 4 * size - 4}[checksum]] ^= 1
    path.write_bytes(content)
    schema = [FeatureSpec("id", "int64", "context")] if has_schema else None
    reader = open_batches([path], 1, schema=schema, shuffle=False, on_corrupt="skip_record")
    found = [int(batch["id"][0]) - 100 for batch in reader]
    assert found == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_filter_on_a_value_that_a_record_lacks_is_refused(tmp_path: Path) -> None:
    # With a null beside them, whole numbers must not be compared as float64: 2^62 + 5 is none.
    keys: list[int | None] = [2**62 + row for row in range(40)]
    path, sound = tmp_path / "a.tfrecord", tmp_path / "b.tfrecord"
    write_table(pa.table({"n": range(40), "k": pa.array(keys, pa.int64())}), sound)
    write_table(pa.table({"n": range(40), "k": pa.array([*keys[:-1], None], pa.int64())}), path)
    schema = [FeatureSpec(name, "int64", "context") for name in ("n", "k")]
    asked: dict[str, Any] = {"schema": schema, "shuffle": False, "features": ["n"]}

    def read(file: Path, **options: Any) -> list[int]:
        batches = open_batches([file], 100, drop_remainder=False, **asked, **options)
        return [int(n) for batch in batches for n in batch["n"]]

    fifth = [{"feature": "k", "op": "in", "value": [2**62 + 5]}]
    assert read(sound, filter=fifth) == [5]
    for options in ({"filter": fifth}, {"validation": {"hash_of": "k", "share": 0.3}}):
        with pytest.raises(InputDataError, match="does not hold feature 'k'"):
            read(path, **options)
    filled = [schema[0], FeatureSpec("k", "int64", "context", pad_value=2**62 + 5)]
    asked["schema"] = filled
    assert read(path, filter=fifth) == [5, 39]


def test_refuses_files_that_do_not_go_together(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    (tmp_path / "gzip").mkdir()
    others = write_files(tmp_path / "gzip", "GZIP")
    with pytest.raises(ConfigError, match="compressed alike"):
        open_batches([files[0], others[0]], 8)
    files[1].write_bytes(files[1].read_bytes()[:-3])
    with pytest.raises(InputDataError, match=files[1].name):
        open_batches(files, 8)
