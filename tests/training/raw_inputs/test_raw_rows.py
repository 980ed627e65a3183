"""Raw rows of files as inputs: what is no number that a model can read is refused by its row."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.export import LINE, Give
from conf.errors import ExitCode, InputDataError
from training.apply.answers import Answers, check_numbers
from training.apply.export import find_inputs
from training.apply.parts import Job, RowSource, read_part
from training.raw_inputs.converter import find_bad_number
from training.raw_inputs.files import RawFile, RawReader
from training.raw_inputs.inputs import InputColumn

NAN, INF = float("nan"), float("inf")


def number(name: str, dtype: str = "float32", *, is_list: bool = False) -> InputColumn:
    padding = -1.0 if is_list else None
    return InputColumn(name, name, name, dtype, is_list, None, None, padding, -2.0)


INPUTS = [
    number("price"),
    number("cost", "float64"),
    number("tastes", is_list=True),
    InputColumn("count", "count", "count", "int64", False, None, None, None, -1),
]
GOOD = {"price": 2.5, "cost": -1.0, "tastes": [0.5, 1.5], "count": 3}


def write(folder: Path, kind: str, rows: list[dict]) -> Path:
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
    parts = [rows.inputs for rows in RawReader(RawFile(path), INPUTS).read(batch_size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_whole_numbers_are_read_each_by_itself(tmp_path) -> None:
    beyond = 2**53 + 1
    texts = ["+7", f" {beyond}", "10.0", "-3 "]
    path = write(tmp_path, "csv", [{**GOOD, "count": text} for text in texts])
    assert read(path)["count"].tolist() == [7, beyond, 10, -3]


@pytest.mark.parametrize("text", ["0x7", "1.5", "9007199254740993.0", "9223372036854775808", "7e"])
def test_the_row_that_is_no_whole_number_is_named(tmp_path, text) -> None:
    rows = [{**GOOD, "count": "+7"}, {**GOOD, "count": text}, {**GOOD, "count": 2**53 + 1}]
    with pytest.raises(InputDataError, match="row 2: column 'count'"):
        read(write(tmp_path, "csv", rows))


@pytest.mark.parametrize("number", ["1_0", "\u0661", "\u00a01", "0x1p3", "1d"])
@pytest.mark.parametrize("name", ["price", "count"])
def test_numbers_are_those_of_the_build(tmp_path, name, number) -> None:
    with pytest.raises(InputDataError, match=f"row 2: column {name!r}"):
        read(write(tmp_path, "csv", [GOOD, {**GOOD, name: number}]))


def test_text_of_numbers_is_read_as_the_build_reads_it(tmp_path) -> None:
    texts = ["+2.5", " .5", "1.", "-1e-1\t"]
    path = write(tmp_path, "csv", [{**GOOD, "price": text} for text in texts])
    assert read(path)["price"].tolist() == pytest.approx([2.5, 0.5, 1.0, -0.1])


def test_a_quote_without_an_end_is_refused(tmp_path) -> None:
    path = write(tmp_path, "csv", [GOOD, GOOD])
    path.write_text(path.read_text() + '1,2,3,"4\n')
    with pytest.raises(InputDataError) as refused:
        read(path)
    assert "line 4" in refused.value.received


def test_two_columns_of_one_name_are_refused(tmp_path) -> None:
    path = write(tmp_path, "parquet", [GOOD])
    table = pq.read_table(path)
    pq.write_table(table.append_column("price", table["price"]), path)
    with pytest.raises(InputDataError, match="two columns of one name") as refused:
        read(path)
    assert "price" in refused.value.render()


def test_a_part_that_lacks_a_column_is_named(tmp_path) -> None:
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([GOOD]), folder / "part-0.parquet")
    short = {name: value for name, value in GOOD.items() if name not in ("price", "count")}
    pq.write_table(pa.Table.from_pylist([short]), folder / "part-1.parquet")
    with pytest.raises(InputDataError, match="lacks columns") as refused:
        read(folder)
    assert "part-1.parquet: no price, count" in refused.value.render()


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("name", ["price", "cost", "tastes"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e39])
def test_numbers_that_are_not_finite_name_their_row_and_column(tmp_path, kind, name, value) -> None:
    bad = {**GOOD, name: [0.5, value] if name == "tastes" else value}
    with pytest.raises(InputDataError) as caught:
        read(write(tmp_path, kind, [GOOD, GOOD, {**GOOD, "tastes": []}, bad]), 3)
    assert f"rows.{kind}, row 4: column '{name}'" in str(caught.value)
    assert str(value) in caught.value.received
    assert "finite numbers" in caught.value.allowed
    assert caught.value.exit_code == ExitCode.INPUT_REFUSED


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_what_is_finite_or_missing_is_read(tmp_path, kind) -> None:
    rows = [
        {"price": -0.0, "cost": 1e-310, "tastes": [1e-45, 3.4e38], "count": 2**63 - 1},
        {"price": None, "cost": None, "tastes": [0.5], "count": None},
        {"price": 16777217 if kind == "jsonl" else 16777217.0, "cost": 3.0, "tastes": [],
         "count": 1},
    ]  # fmt: skip
    found = read(write(tmp_path, kind, rows))
    assert found["price"].tolist() == [0.0, -2.0, 16777216.0]
    assert np.signbit(found["price"][0])
    assert found["cost"].tolist() == [1e-310, -2.0, 3.0]
    expected = [[1e-45, 3.4e38], [0.5, -1.0], [-1.0, -1.0]]
    np.testing.assert_array_equal(found["tastes"], np.float32(expected))
    assert found["count"].tolist() == [2**63 - 1, -1, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("price", "2.5"), ("price", True), ("price", [1.0]), ("price", 10**400),
        ("tastes", [True, 1.5]), ("tastes", ["1"]), ("tastes", 1.0), ("tastes", "12"),
        ("count", 2.5), ("count", "3"), ("count", True), ("count", 2**63), ("count", NAN),
    ],
)  # fmt: skip
def test_json_keeps_its_types(tmp_path, name, value) -> None:
    """Text is no number, a boolean none, and 2.5 is not 2."""
    with pytest.raises(InputDataError, match=f"row 2: column '{name}'"):
        read(write(tmp_path, "jsonl", [GOOD, {**GOOD, name: value}, GOOD]))


def test_whole_floats_of_json_are_whole_numbers(tmp_path) -> None:
    found = read(write(tmp_path, "jsonl", [{**GOOD, "count": 2.0}, {**GOOD, "count": 5}]))
    assert found["count"].tolist() == [2, 5]


@pytest.mark.parametrize("as_json", [True, False])
def test_executors_refuse_them_alike(tmp_path, as_json) -> None:
    rows = [GOOD, {**GOOD, "cost": 1e39}]
    if as_json:
        batch = pa.RecordBatch.from_pydict({LINE: [json.dumps(row) for row in rows]})
    else:
        [batch] = pa.Table.from_pylist(rows).to_batches()
    signatures = {"serving_default": {"inputs": [item.to_json() for item in INPUTS]}}
    card = {"outputs": [{"name": "click"}], "signatures": signatures}
    export = SimpleNamespace(card=card, find_inputs=partial(find_inputs, card), batch_size=9)
    source = RowSource("hdfs:///rows", "jsonl" if as_json else "parquet", tuple(GOOD))
    job = Job("out", "parquet", Answers(Give.SCORES, 1), source, part_rows=100, rows=1000)
    with pytest.raises(InputDataError, match="hdfs:///rows, row 302: column 'cost'"):
        list(read_part(job, cast(Any, export), None, 3, iter([batch])))


def test_the_first_bad_number_is_found_in_any_shape() -> None:
    values = np.ones((2, 3))
    assert find_bad_number(values) is None
    assert find_bad_number(values[:0]) is None
    values[1, 0] = 3.5e38
    assert find_bad_number(values) == 3
    assert find_bad_number(np.float32([0.0, -0.0, 1e-45, NAN])) == 3


def test_scores_and_vectors_that_are_no_numbers_name_their_row() -> None:
    check_numbers({"click": np.float32([0.5]), "vector": np.ones((2, 3), np.float32)}, 7)
    vectors = np.ones((3, 4), np.float32)
    vectors[2, 1] = NAN
    for values in (vectors, vectors[:, 1]):
        with pytest.raises(InputDataError) as caught:
            check_numbers({"task": values}, 7)
        assert "nan in row 9" in caught.value.received
