"""Conversions: every format to every other, and what each refuses."""

from __future__ import annotations

import datetime
import decimal
import gzip
from pathlib import Path
from typing import Any

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
)
from etl.tfrecord.commit.output_directory import OutputManifest, OutputShard
from etl.tfrecord.table import read_table, write_table
from tests.datasets import build_manifest


def convert(files: list[Path], output: Path, **options: Any) -> int:
    """Converts by the names; returns the rows."""
    source, target = detect_format(files[0]), detect_format(output)
    return convert_files(files, source, output, target, ConvertOptions(**options))


def read(path: Path, types: dict[str, pa.DataType] | None = None, **options: Any) -> pa.Table:
    """The rows of a CSV, as they come out of a conversion to Parquet."""
    output = path.with_name("read.parquet")
    convert([path], output, types=types or {}, text=TextOptions(**options))
    return pq.read_table(output)


def write(table: pa.Table, folder: Path) -> str:
    """The text of a table as CSV."""
    pq.write_table(table, folder / "write.parquet")
    convert([folder / "write.parquet"], folder / "write.csv")
    return (folder / "write.csv").read_text()


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
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.parquet").touch()
    for path, message in ((tmp_path / "none", "nothing to convert"), (tmp_path, "several formats")):
        with pytest.raises(ConfigError, match=message):
            list_inputs(path, None)


def test_a_listed_shard_that_is_gone_is_refused(tmp_path):
    shard = OutputShard("gone.tfrecord", 1, 9, "0" * 8, "job", 0)
    output = OutputManifest("Example", None, (), {}, (), (shard,))
    for folder, manifest in (
        (tmp_path / "output", tmp_path / "output" / "_sluice_commit.json"),
        (tmp_path / "version" / "train", tmp_path / "version" / "manifest.json"),
    ):
        folder.mkdir(parents=True)
        is_version = folder.name == "train"
        manifest.write_text(build_manifest("v").dumps() if is_version else output.dumps())
        write_table(pa.table({"x": [1]}), folder / "part-1.tfrecord")
        with pytest.raises(InputDataError, match=r"(gone\.tfrecord|part-0) is missing"):
            list_inputs(folder, "tfrecord")


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


@pytest.mark.parametrize(
    ("text", "nulls", "first"),
    [
        ('country,x\nNA,nan\nNO,1.5\n,"NA"\n', (), ["NA", "NO", None]),
        ("country,x\nNA,nan\nNO,1.5\n,\n", ("NA", "nan"), [None, "NO", None]),
        # An empty line is the null of an only column.
        ("flag\ntrue\n\nfalse\n", (), [True, None, False]),
        ("flag,x\ntrue,1\n\nfalse,2\n", (), [True, False]),
        ("flag,x\n1,1\nTrue,1\n", (), ["1", "True"]),
    ],
)
def test_words_are_no_nulls_unless_they_are_named(tmp_path, text, nulls, first):
    (tmp_path / "a.csv").write_text(text)
    assert read(tmp_path / "a.csv", nulls=nulls).column(0).to_pylist() == first


@pytest.mark.parametrize(
    ("data", "types", "message"),
    [
        (b"no gzip\0\xff", {}, "does not read as CSV"),
        (b"", {}, "CSV"),
        (b'id,name\n1,x\n2,"abc\n', {}, "within quotes"),
        (b"id\n1\nx\n", {"id": pa.int64()}, r"(?s)'x'.*--types"),
        (b"id\n1\nx\n", {"id": pa.list_(pa.int64())}, "'x'"),
        (b"n\n0.5\n 1e39\n", {"n": pa.float32()}, "'n': 1e39 is beyond float"),
        (b"n\n0.5|1e400\n", {"n": pa.list_(pa.float64())}, "'n': 1e400 is beyond double"),
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
    path.unlink()
    with pytest.raises(FileNotFoundError):  # The system's errors stay what they are.
        read(path)


def test_every_type_that_has_a_text_form_becomes_text(tmp_path):
    table = pa.table({"n": [[1, 2], []], "s": [["a"], None], "b": [b"x", b"y"]})
    assert write(table, tmp_path) == '"n","s","b"\n"1|2","a","x"\n"",,"y"\n'
    columns = {
        "a": pa.array([["a"]], pa.large_list(pa.large_string())),
        "b": pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
        "j": pa.array(['{"a":1}'], pa.json_()),
        "at": pa.array([datetime.datetime(9999, 12, 31)], pa.timestamp("us")),
        "v": pa.array(["a"], pa.string_view()),
        "d": pa.array(["a"]).dictionary_encode(),
    }
    line = '"a","1|2","{""a"":1}",9999-12-31 00:00:00.000000,"a","a"'
    assert write(pa.table(columns), tmp_path) == f'"a","b","j","at","v","d"\n{line}\n'


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
        write(pa.table({"c": values}), tmp_path)


def test_columns_without_a_text_form_are_all_named(tmp_path):
    types = {"s": pa.struct({"x": pa.int64()}), "m": pa.map_(pa.string(), pa.int64())}
    types["t"] = pa.duration("s")
    schema = pa.schema({**types, "n": pa.list_(pa.list_(pa.int64())), "ok": pa.int64()})
    with pytest.raises(ConfigError, match=r"(?s)4 column.*s \(struct.*m \(map.*t \(dur.*n \(list"):
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


@pytest.mark.parametrize("middle", ["a.tfrecord", "a.csv", "a.csv.gz"])
def test_what_comes_back_is_what_was_there(tmp_path, middle):
    source, output = tmp_path / "in.parquet", tmp_path / "b.parquet"
    pq.write_table(TABLE, source, row_group_size=2)
    options = {"text": TextOptions(list_separator=";")}
    assert convert([source], tmp_path / middle, **options) == 3
    assert ((tmp_path / middle).read_bytes()[:2] == b"\x1f\x8b") == middle.endswith(".gz")
    if ".csv" in middle:
        options["types"] = {"score": pa.float32(), "tags": pa.list_(pa.string())}
    assert convert([tmp_path / middle], output, **options) == 3
    assert pq.read_table(output).equals(TABLE)
    with pytest.raises(ConfigError, match="one of the inputs"):
        convert([output], output)


def test_several_files_become_one_where_their_columns_agree(tmp_path):
    for name, text in (("a", "id\n1\n"), ("b", "id\n2\n"), ("c", "uid\n1\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    convert([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out.tfrecord")
    assert read_table(tmp_path / "out.tfrecord").column("id").to_pylist() == [1, 2]
    with pytest.raises(InputDataError, match="other columns"):
        convert([tmp_path / "a.csv", tmp_path / "c.csv"], tmp_path / "o.tfrecord")
    for target in (*FORMATS, "csv.gz"):
        output = tmp_path / f"o.{target}"
        output.write_text("precious")
        (tmp_path / "b.csv").write_text("id\nx\n")
        before = set(tmp_path.iterdir())
        with pytest.raises(InputDataError, match=r"b\.csv"):
            convert([tmp_path / "a.csv", tmp_path / "b.csv"], output, types={"id": pa.int64()})
        assert output.read_text() == "precious"
        assert set(tmp_path.iterdir()) == before


def test_bytes_that_are_no_text_come_out_of_tfrecords_by_their_type(tmp_path):
    table = pa.table({"b": [b"\xff\x00", b"a"], "n": [1, 2]})
    source, output = tmp_path / "a.tfrecord", tmp_path / "a.parquet"
    write_table(table, source)
    with pytest.raises(InputDataError, match="'b'"):
        convert([source], output)
    convert([source], output, types={"b": pa.binary()})
    assert pq.read_table(output).equals(table)
    with pytest.raises(ConfigError, match=r"(?s)does not have.*received: z"):
        convert([source], output, types={"z": pa.binary()})


@pytest.mark.parametrize("name", ["a.csv.zlib", "a.tsv.deflate"])
def test_text_is_not_compressed_by_zlib(tmp_path, name):
    table, text = tmp_path / "a.tfrecord", tmp_path / name
    write_table(pa.table({"a": [1]}), table)
    text.write_bytes(b"")
    for source, read_as, target in ((table, "tfrecord", "csv"), (text, "csv", "tfrecord")):
        output = text if target == "csv" else tmp_path / "b.tfrecord"
        with pytest.raises(ConfigError, match="not compressed"):
            convert_files([source], read_as, output, target, ConvertOptions())


FOLDERS = ("land=a%2Fb/h=08", "land=__HIVE_DEFAULT_PARTITION__/h=11", "land=NO/h=00")
DEEPER = "day=2024-01-31/at=2024-01-31 05%3A00%3A00/share=1.5/many=3000000000/exact=" + "9" * 21
# Of the types that Spark infers.
WITHIN = {
    "day": datetime.date(2024, 1, 31),
    "at": datetime.datetime(2024, 1, 31, 5),
    "share": 1.5,
    "many": 3_000_000_000,
    "exact": decimal.Decimal("9" * 21),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("types", "hours"), [({}, [0, 11, 8]), ({"h": pa.string()}, ["00", "11", "08"])]
)
def test_folders_give_columns_that_their_files_lack(tmp_path, kind, types, hours):
    for number, name in enumerate(FOLDERS):
        folder = tmp_path / "in" / name / DEEPER
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [number], "x": [0.5]}), tmp_path / "one.parquet")
        convert([tmp_path / "one.parquet"], folder / f"data.{kind}")
    files, output = list_inputs(tmp_path / "in", None), tmp_path / "out.parquet"

    convert(files, output, types=types, folder=tmp_path / "in")
    found = {"id": [2, 1, 0], "x": [0.5] * 3, "land": ["NO", None, "a/b"], "h": hours}
    assert pq.read_table(output).to_pydict() == found | {n: [v] * 3 for n, v in WITHIN.items()}
    # A column of the files goes before that of their folders.
    (tmp_path / "year=2024").mkdir()
    file = tmp_path / "year=2024" / "0.parquet"
    pq.write_table(pa.table({"id": [1], "year": ["24"]}), file)
    convert([file], output, folder=tmp_path)
    assert pq.read_table(output).to_pydict() == {"id": [1], "year": ["24"]}
    with pytest.raises(ConfigError, match="year"):
        convert([file], output, folder=tmp_path, types={"year": pa.int64()})
