"""`{kind: vector_bytes}`: a build writes what numpy's `tobytes` would, and models read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.encoders.bags import VectorBytes
from conf.training.models import RankingConfig, VectorConfig
from etl.build import build_dataset
from tests.etl.built_versions import read_split
from tests.etl.encoders.fitting import encode_columns
from tests.etl.logs import build_config, change_keys, columns, write_logs
from training.input.batches import build_eval_dataset
from training.models.embedded_inputs import decode_vectors
from training.models.registry import build_model

LENGTH = 3
ITEMS = {item: np.array([item / 3, -item, 1e-5 * item]) for item in (10, 11, 12, 13, 14, 15)}
ITEMS[11] = None


def _encode(values: Any, kind: pa.DataType, dtype: Any = "float64") -> list[bytes]:
    return encode_columns(VectorBytes(dtype, LENGTH), pa.array(values, pa.list_(kind)))


def test_bytes_are_those_of_numpy() -> None:
    rows = [[0.1, -2.5, 1e300], None, [3.0, 0.0, -1e-3]]
    wanted = [b"" if row is None else np.array(row, "<f8").tobytes() for row in rows]
    assert _encode(rows, pa.float64()) == wanted
    sliced = pa.array([[9.0] * LENGTH, *rows], pa.list_(pa.float64())).slice(1)
    assert encode_columns(VectorBytes("float64", LENGTH), sliced) == wanted
    singles = [[0.1, 1.0, 2.0], [7, 8, 9]]
    assert _encode(singles, pa.float32(), "float32") == [
        np.array(row, "<f4").tobytes() for row in singles
    ]
    assert _encode([[1, 2, 2**53]], pa.int64()) == [np.array([1, 2, 2.0**53], "<f8").tobytes()]


@pytest.mark.parametrize(
    ("row", "dtype", "said"),
    [
        ([1.0, 2.0], "float64", "row 1 has 2 values, not 3"),
        ([1.0, None, 2.0], "float64", "vector of row 1"),
        ([1.0, float("nan"), 2.0], "float64", "vector of row 1"),
        ([1.0, 1e39, 2.0], "float32", "vector of row 1"),
    ],
)
def test_vectors_that_are_none_are_refused(row: list, dtype: str, said: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match=said):
        _encode([[0.0, 0.0, 0.0], row], pa.float64(), dtype)


def _config(folder: Path) -> Any:
    logs = write_logs(folder / "logs")
    table = {
        "item": pa.array(list(ITEMS), pa.int64()),
        "image": pa.array([None if v is None else v.tolist() for v in ITEMS.values()],
                          pa.list_(pa.float64())),
    }  # fmt: skip
    pq.write_table(pa.table(table), logs / "items.parquet")
    items = {"path": "items.parquet", "format": "parquet", "key": "item",
             "columns": columns(item="int64", image="list<float64>?")}  # fmt: skip
    encoding = {"kind": "vector_bytes", "length": LENGTH}
    # In the place of the tags.
    image = {"name": "image", "column": "image", "role": "item", "encoding": encoding}
    config = build_config(logs, folder / "out")
    return change_keys(config, {"sources.items": items, "features.4": image})


def test_a_build_is_read_by_a_model(spark, tmp_path: Path) -> None:
    result = build_dataset(spark, _config(tmp_path))
    manifest, spec = result.manifest, result.manifest.schema["image"]
    assert (spec.dtype, spec.shape, spec.pad_value) == ("bytes", (), "")
    rows = [
        row
        for split in manifest.splits
        if split.name != "users"
        for row in read_split(result.version, manifest, split.name)
        if row["item"] != "OOV"
    ]
    assert {row["item"] for row in rows} == {10, 11, 12}
    for row in rows:
        vector = ITEMS[row["item"]]
        assert row["image"] == (b"" if vector is None else vector.tobytes())
    settings = {
        "kind": "ranking",
        "network": "lr",
        "features": ["image", "user"],
        "vectors": {"image": {"decode": "float64", "length": LENGTH}},
        "tasks": {"c": {"label": "label"}},
    }
    model = build_model(RankingConfig.model_validate(settings), manifest, 1)
    assert "image" in model.inputs
    tokens = pq.read_table(result.version / "encoders" / "item.parquet")["token"].to_pylist()
    [batch] = build_eval_dataset(result.version, manifest, "train", 64, ("image", "item"))
    vectors = decode_vectors("image", batch["image"], VectorConfig(decode="float64", length=LENGTH))
    for found, item in zip(vectors.numpy(), batch["item"].numpy().tolist(), strict=True):
        vector = ITEMS[tokens[item - 2]]
        wanted = np.zeros(LENGTH) if vector is None else vector
        np.testing.assert_array_equal(found, wanted.astype(np.float32))
