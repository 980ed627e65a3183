"""Prediction on Spark: the same bytes as on one machine, a file per part, finished after a kill."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import jobs.predict_spark
from conf.artefacts.export import PART, TIMES, ExportOptions, Give
from conf.errors import ConfigError, InputDataError, InternalError
from etl.sources.text_files import escape_path
from jobs.export import export
from jobs.predict import app
from jobs.predict_spark import (
    NumberedInput,
    check_parts,
    find_kind,
    input_failures,
    open_input,
    read_times,
)
from jobs.support.java_runtime import ensure_java
from jobs.support.run_app import run_app
from tests.jobs.runs import write_tiny_run
from tests.training.tiny_dataset import TinyConfig
from training.apply.answers import Answers, Asked
from training.apply.export import Export
from training.apply.parts import JOB_FILE, RowSource, _check_count, plan_job
from training.raw_inputs.files import RawFile
from training.raw_inputs.inputs import InputColumn, WrittenForm

ROOT = Path(__file__).parents[2]
TOWERS = {"name": "dssm", "user_hidden_units": [16], "embedding_dim": 8}
SCORES = {
    "kind": "ranking", "network": "deepfm", "embedding_dim": 4, "embedding_stddev": 1.0,
    "features": ["user_id", "gender", "movie_id", "genres"],
}  # fmt: skip
USERS = TinyConfig(users=2500, items=90)


@pytest.fixture
def session(spark, monkeypatch):
    """The suite's session; a job leaves it as it is."""
    own = spark.newSession()
    own.stop = lambda: None
    monkeypatch.setattr(jobs.predict_spark, "build_session", lambda *_: own)
    return own


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, model in (("towers", TOWERS), ("scores", SCORES)):
        root = tmp_path_factory.mktemp(name)
        found[name] = write_tiny_run(root, model, USERS)
        export(found[name], options=ExportOptions(root / "models"))
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Raw rows, more than a batch, with unknown values and missing ones, in two forms; items."""
    folder, rows = tmp_path_factory.mktemp("files"), []
    for number in range(2600):
        row = {
            "user_id": 1000 + number % 2700, "gender": [None, "F", "M", "?"][number % 4],
            "history": [100 + (number * step) % 95 for step in range(number % 5)],
            "movie_id": 100 + number % 95, "genres": [f"genre_{number % 7}"] * (number % 3),
            "key": f"r{number}",
        }  # fmt: skip
        rows.append({name: value for name, value in row.items() if value is not None})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flat = [{n: "|".join(map(str, v)) or None if isinstance(v, list) else v
             for n, v in ({"gender": None} | row).items()} for row in rows]  # fmt: skip
    pa_csv.write_csv(pa.Table.from_pylist(flat), folder / "rows.csv")
    (folder / "few.csv").write_text("movie_id\n105\n103\n170\n999\n")
    return folder


def join(output: Path) -> bytes:
    return b"".join(gzip.decompress(part.read_bytes()) for part in sorted(output.glob("part-*")))


def run(*arguments: object) -> int:
    return run_app(app, ["--engine", "spark", *map(str, arguments)])


CARD = {
    "name": "m", "version": "1", "fingerprint": "f", "files": {"items.parquet": {}},
    "outputs": [{"name": "click", "kind": "binary"}],
    "lists": {"defaults": {"k": 5, "mask_seen": True, "task": None}, "batch_size": 10},
    "users": {"rows": 3, "features": ["user"], "has_seen": False},
    "signatures": {
        "serving_default": {"inputs": [{"name": "hour", "feature": "hour"}]},
        "encoded": {"inputs": [{"name": "hour", "feature": "hour"}]},
        "rank_items": {"inputs": [{"name": "user", "feature": "user"}, {"name": "items"}]},
        "rank_items_encoded": {"inputs": [{"name": "user", "feature": "user"}, {"name": "items"}]},
    },
}  # fmt: skip
ROWS = RowSource(("rows.csv",), "csv")


def build_export(folder: Path, **changes: object) -> Export:
    folder.mkdir(exist_ok=True)
    (folder / "export.json").write_text(json.dumps({**CARD, **changes}))
    return Export(folder)


@pytest.mark.parametrize(
    ("rows", "asked", "said"),
    [
        (ROWS, Asked(Give.SCORES, k=3), "about lists"),
        (ROWS, Asked(k=3, task="clack"), "no such task"),
        (None, Asked(Give.SCORES), "more than the export knows"),
        (None, Asked(), "cannot be left out"),
        (ROWS, Asked(Give.USER_EMBEDDING), "cannot give that"),
    ],
)
def test_what_does_not_fit_is_refused_before_spark_starts(tmp_path, rows, asked, said) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_job(build_export(tmp_path / "1"), asked, rows, tmp_path / "out")


def test_a_job_knows_its_own_output(tmp_path) -> None:
    exported, output = build_export(tmp_path / "1"), tmp_path / "out"
    job = plan_job(exported, Asked(), ROWS, output, part_rows=11)
    assert (job.part_rows, job.answers.give, job.suffix) == (20, Give.SCORES, "parquet")
    lists = plan_job(exported, Asked(k=3), ROWS, output).answers
    assert lists == Answers(Give.LISTS, 3, None, True)
    job, inputs = replace(job, rows=45), [["a", 1, 2]]
    assert job.open(exported, inputs) == "new"
    assert (job.open(exported, inputs), job.find_missing()) == ("running", [0, 1, 2])
    with pytest.raises(InternalError, match="rows that were counted"):
        list(_check_count(iter([SimpleNamespace(names=[1, 2])]), 3))
    for part in range(3):
        (output / job.name_part(part)).write_bytes(b"x")
    (output / f".{job.name_part(1)}.dead.tmp").write_bytes(b"")
    job.finish()
    assert (job.open(exported, inputs), job.find_missing()) == ("finished", [])
    record = json.loads((output / JOB_FILE).read_text())
    assert [file["rows"] for file in record["files"].values()] == [20, 20, 5]
    assert len(list(output.iterdir())) == 4  # What a killed task left is gone.
    later = build_export(tmp_path / "2", fingerprint="g")
    for other, export_, files in (
        (replace(job, rows=46), exported, inputs),
        (job, exported, [["a", 9, 2]]),
        (job, later, inputs),
        (replace(job, answers=replace(job.answers, k=6)), exported, inputs),
    ):
        with pytest.raises(ConfigError, match="another job"):
            other.open(export_, files)
    batch = pa.RecordBatch.from_pydict({PART: [0]})
    with pytest.raises(InternalError, match="does not see the output"):
        list(replace(job, output=tmp_path / "no").compute("", [batch]))
    with pytest.raises(ConfigError, match="other files"):
        replace(job, output=tmp_path).open(exported, inputs)


def read_own(file: Path, **changes: Any) -> list[bytes]:
    """Column `a` as one machine reads it."""
    column = InputColumn("a", "a", "a", "string", False, None, None, None, **changes)
    return [value for rows in RawFile(file).read([column], 9)
            for value in rows.inputs["a"].tolist()]  # fmt: skip


def open_file(spark: SparkSession, path: Path, kind: str | None = None) -> NumberedInput:
    return open_input(spark.newSession(), RowSource((str(path),), kind or find_kind([str(path)])))


def test_text_of_the_source_s_pattern_is_a_time_as_in_the_build(spark, tmp_path) -> None:
    form = WrittenForm("when", time="dd/MM/yyyy HH:mm")
    item = InputColumn("when", "when", "when", "int64", False, None, None, None, written=form)
    lines = [{"when": "31/01/2026 10:00"}, {}, {"when": 1769853600000}]
    files = {
        "a.csv": "when,n\n31/01/2026 10:00,1\n,2\n1769853600000,3\n",
        "a.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "b.csv": "when,n\n2026-01-31 10:00,1\n",
    }

    def read(name: str) -> list[int | None]:
        (tmp_path / name).write_text(files[name])
        source = RowSource((str(tmp_path / name),), find_kind([name]))
        frame = open_input(spark.newSession(), source).frame
        rows = read_times(frame, source, [item], ["when", "n"]).collect()
        return [(row[TIMES] if name == "a.jsonl" else row)["when"] for row in rows]

    assert read("a.csv") == read("a.jsonl") == [1769853600000, None, 1769853600000]
    with pytest.raises(InputDataError, match="dd/MM/yyyy"), input_failures():
        read("b.csv")


def test_text_is_read_as_one_machine_reads_it(spark, tmp_path) -> None:
    """Quotes around nothing are the empty text; tabs separate without quotes."""
    rows = tmp_path / "a.csv"
    rows.write_text('a,b\n"",x\n,"y"\n')
    assert [row["a"] for row in open_file(spark, rows).frame.collect()] == ["", None]
    assert read_own(rows, null_token="none") == [b"", b"none"]
    for line in ('2,"abc', '2,"', '2,"a"b'):
        rows.write_text(f'a,b\n1,5" pipe\n1,"a ""b"""\n{line}\n')
        with pytest.raises(InputDataError, match="has a quote") as refused:
            open_file(spark, rows)
        assert repr(line) in refused.value.received
    rows = tmp_path / "a.tsv"
    rows.write_text('a\tb\n5" pipe\tx\nsay "x\ty"\n')
    read = open_file(spark, rows).frame.collect()
    assert [row["a"].encode() for row in read] == read_own(rows)
    rows.write_text('a\tb\n1\t"x"\n')
    with pytest.raises(InputDataError, match="has a quote"):
        open_file(spark, rows)
    with pytest.raises(InputDataError, match="cannot be read"):
        read_own(rows)
    rows.write_bytes(b"a\tb\ncaf\xe9\tx\n")
    with pytest.raises(InputDataError, match="no UTF-8"):
        open_file(spark, rows)
    with pytest.raises(InputDataError, match="cannot be read"):
        read_own(rows)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.csv": "a,b\n1,2\n", "b.csv": "b,a\n3,4\n"}, "different headers"),
        ({"a.csv": "a,b\n1,2\n1\n"}, "damaged"),
        ({}, "no such input"),
    ],
)
def test_files_that_are_not_of_one_form_are_refused(spark, tmp_path, files, said) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputDataError, match=said):
        open_file(spark, tmp_path if files else tmp_path / "none", "csv")


@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_a_part_that_lacks_a_column_is_named(spark, tmp_path, kind) -> None:
    folder = tmp_path / "a b[1]"
    for day in (1, 2):
        rows = spark.range(3).withColumn("x", F.lit(1.0)).coalesce(1)
        rows.write.format(kind).save(str(folder / f"day={day}"))
    source = RowSource((escape_path(str(folder)),), kind, options={"mergeSchema": "true"})
    check_parts(open_input(spark.newSession(), source), source, ["id", "x", "day"])
    spark.range(3).coalesce(1).write.format(kind).save(str(folder / "day=3"))
    found = open_input(spark.newSession(), source)
    check_parts(found, source, ["id", "day"])
    with pytest.raises(InputDataError, match="lacks columns") as refused:
        check_parts(found, source, ["id", "x", "day"])
    assert "/a b[1]/day=3/part-" in refused.value.received
    assert refused.value.received.endswith(": no x")


EXHAUSTIVE = pytest.mark.exhaustive
WAYS = [
    ("towers", None, [], "json.gz"),
    ("scores", None, [], "json.gz"),
    ("scores", "rows.jsonl", [], "parquet"),
    ("scores", "rows.csv", [], "jsonl.gz"),  # In CSV a list is text.
    ("towers", "rows.csv", ["--candidates", "few.csv"], "json.gz"),
    ("scores", "rows.csv", ["--candidates", "few.csv"], "json.gz"),
    ("towers", "rows.jsonl", ["--give", "item_embedding"], "parquet"),
]


@EXHAUSTIVE
@pytest.mark.parametrize(("name", "file", "more", "suffix"), WAYS)
def test_answers_are_those_of_one_machine(
    session, runs, files, tmp_path, name, file, more, suffix
) -> None:
    own, output = tmp_path / f"own.{suffix}", tmp_path / "out"
    given = [files / one if one.endswith(".csv") else one for one in more]
    given += ["--input", files / file, "--id", "key"] if file else ["--give", "lists"]
    options = ["--export", runs[name].parents[1] / "models", "--to", output, "--as", suffix, *given]
    assert run(*options, "--part-rows", 1000) == 0
    assert run_app(app, list(map(str, ["--run", runs[name], "--to", own, *given]))) == 0
    parts = sorted(output.glob("part-*"))
    assert len(parts) == 3
    if suffix == "parquet":
        assert pa.concat_tables(map(pq.read_table, parts)).equals(pq.read_table(own))
    else:
        assert join(output) == gzip.decompress(own.read_bytes())
    if name == "towers" and file is None:  # One partition of a run: the very file.
        assert run("--run", runs[name], "--to", tmp_path / "whole") == 0
        assert (tmp_path / "whole" / "part-00000.json.gz").read_bytes() == own.read_bytes()


@EXHAUSTIVE
@pytest.mark.slow
def test_a_killed_submission_is_finished_by_another(session, runs, files, tmp_path, capsys) -> None:
    text, rows = (files / "rows.jsonl").read_text(), tmp_path / "rows.jsonl"
    options = ["--export", runs["scores"].parents[1] / "models", "--input", rows, "--part-rows", 1,
               "--as", "jsonl", "--log-format", "json"]  # fmt: skip
    rows.write_text(text + '{"movie_id": "x"}\n')
    assert run(*options, "--to", tmp_path / "bad") == 3
    assert "row 2601: column 'movie_id'" in capsys.readouterr().err
    rows.write_text(text * 40)
    assert run(*options, "--to", tmp_path / "bad") == 2
    assert "another job" in capsys.readouterr().err
    ensure_java()
    submit = Path(sys.executable).with_name("spark-submit")
    command = [submit, "--master", "local[1]", "--conf", "spark.ui.enabled=false",
               ROOT / "jobs" / "predict.py", "--engine", "spark"]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        given = list(map(str, [*command, *options, "--to", tmp_path / "out"]))
        killed = subprocess.Popen(given, env=environment, stdout=log, stderr=log,
                                  start_new_session=True)  # fmt: skip
        while not list((tmp_path / "out").glob("part-*")):
            assert killed.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    before = {part: part.stat().st_mtime_ns for part in (tmp_path / "out").glob("part-*")}
    assert 0 < len(before) < 102
    computed = []
    for output in ("out", "whole", "out"):
        assert run(*options, "--to", tmp_path / output) == 0
        computed.append(json.loads(capsys.readouterr().out.splitlines()[-1])["computed"])
    assert computed == [102 - len(before), 102, 0]
    assert before == {part: part.stat().st_mtime_ns for part in before}
    parts, whole = ({part.name: part.read_bytes() for part in (tmp_path / output).glob("part-*")}
                    for output in ("out", "whole"))  # fmt: skip
    assert parts == whole
