"""Raw rows of files as inputs: what a model cannot read is refused by its row and column."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import InputDataError
from training.raw_inputs.converter import RawColumns
from training.raw_inputs.files import RawFile
from training.raw_inputs.inputs import InputColumn

NAN, INF = float("nan"), float("inf")
BEYOND = 2**53 + 1


def number(name: str, dtype: str = "float32", *, is_list: bool = False) -> InputColumn:
    padding = -1.0 if is_list else None
    return InputColumn(name, name, name, dtype, is_list, None, None, padding, -2.0)


COUNT = InputColumn("count", "count", "count", "int64", False, None, None, None, -1)
INPUTS = [number("price"), number("cost", "float64"), number("tastes", is_list=True), COUNT]
GOOD: dict[str, Any] = {"price": 2.5, "cost": -1.0, "tastes": [0.5, 1.5], "count": 3}


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        lines = [",".join(GOOD)]
        for row in rows:
            flat = ("|".join(map(str, v)) if isinstance(v, list) else v for v in row.values())
            lines.append(",".join("" if value is None else str(value) for value in flat))
        path.write_text("\n".join(lines) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(path: Path, batch_size: int = 9) -> dict[str, np.ndarray]:
    parts = [rows.inputs for rows in RawFile(path).read(INPUTS, batch_size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_text_of_numbers_is_read_each_by_itself_as_the_build_reads_it(tmp_path: Path) -> None:
    texts = {
        "count": ["+7", f" {BEYOND}", "10.0", "-3 "],
        "price": ["+2.5", " .5", "1.", "-1e-1\t"],
    }
    rows = [{**GOOD, "count": c, "price": p} for c, p in zip(*texts.values(), strict=True)]
    found = read(write(tmp_path, "csv", rows))
    assert found["count"].tolist() == [7, BEYOND, 10, -3]
    assert found["price"].tolist() == pytest.approx([2.5, 0.5, 1.0, -0.1])


WRONG_TEXTS = {
    "count": ["0x7", "1.5", "9007199254740993.0", "9223372036854775808", "7e"],
    "price": ["1_0", "\u0661", "\u00a01", "0x1p3", "1d"],
}
WRONG_JSON = {
    "price": ["2.5", True, [1.0], 10**400],
    "tastes": [[True, 1.5], ["1"], 1.0, "12"],
    "count": [2.5, "3", True, 2**63, NAN, 2.0**53],
}
NOT_FINITE = [NAN, INF, -INF, 1e39]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(("csv", name, text) for name, texts in WRONG_TEXTS.items() for text in texts),
        *(("jsonl", name, value) for name, values in WRONG_JSON.items() for value in values),
        *((k, n, v) for k in ("csv", "jsonl", "parquet") for n in ("price", "cost")
          for v in NOT_FINITE),
        *((k, "tastes", [0.5, v]) for k in ("csv", "jsonl", "parquet") for v in NOT_FINITE),
    ],
)  # fmt: skip
def test_what_is_no_number_names_its_row_and_column(
    tmp_path: Path, kind: str, name: str, value: Any
) -> None:
    rows = [{**GOOD, "count": BEYOND}, {**GOOD, "tastes": []}, GOOD, {**GOOD, name: value}, GOOD]
    with pytest.raises(InputDataError, match=f"rows.{kind}, row 4: column {name!r} must be"):
        read(write(tmp_path, kind, rows), 3)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_what_is_finite_or_missing_is_read(tmp_path: Path, kind: str) -> None:
    rounded = 16777217 if kind == "jsonl" else 16777217.0
    rows = [
        {"price": -0.0, "cost": 1e-310, "tastes": [1e-45, 3.4e38], "count": 2**63 - 1},
        {"price": None, "cost": None, "tastes": [0.5], "count": None},
        {"price": rounded, "cost": 3.0, "tastes": [], "count": 2.0 if kind == "jsonl" else 2},
    ]
    found = read(write(tmp_path, kind, rows))
    assert found["price"].tolist() == [0.0, -2.0, 16777216.0]
    assert np.signbit(found["price"][0])
    assert found["cost"].tolist() == [1e-310, -2.0, 3.0]
    expected = [[1e-45, 3.4e38], [0.5, -1.0], [-1.0, -1.0]]
    np.testing.assert_array_equal(found["tastes"], np.float32(expected))
    assert found["count"].tolist() == [2**63 - 1, -1, 2]


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [GOOD, GOOD])
    path.write_text(path.read_text() + '1,2,3,"4\n')
    with pytest.raises(InputDataError, match="cannot be read") as refused:
        read(path)
    assert "line 4" in refused.value.received
    path = write(tmp_path, "parquet", [GOOD])
    table = pq.read_table(path)
    pq.write_table(table.append_column("price", table["price"]), path)
    with pytest.raises(InputDataError, match="two columns of one name"):
        read(path)
    folder = tmp_path / "parts.parquet"
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet")
    pq.write_table(table.drop(["price", "count"]), folder / "part-1.parquet")
    with pytest.raises(InputDataError, match="cannot be read") as refused:
        read(folder)
    assert "part-1.parquet lacks count, price" in refused.value.received


def test_rows_have_their_numbers_or_ids_in_any_batches(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{**GOOD, "id": f"r{n}"} for n in range(5)])
    for column, expected in ((None, [1, 2, 3, 4, 5]), ("id", ["r0", "r1", "r2", "r3", "r4"])):
        parts = list(RawFile(path, column).read(INPUTS, 2))
        assert [row for part in parts for row in part.ids.to_pylist()] == expected
        assert [part.first for part in parts] == [1, 3, 5]


SECONDS = [1_577_836_800, 1_580_000_000]
MILLISECONDS = [1000 * time for time in SECONDS]
MOMENT = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
NAIVE = MOMENT.replace(tzinfo=None)


@pytest.mark.parametrize(
    ("unit", "values", "kind", "expected"),
    [
        ("s", SECONDS, None, SECONDS),
        ("ms", [*MILLISECONDS, 0, None], None, [*MILLISECONDS, 0, -1]),
        ("ms", SECONDS[:1], None, SECONDS[:1]),  # one day of January 1970
        ("ms", [*SECONDS, 5], None, [*SECONDS, 5]),  # counts from 0
        ("ms", [*SECONDS, None], None, None),
        ("s", MILLISECONDS, None, None),
        *((unit, [given, None], kind, [time[0], -1])
          for unit, time in (("s", SECONDS), ("ms", MILLISECONDS))
          for given, kind in ((NAIVE, pa.timestamp("us")), (MOMENT, pa.timestamp("ms", "UTC")),
                              (MOMENT.date(), pa.date32()))),
    ],
)  # fmt: skip
def test_times_are_those_of_the_build_s_unit_and_no_others(
    unit: str, values: list[Any], kind: pa.DataType | None, expected: list[int] | None
) -> None:
    item = InputColumn("f", "f", "at", "int64", False, None, None, None, -1, time_unit=unit)
    rows = RawColumns([item], "rows.parquet")
    columns = {name: pa.array(values, kind) for name in rows.choose(["at", "f"])}
    if expected is not None:
        assert rows.build(columns, 1).inputs["f"].tolist() == expected
        return
    with pytest.raises(InputDataError, match="holds times in") as refused:
        rows.build(columns, 1)
    assert "2020-01-01 to 2020-01-26" in refused.value.render()
