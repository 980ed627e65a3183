from __future__ import annotations

import json

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from etl.statistics import StatisticsAccumulator

SCHEMA = pa.schema(
    [("item", pa.int64()), ("history", pa.list_(pa.int64())), ("price", pa.float32()),
     ("tags", pa.large_list(pa.string())), ("flag", pa.bool_())]
)  # fmt: skip
ROWS = [
    {"item": 5, "history": [1, 2, 3], "price": 1.5, "tags": ["a", "b"], "flag": True},
    {"item": 1, "history": [], "price": None, "tags": None, "flag": False},
    {"item": 5, "history": None, "price": float("nan"), "tags": ["a"], "flag": True},
    {"item": 0, "history": [1] * 9, "price": -2.5, "tags": [], "flag": True},
]


def statistics(*batches: pa.RecordBatch) -> dict:
    accumulator = StatisticsAccumulator(SCHEMA)
    for batch in batches:
        accumulator.update(batch)
    return accumulator.to_dict()


def test_rows_missing_and_values_are_counted():
    result = statistics(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA))
    counts = {name: (f["rows"], f["missing"], f["values"]) for name, f in result.items()}
    assert counts == {
        "item": (4, 0, 4), "history": (4, 1, 12), "price": (4, 1, 3), "tags": (4, 1, 3),
        "flag": (4, 0, 4),
    }  # fmt: skip
    assert (result["item"]["oov"], result["item"]["zeros"]) == (1, 1)
    assert result["history"]["oov"] == 10
    assert (result["price"]["nan"], result["price"]["mean"]) == (1, -0.5)
    assert result["flag"]["mean"] == 0.75
    assert result["tags"]["top"]["values"] == [["a", 2], ["b", 1]]


def test_lengths_of_lists():
    length = statistics(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA))["history"]["length"]
    assert (length["min"], length["max"], length["mean"], length["total"]) == (0, 9, 4.0, 12)
    assert [(i["low"], i["high"], i["count"]) for i in length["histogram"]] == [
        (0, 0, 1), (2, 3, 1), (8, 15, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(len(ROWS) + 1))
def test_batches_and_slices_do_not_matter(cut):
    whole = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
    assert statistics(whole[:cut], whole[cut:]) == statistics(whole)


def test_nothing_gives_statistics_of_nothing_as_strict_json():
    result = statistics()
    json.dumps(result, allow_nan=False)
    assert result["history"]["length"]["mean"] is None
    json.dumps(statistics(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)), allow_nan=False)


@pytest.mark.parametrize("data_type", [pa.timestamp("s"), pa.list_(pa.list_(pa.int64()))])
def test_types_without_statistics_are_refused(data_type):
    with pytest.raises(InputDataError, match="'when'"):
        StatisticsAccumulator(pa.schema([("when", data_type)]))
