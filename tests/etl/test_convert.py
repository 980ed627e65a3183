"""Conversions: every format to every other, and what each refuses."""

from __future__ import annotations

import datetime
import decimal
import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import ConfigError, InputDataError
from etl.convert import (
    FORMATS,
    ConvertOptions,
    TextOptions,
    convert_files,
    detect_format,
    list_inputs,
    parse_type,
)
from etl.tfrecord.commit.output_directory import OutputManifest, OutputShard
from etl.tfrecord.spark.options import parse_type_options
from etl.tfrecord.table import read_table, write_table
from tests.datasets import build_manifest


def convert(files, output, **options):
    """Converts by the names; returns the rows."""
    source, target = detect_format(files[0]), detect_format(output)
    return convert_files(files, source, output, target, ConvertOptions(**options))


def read(path, types=None, **options):
    """The rows of a CSV, as they come out of a conversion to Parquet."""
    output = path.with_name("read.parquet")
    convert([path], output, types=types or {}, text=TextOptions(**options))
    return pq.read_table(output)


def write(table, folder):
    """The text of a table as CSV."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    pq.write_table(table, folder / "write.parquet")
    convert([folder / "write.parquet"], folder / "write.csv")
    return (folder / "write.csv").read_text()


@pytest.mark.parametrize("name", ["a.csv.zlib", "a.tsv.deflate"])
def test_text_is_not_compressed_by_zlib(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    write_table(pa.table({"a": [1]}), tmp_path / "a.tfrecord")
    table, text = tmp_path / "a.tfrecord", tmp_path / name
    for source, read_as, output, target in (
        (table, "tfrecord", text, "csv"), (text, "csv", tmp_path / "b.tfrecord", "tfrecord")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="not compressed"):
            convert_files([source], read_as, output, target, ConvertOptions())


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(FileNotFoundError):
            convert([tmp_path / name], tmp_path / "b.tfrecord")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.tfrecord", "tfrecord"), ("part-0.tfrecord.gz", "tfrecord"),
        ("a.tfrecords.deflate", "tfrecord"), ("A.PARQUET", "parquet"), ("a.tsv.gz", "csv"),
        ("a", None), ("a.txt", None), ("a.gz", None), ("tfrecord", None),
    ],
)  # fmt: skip
def test_the_name_tells_the_format(name, wanted):
    if wanted is not None:
        assert detect_format(Path(name)) == wanted
        return
    with pytest.raises(ConfigError, match="--from"):
        detect_format(Path(name))


def test_a_folder_gives_the_files_that_the_format_reads(tmp_path):
    folder = tmp_path / "in"
    for name in ("_p=1/a.tfrecord", "b.tfrecord", "backup/c.tfrecord", ".p=1/d.tfrecord"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_table(pa.table({"x": [1]}), folder / name)
    (folder / "p=2").symlink_to("_p=1")
    found = [str(path.relative_to(folder)) for path in list_inputs(folder, "tfrecord")]
    assert found == ["_p=1/a.tfrecord", "b.tfrecord", "p=2/a.tfrecord"]
    shard = OutputShard("gone.tfrecord", 1, 9, "0" * 8, "job", 0)
    manifest = OutputManifest("Example", None, (), {}, (), (shard,))
    (folder / "_sluice_commit.json").write_text(manifest.dumps())
    with pytest.raises(InputDataError, match=r"gone\.tfrecord is missing"):
        list_inputs(folder, "tfrecord")


def test_a_listed_shard_of_a_version_that_is_gone_is_refused(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    (tmp_path / "manifest.json").write_text(build_manifest("v").dumps())
    for name in ("part-0", "part-1"):
        write_table(pa.table({"x": [1]}), folder / name)
    assert len(list_inputs(folder, "tfrecord")) == 2
    (folder / "part-0").unlink()
    with pytest.raises(InputDataError, match="part-0 is missing"):
        list_inputs(folder, "tfrecord")


def test_mixed_and_missing_inputs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to convert"):
        list_inputs(tmp_path / "none", None)
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match="several formats"):
        list_inputs(tmp_path, None)


def test_types_by_name():
    assert parse_type("list<float32>") == pa.list_(pa.float32())
    assert parse_type(" int64 ") == pa.int64()
    with pytest.raises(ConfigError, match="int32"):
        parse_type("int32")


def test_types_are_inferred_and_lists_given(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,price,name,tags\n1,0.5,"a, b",x|y\n2,,c,\n3,1,"",""\n')
    table = read(path, types={"tags": pa.list_(pa.string())})
    assert table.schema.types == [pa.int64(), pa.float64(), pa.string(), pa.list_(pa.string())]
    assert table.to_pylist() == [
        {"id": 1, "price": 0.5, "name": "a, b", "tags": ["x", "y"]},
        {"id": 2, "price": None, "name": "c", "tags": None},
        {"id": 3, "price": 1.0, "name": "", "tags": []},
    ]


def test_times_of_any_year_and_views_of_text_are_read(tmp_path):
    table = pa.table(
        {
            "at": pa.array([datetime.datetime(9999, 12, 31)], pa.timestamp("us")),
            "name": pa.array(["a"], pa.string_view()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    convert([tmp_path / "a.parquet"], tmp_path / "b.parquet")
    assert pq.read_table(tmp_path / "b.parquet").to_pylist() == table.to_pylist()
    convert([tmp_path / "a.parquet"], tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == '"at","name"\n9999-12-31 00:00:00.000000,"a"\n'
    convert(
        [tmp_path / "a.parquet"],
        tmp_path / "b.tfrecord",
        policies=parse_type_options({"timestamps": "ms"}),
    )
    assert read_table(tmp_path / "b.tfrecord")["at"].to_pylist() == [253_402_214_400_000]


@pytest.mark.parametrize(
    ("data", "types", "message"),
    [
        (b"no gzip\0\xff", {}, "does not read as CSV"),
        (b"", {}, "CSV"),
        (b'id,name\n1,x\n2,"abc\n', {}, "within quotes"),
        (b"id\n1\nx\n", {"id": pa.int64()}, r"(?s)'x'.*--types"),
        (b"id\n1\nx\n", {"id": pa.list_(pa.int64())}, "'x'"),
        (b"n\xe9,b\n1,2\n", {}, "UTF-8"),
        (b"a,b,a\n1,2,3\n", {}, "'a'"),
        (gzip.compress(b"a,b\n" * 9, mtime=0)[:-9], {}, r"a\.csv\.gz does not read as CSV"),
        (b"PAR1 nonsense", {}, r"a\.parquet does not read"),
    ],
)
def test_malformed_files_are_refused(tmp_path, data, types, message):
    path = tmp_path / {b"\x1f": "a.csv.gz", b"P": "a.parquet"}.get(data[:1], "a.csv")
    path.write_bytes(data)
    with pytest.raises(InputDataError, match=message):
        read(path, types=types)


def test_lists_become_text(tmp_path):
    batch = pa.record_batch({"n": [[1, 2], []], "s": [["a"], None], "b": [b"x", b"y"]})
    assert write(batch, tmp_path) == '"n","s","b"\n"1|2","a","x"\n"",,"y"\n'
    large = pa.array([["a"]], pa.large_list(pa.large_string()))
    columns = {"a": large, "b": pa.array([[1, 2]], pa.list_(pa.int64(), 2))}
    columns["j"] = pa.array(['{"a":1}'], pa.json_())
    assert write(pa.record_batch(columns), tmp_path) == '"a","b","j"\n"a","1|2","{""a"":1}"\n'


def test_an_empty_line_is_the_null_of_an_only_column(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("flag\ntrue\n\nfalse\n")
    assert read(path).column("flag").to_pylist() == [True, None, False]
    path.write_text("flag,x\ntrue,1\n\nfalse,2\n")
    assert read(path).column("flag").to_pylist() == [True, False]


def test_words_are_no_nulls_unless_they_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('country,x\nNA,nan\nNO,1.5\n,"NA"\n')
    assert read(path).column("country").to_pylist() == ["NA", "NO", None]
    path.write_text("country,x\nNA,nan\nNO,1.5\n,\n")
    x = read(path).column("x").to_pylist()
    assert (x[0] != x[0], x[1:]) == (True, [1.5, None])
    assert read(path, nulls=("NA", "nan")).to_pylist()[0] == {"country": None, "x": None}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([["a", None]], "holds a null"), ([[1, None]], "holds a null"), ([["a"], [""]], "empty"),
        ([["a|b"]], "list separator"), ([b"\xff"], "'c'"),
        (pa.array([b"\xff" * 16], pa.uuid()), "'c'"),
    ],
)  # fmt: skip
def test_what_text_cannot_express_is_refused(tmp_path, values, what):
    with pytest.raises(InputDataError, match=what):
        write(pa.record_batch({"c": values}), tmp_path)


def test_columns_without_a_text_form_are_all_named(tmp_path):
    types = {"s": pa.struct({"x": pa.int64()}), "m": pa.map_(pa.string(), pa.int64())}
    nested = pa.list_(pa.list_(pa.int64()))
    schema = pa.schema({**types, "n": nested, "ok": pa.int64()})
    with pytest.raises(ConfigError, match=r"(?s)3 column.*s \(struct.*m \(map.*n \(list"):
        write(schema.empty_table(), tmp_path)
    assert not (tmp_path / "write.csv").exists()


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
    with pytest.raises(ConfigError, match="one of the inputs"):
        convert([output], output)


def test_csv_with_lists_there_and_back(parquet, tmp_path):
    middle, output = tmp_path / "a.csv", tmp_path / "b.tfrecord"
    text = TextOptions(list_separator=";")
    types = {"score": pa.float32(), "tags": pa.list_(pa.string())}
    convert_files([parquet], "parquet", middle, "csv", ConvertOptions(text=text))
    convert_files([middle], "csv", output, "tfrecord", ConvertOptions(text=text, types=types))
    assert read_table(output, schema=TABLE.schema).equals(TABLE)


def test_several_files_become_one_where_their_columns_agree(tmp_path):
    for name, text in (("a", "id\n1\n"), ("b", "id\n2\n"), ("c", "uid\n1\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    convert([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out.tfrecord")
    assert read_table(tmp_path / "out.tfrecord").column("id").to_pylist() == [1, 2]
    before = set(tmp_path.iterdir())
    with pytest.raises(InputDataError, match="other columns"):
        convert([tmp_path / "a.csv", tmp_path / "c.csv"], tmp_path / "o.tfrecord")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", ["tfrecord", "parquet", "csv", "csv.gz"])
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, target):
    sources = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for source, value in zip(sources, ("1", "x"), strict=True):
        source.write_text(f"n\n{value}\n")
    output = tmp_path / f"o.{target}"
    output.write_text("precious")
    with pytest.raises(InputDataError, match=r"b\.csv"):
        convert(sources, output, types={"n": pa.int64()})
    assert output.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 3


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


def test_text_is_compressed_where_the_name_says_so(parquet, tmp_path):
    output, back = tmp_path / "a.csv.gz", tmp_path / "b.parquet"
    convert_files([parquet], "parquet", output, "csv", ConvertOptions())
    assert output.read_bytes()[:2] == b"\x1f\x8b"
    options = ConvertOptions(types={"score": pa.float32(), "tags": pa.list_(pa.string())})
    convert_files([output], "csv", back, "parquet", options)
    assert pq.read_table(back).equals(TABLE)


FOLDERS = ("land=a%2Fb/h=08", "land=__HIVE_DEFAULT_PARTITION__/h=11", "land=NO/h=00")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("types", "hours"), [({}, [0, 11, 8]), ({"h": pa.string()}, ["00", "11", "08"])]
)
def test_folders_give_columns_that_their_files_lack(tmp_path, kind, types, hours):
    for number, name in enumerate(FOLDERS):
        (tmp_path / "in" / name).mkdir(parents=True)
        pq.write_table(pa.table({"id": [number], "x": [0.5]}), tmp_path / "one.parquet")
        convert([tmp_path / "one.parquet"], tmp_path / "in" / name / f"data.{kind}")
    files, output = list_inputs(tmp_path / "in", None), tmp_path / "out.parquet"

    convert(files, output, types=types, folder=tmp_path / "in")

    assert pq.read_table(output).to_pydict() == {
        "id": [2, 1, 0], "x": [0.5] * 3, "land": ["NO", None, "a/b"], "h": hours
    }  # fmt: skip


def test_a_column_of_the_files_goes_before_that_of_their_folders(tmp_path):
    (tmp_path / "in" / "year=2024").mkdir(parents=True)
    file, output = tmp_path / "in" / "year=2024" / "0.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"id": [1], "year": ["24"]}), file)

    convert([file], output, folder=tmp_path / "in")

    assert pq.read_table(output).to_pydict() == {"id": [1], "year": ["24"]}
    with pytest.raises(ConfigError, match="year"):
        convert([file], output, folder=tmp_path / "in", types={"year": pa.int64()})


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("2024-01-31", pa.date32(), datetime.date(2024, 1, 31)),
        ("2024-01-31 05%3A00%3A00", pa.timestamp("us"), datetime.datetime(2024, 1, 31, 5)),
        ("1.5", pa.float64(), 1.5),
        ("3000000000", pa.int64(), 3_000_000_000),
        ("9" * 21, pa.decimal128(21, 0), decimal.Decimal("9" * 21)),
    ],
)
def test_values_of_folders_have_the_type_that_spark_infers(tmp_path, name, kind, value):
    (tmp_path / "in" / f"p={name}").mkdir(parents=True)
    file, output = tmp_path / "in" / f"p={name}" / "0.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"id": [1]}), file)

    convert([file], output, folder=tmp_path / "in")

    table = pq.read_table(output, partitioning=None)
    assert (table.schema.field("p").type, table["p"][0].as_py()) == (kind, value)
