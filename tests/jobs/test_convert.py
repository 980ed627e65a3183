from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from etl.tfrecord.table import read_table
from jobs.convert import app
from jobs.support.run_app import run_app


@pytest.fixture
def sluice(capsys):
    """Runs `sluice convert`; returns exit code, output and errors."""

    def run(*arguments):
        code = run_app(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("id,price,day,tags\n1,0.1,2026-01-02,a|b\n2,,2026-01-03,\n")
    return path


def test_csv_to_tfrecord_by_the_names(source, tmp_path, sluice):
    output = tmp_path / "out.tfrecord.gz"
    code, out, err = sluice(
        source,
        output,
        "--types",
        "tags=list<string>,price=float32",
        "--types",
        "id=int64",
        "--option",
        "dates=iso",
    )
    assert (code, err) == (0, "")
    assert "2 rows" in out
    assert output.read_bytes()[:2] == b"\x1f\x8b"
    rows = read_table(output).to_pylist()
    assert rows[0]["day"] == "2026-01-02"
    assert rows[0]["tags"] == ["a", "b"]
    code, *_ = sluice(output, tmp_path / "back.parquet")
    assert code == 0
    assert pq.read_table(tmp_path / "back.parquet").column("id").to_pylist() == [1, 2]


def test_what_has_no_place_is_named_before_anything_is_written(source, tmp_path, sluice):
    code, _, err = sluice(source, tmp_path / "out.tfrecord")
    assert code == 2
    assert "day" in err
    assert "dates" in err
    assert not (tmp_path / "out.tfrecord").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--from", "cvs"], "'csv'"),
        (["--option", "date=iso"], "dates"),
        (["--option", "dates"], "name=value"),
        (["--types", "id"], "name=value"),
        (["--types", "id=int"], "int64"),
        (["--compression", "zstd"], "gzip"),
        (["--record-type", "example"], "Example"),
        (["--separator", "||"], "one ASCII"),
        (["--separator", ""], "one ASCII"),
        (["--list-separator", ""], "list separator"),
    ],
)
def test_usage_errors_end_in_2(source, tmp_path, sluice, arguments, word):
    code, _, err = sluice(source, tmp_path / "out.tfrecord", *arguments)
    assert code == 2
    assert word in err


def test_an_existing_output_is_replaced_only_on_demand(source, tmp_path, sluice):
    output = tmp_path / "out.csv"
    output.write_text("precious")
    assert sluice(source, output)[0] == 2
    assert output.read_text() == "precious"
    assert sluice(source, output, "--overwrite")[0] == 0
    assert "0.1" in output.read_text()


def test_bad_input_ends_in_3(tmp_path, sluice):
    (tmp_path / "a.csv").write_text("id,n\n1,2\n3\n")
    code, _, err = sluice(tmp_path / "a.csv", tmp_path / "b.tfrecord")
    assert code == 3
    assert "a.csv does not read as CSV" in err
    assert "Expected 2 columns, got 1" in err


def test_libsvm_is_no_format_of_conversions(tmp_path, sluice):
    (tmp_path / "a.libsvm").write_text("1 1:1\n")
    for arguments in ([], ["--from", "libsvm"]):
        code, _, err = sluice(tmp_path / "a.libsvm", tmp_path / "b.parquet", *arguments)
        assert code == 2
        assert all(name in err for name in ("tfrecord", "parquet", "csv"))


def test_separator_and_nulls_can_be_named(tmp_path, sluice):
    source, output = tmp_path / "a.txt", tmp_path / "b.parquet"
    source.write_text("a\tb\n1\tNA\n2\tx\n")
    arguments = ("--from", "csv", "--separator", r"\t", "--null", "NA")
    assert sluice(source, output, *arguments)[0] == 0
    assert pq.read_table(output).column("b").to_pylist() == [None, "x"]
