from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import ConfigError, InputDataError
from etl.conversion.convert import convert_files
from etl.conversion.formats import ConvertOptions, TextOptions
from etl.tfrecord.table import read_table, write_table

TABLE = pa.table(
    {
        "id": [1, -(2**63), 2**63 - 1],
        "score": pa.array([0.5, None, float("inf")], pa.float32()),
        "name": ["a", "", "ü, \n|"],
        "tags": [["x", ""], [], ["y"]],
    }
)


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(TABLE, path, row_group_size=2)
    return path


def test_parquet_to_tfrecord_and_back(parquet, tmp_path):
    middle, output = tmp_path / "a.tfrecord", tmp_path / "b.parquet"
    seen = []
    rows = convert_files([parquet], "parquet", middle, "tfrecord", ConvertOptions(), seen.append)
    assert rows == sum(seen) == 3
    assert convert_files([middle], "tfrecord", output, "parquet", ConvertOptions()) == 3
    assert pq.read_table(output).equals(TABLE)


def test_csv_with_lists_there_and_back(parquet, tmp_path):
    middle, output = tmp_path / "a.csv", tmp_path / "b.tfrecord"
    text = TextOptions(list_separator=";")
    types = {"score": pa.float32(), "tags": pa.list_(pa.string())}
    convert_files([parquet], "parquet", middle, "csv", ConvertOptions(text=text))
    convert_files([middle], "csv", output, "tfrecord", ConvertOptions(text=text, types=types))
    assert read_table(output, schema=TABLE.schema).equals(TABLE)


def test_libsvm_there_and_back(tmp_path):
    source, middle, output = tmp_path / "a.libsvm", tmp_path / "a.tfrecord", tmp_path / "b.libsvm"
    source.write_text("1 3:0.5 7:2\n0\n1 1:1\n")
    convert_files([source], "libsvm", middle, "tfrecord", ConvertOptions())
    schema = pa.schema(
        [("label", pa.float32()), ("indices", pa.list_(pa.int64())),
         ("values", pa.list_(pa.float32()))]
    )  # fmt: skip
    assert read_table(middle, schema=schema).column("indices").to_pylist() == [[3, 7], [], [1]]
    convert_files([middle], "tfrecord", output, "libsvm", ConvertOptions())
    assert output.read_text() == source.read_text()


def test_several_files_become_one(tmp_path):
    for name, line in (("a", "1"), ("b", "2")):
        (tmp_path / f"{name}.csv").write_text(f"id\n{line}\n")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    convert_files(files, "csv", tmp_path / "out.tfrecord", "tfrecord", ConvertOptions())
    assert read_table(tmp_path / "out.tfrecord").column("id").to_pylist() == [1, 2]


def test_files_with_other_columns_are_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "a.csv").write_text("id\n1\n")
    (tmp_path / "b.csv").write_text("uid\n1\n")
    before = set(tmp_path.iterdir())
    with pytest.raises(InputDataError, match="other columns"):
        convert_files([tmp_path / "a.csv", tmp_path / "b.csv"], "csv", tmp_path / "o.tfrecord",
                      "tfrecord", ConvertOptions())  # fmt: skip
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", ["tfrecord", "parquet", "csv", "libsvm"])
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, target):
    source = tmp_path / "a.libsvm"
    source.write_text("1 1:1\nx\n")
    output = tmp_path / f"o.{target}"
    output.write_text("precious")
    with pytest.raises(InputDataError):
        convert_files([source], "libsvm", output, target, ConvertOptions())
    assert output.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_output_may_not_be_an_input(parquet):
    with pytest.raises(ConfigError, match="one of the inputs"):
        convert_files([parquet], "parquet", parquet, "parquet", ConvertOptions())


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputDataError, match=r"a\.parquet"):
        convert_files([path], "parquet", tmp_path / "o.tfrecord", "tfrecord", ConvertOptions())


def test_bytes_that_are_no_text_come_out_of_tfrecords_by_their_type(tmp_path):
    table = pa.table({"b": [b"\xff\x00", b"a"], "n": [1, 2]})
    source, output = tmp_path / "a.tfrecord", tmp_path / "a.parquet"
    write_table(table, source)
    with pytest.raises(InputDataError, match="'b'"):
        convert_files([source], "tfrecord", output, "parquet", ConvertOptions())
    options = ConvertOptions(types={"b": pa.binary()})
    convert_files([source], "tfrecord", output, "parquet", options)
    assert pq.read_table(output).equals(table)
    with pytest.raises(ConfigError, match=r"(?s)does not have.*received: z"):
        convert_files(
            [source], "tfrecord", output, "parquet", ConvertOptions(types={"z": pa.binary()})
        )


def test_types_are_not_passed_over_where_files_have_their_own(parquet, tmp_path):
    options = ConvertOptions(types={"id": pa.string()})
    with pytest.raises(ConfigError, match="--types"):
        convert_files([parquet], "parquet", tmp_path / "a.csv", "csv", options)


def test_text_is_compressed_where_the_name_says_so(parquet, tmp_path):
    output, back = tmp_path / "a.csv.gz", tmp_path / "b.parquet"
    convert_files([parquet], "parquet", output, "csv", ConvertOptions())
    assert output.read_bytes()[:2] == b"\x1f\x8b"
    options = ConvertOptions(types={"score": pa.float32(), "tags": pa.list_(pa.string())})
    convert_files([output], "csv", back, "parquet", options)
    assert pq.read_table(back).equals(TABLE)
