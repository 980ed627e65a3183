"""Prediction on Spark: the same bytes as on one machine, a file per part, finished after a kill."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from pyspark.sql import functions as F

import jobs.predict_spark
from conf.artefacts.export import TIMES, ExportOptions, Give
from conf.errors import ConfigError, InputDataError
from etl.sources.text_files import escape_path
from jobs.export import export
from jobs.predict import app, predict
from jobs.predict_inputs import SparkInput, check_parts, input_failures, open_input, read_times
from jobs.predict_spark import SparkRequest, plan_job
from jobs.support.java_runtime import ensure_java
from jobs.support.run_app import run_app
from tests.jobs.runs import write_tiny_run
from tests.training.tiny_dataset import TinyConfig
from training.apply.answers import Asked, Source
from training.apply.export import Export
from training.apply.parts import JOB_FILE
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


def model_of(runs: dict[str, Path], name: str) -> str:
    return str(runs[name].parents[1] / "models")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Raw rows, more than a batch, with unknown values and missing ones."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w") as out:
        for number in range(2600):
            row = {
                "user_id": 1000 + number % 2700, "gender": [None, "F", "M", "?"][number % 4],
                "history": [100 + (number * step) % 95 for step in range(number % 5)],
                "movie_id": 100 + number % 95, "genres": [f"genre_{number % 7}"] * (number % 3),
                "key": f"r{number}",
            }  # fmt: skip
            out.write(json.dumps({name: value for name, value in row.items() if value is not None}))
            out.write("\n")
    return file


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
ROWS = SparkInput(("rows.csv",))


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
        plan_job(build_export(tmp_path / "1"), asked, SparkRequest(tmp_path / "out"), rows)


def test_a_job_knows_its_own_output(tmp_path) -> None:
    exported, output = build_export(tmp_path / "1"), tmp_path / "out"
    job = plan_job(exported, Asked(), SparkRequest(output, part_rows=11), ROWS)
    assert (job.part_rows, job.answers.give, job.suffix) == (20, Give.SCORES, "parquet")
    job, inputs = replace(job, rows=45), {"files": [["a", 1, 2]]}
    assert job.open(exported, inputs) == "new"
    assert (job.open(exported, inputs), job.find_missing()) == ("running", [0, 1, 2])
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
        (job, exported, {"files": [["a", 9, 2]]}),
        (job, later, inputs),
        (replace(job, answers=replace(job.answers, k=6)), exported, inputs),
    ):
        with pytest.raises(ConfigError, match="another job"):
            other.open(export_, files)
    with pytest.raises(ConfigError, match="other files"):
        replace(job, output=str(tmp_path)).open(exported, inputs)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--id", "x"], 2, "are about rows"),
        (["--input", "a.csv", "--option", "sep"], 2, "has a value"),
        (["--set", "sprak.master=x"], 2, "spark.master"),
        (["--run", "x"], 2, "one model"),
        (["--split", "test"], 2, "leave --split"),
        ([], 4, "no exported model"),
    ],
)
def test_wrong_use_has_a_message_and_a_code(tmp_path, capsys, arguments, code, said) -> None:
    assert run("--export", tmp_path, "--to", tmp_path / "out", *arguments) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_text_of_the_source_s_pattern_is_a_time_as_in_the_build(spark, tmp_path) -> None:
    (tmp_path / "a.csv").write_text("when,n\n31/01/2026 10:00,1\n,2\n1769853600000,3\n")
    found = open_input(spark.newSession(), SparkInput((str(tmp_path / "a.csv"),)))
    form = WrittenForm("when", time="dd/MM/yyyy HH:mm")
    item = InputColumn("when", "when", "when", "int64", False, None, None, None, written=form)
    frame = read_times(found, [item], ["when", "n"])
    assert [row["when"] for row in frame.collect()] == [1769853600000, None, 1769853600000]
    lines = [{"when": "31/01/2026 10:00"}, {}, {"when": 1769853600000}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = open_input(spark.newSession(), SparkInput((str(tmp_path / "a.jsonl"),)))
    times = [row[TIMES]["when"] for row in read_times(found, [item], ["when"]).collect()]
    assert times == [1769853600000, None, 1769853600000]
    (tmp_path / "a.csv").write_text("when,n\n2026-01-31 10:00,1\n")
    found = open_input(spark.newSession(), SparkInput((str(tmp_path / "a.csv"),)))
    with pytest.raises(InputDataError, match="dd/MM/yyyy"), input_failures():
        read_times(found, [item], ["when", "n"]).collect()


def test_quotes_around_nothing_are_the_empty_text_as_predict_reads_it(spark, tmp_path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n"",x\n,"y"\n')
    found = open_input(spark.newSession(), SparkInput((str(tmp_path / "a.csv"),)))
    assert [tuple(row) for row in found.frame.collect()] == [("", "x"), (None, "y")]
    column = InputColumn("a", "a", "a", "string", False, None, None, None, "none")
    [own] = RawFile(tmp_path / "a.csv").read([column], 9)
    assert own.inputs["a"].tolist() == [b"", b"none"]


@pytest.mark.parametrize("line", ['2,"abc', '2,"', '2,"a"b'])
def test_a_quote_without_an_end_is_refused(spark, tmp_path, line) -> None:
    (tmp_path / "a.csv").write_text(f'a,b\n1,5" pipe\n1,"a ""b"""\n{line}\n')
    with pytest.raises(InputDataError, match="has a quote") as refused:
        open_input(spark.newSession(), SparkInput((str(tmp_path / "a.csv"),)))
    assert repr(line) in refused.value.received


def test_tabs_separate_without_quotes_as_predict_reads_them(spark, tmp_path) -> None:
    rows = tmp_path / "a.tsv"
    rows.write_text('a\tb\n5" pipe\tx\nsay "x\ty"\n')
    found = open_input(spark.newSession(), SparkInput((str(rows),)))
    column = InputColumn("a", "a", "a", "string", False, None, None, None)
    [own] = RawFile(rows).read([column], 9)
    assert [row["a"].encode() for row in found.frame.collect()] == own.inputs["a"].tolist()
    rows.write_text('a\tb\n1\t"x"\n')
    with pytest.raises(InputDataError, match="has a quote"):
        open_input(spark.newSession(), SparkInput((str(rows),)))
    with pytest.raises(InputDataError, match="cannot be read") as refused:
        list(RawFile(rows).read([column], 9))
    assert "line 2" in refused.value.received


def test_files_with_other_headers_are_refused(spark, tmp_path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("b,a\n3,4\n")
    with pytest.raises(InputDataError, match="different headers") as refused:
        open_input(spark.newSession(), SparkInput((str(tmp_path),), "csv"))
    assert refused.value.received.endswith(".csv")


@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_a_part_that_lacks_a_column_is_named(spark, tmp_path, kind) -> None:
    folder = tmp_path / "a b[1]"
    for day in (1, 2):
        rows = spark.range(3).withColumn("x", F.lit(1.0)).coalesce(1)
        rows.write.format(kind).save(str(folder / f"day={day}"))
    source = SparkInput((f"{escape_path(str(folder))}",), kind)
    check_parts(open_input(spark.newSession(), source), ["id", "x", "day"])
    spark.range(3).coalesce(1).write.format(kind).save(str(folder / "day=3"))
    schema = {"mergeSchema": "true"}
    found = open_input(spark.newSession(), replace(source, options=schema))
    check_parts(found, ["id", "day"])
    with pytest.raises(InputDataError, match="lacks columns") as refused:
        check_parts(found, ["id", "x", "day"])
    assert "/a b[1]/day=3/part-" in refused.value.received
    assert refused.value.received.endswith(": no x")


EXHAUSTIVE = pytest.mark.exhaustive


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["towers", "scores"])
def test_lists_of_all_users_are_those_of_one_machine(session, runs, tmp_path, name) -> None:
    file = tmp_path / "lists.json.gz"
    predict(runs[name], asked=Asked(Give.LISTS), to=file)
    options = ["--export", model_of(runs, name), "--to", tmp_path / "out", "--give", "lists"]
    assert run(*options, "--part-rows", 1000) == 0
    assert len(list((tmp_path / "out").glob("part-*"))) == 3
    assert join(tmp_path / "out") == gzip.decompress(file.read_bytes())
    if name == "towers":  # One partition: the very file. A run gives the same as its export.
        assert run("--run", runs[name], "--to", tmp_path / "whole") == 0
        assert (tmp_path / "whole" / "part-00000.json.gz").read_bytes() == file.read_bytes()


@EXHAUSTIVE
def test_rows_are_those_of_one_machine(session, runs, rows, tmp_path) -> None:
    for suffix in ("parquet", "jsonl.gz"):
        own, output = tmp_path / f"own.{suffix}", tmp_path / suffix
        predict(runs["scores"], Source(file=RawFile(rows, "key")), to=own)
        options = ["--export", model_of(runs, "scores"), "--to", output, "--input", rows]
        assert run(*options, "--id", "key", "--part-rows", 1, "--as", suffix) == 0
        if suffix == "parquet":
            parts = [pq.read_table(part) for part in sorted(output.glob("part-*"))]
            assert pa.concat_tables(parts).equals(pq.read_table(own))
        else:
            assert join(output) == gzip.decompress(own.read_bytes())


@EXHAUSTIVE
def test_candidates_and_vectors_are_those_of_the_export(session, runs, rows, tmp_path) -> None:
    """Rows as CSV, in which a list is text."""
    names = ("user_id", "gender", "history", "movie_id", "genres", "key")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    flat = [{n: "|".join(map(str, v)) or None if isinstance(v := row.get(n), list) else v
             for n in names} for row in lines]  # fmt: skip
    pa_csv.write_csv(pa.Table.from_pylist(flat), tmp_path / "rows.csv")
    few = tmp_path / "few.csv"
    few.write_text("movie_id\n105\n103\n170\n999\n")
    for name in ("towers", "scores"):
        own, source = (
            tmp_path / f"{name}.json.gz",
            Source(file=RawFile(tmp_path / "rows.csv", "key")),
        )
        predict(runs[name], source, Asked(candidates=RawFile(few)), to=own)
        options = ["--export", model_of(runs, name), "--to", tmp_path / name, "--k", 20]
        options += ["--input", tmp_path / "rows.csv", "--id", "key", "--part-rows", 2048]
        assert run(*options, "--candidates", few) == 0
        assert join(tmp_path / name) == gzip.decompress(own.read_bytes())
    options = ["--export", model_of(runs, "towers"), "--to", tmp_path / "vectors"]
    assert run(*options, "--input", rows, "--give", "item_embedding", "--id", "key") == 0
    found = pq.read_table(tmp_path / "vectors" / "part-00000.parquet").to_pydict()
    assert found["key"] == [row["key"] for row in lines]
    [version] = Path(model_of(runs, "towers")).glob("*/1")
    embed = tf.saved_model.load(str(version)).signatures["item_embedding"]
    for row, vector in zip(lines[:40], found["embedding"], strict=False):
        raw = {"movie_id": tf.constant([row["movie_id"]], tf.int64),
               "genres": tf.constant([[*row["genres"], "<sluice:pad>"]])}  # fmt: skip
        given = {name: raw[name] for name in embed.structured_input_signature[1]}
        np.testing.assert_allclose(embed(**given)["embedding"][0], vector, atol=1e-6)


@EXHAUSTIVE
def test_a_job_goes_on_with_what_is_missing(session, runs, rows, tmp_path, capsys) -> None:
    options = ["--export", model_of(runs, "scores"), "--to", tmp_path / "out"]
    options += ["--part-rows", 1, "--as", "jsonl", "--log-format", "json", "--input"]
    bad = tmp_path / "bad.jsonl"
    lines = rows.read_text().splitlines()
    lines[1500] = json.dumps({**json.loads(lines[1500]), "movie_id": "x"})
    bad.write_text("\n".join(lines) + "\n")
    assert run(*options, bad) == 3
    assert "row 1501: column 'movie_id'" in capsys.readouterr().err
    assert run(*options, rows) == 2
    assert "another job" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    assert run(*options, rows) == 0
    parts = {part.name: part for part in (tmp_path / "out").glob("part-*")}
    before = {name: (part.read_bytes(), part.stat().st_mtime_ns) for name, part in parts.items()}
    parts["part-00001.jsonl"].unlink()
    assert run(*options, rows) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["computed"] == 1
    now = {name: (part.read_bytes(), part.stat().st_mtime_ns) for name, part in parts.items()}
    assert [name for name in now if now[name] != before[name]] == ["part-00001.jsonl"]
    assert now["part-00001.jsonl"][0] == before["part-00001.jsonl"][0]
    assert run(*options, rows) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["computed"] == 0


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("name", "text", "code", "said"),
    [
        ("a.csv", "user_id,gender,movie_id\n1,F,2\n", 3, "missing: genres"),
        ("a.csv", "user_id,gender,movie_id,genres\n", 3, "no rows"),
        ("a.csv", "user_id,gender,movie_id,genres\n1,F,2,a\n1,F\n", 3, "damaged"),
        ("a.txt", "x", 2, "format of the input"),
        (None, "", 3, "no such input"),
    ],
)
def test_bad_inputs_are_refused(session, runs, tmp_path, capsys, name, text, code, said) -> None:
    path = tmp_path / (name or "none.csv")
    if name is not None:
        path.write_text(text)
    options = ["--export", model_of(runs, "scores"), "--to", tmp_path / "out", "--input", path]
    assert run(*options) == code
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("part-*"))


@EXHAUSTIVE
@pytest.mark.slow
def test_a_killed_submission_is_finished_by_another(session, runs, rows, tmp_path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(rows.read_text() * 40)
    options = ["--export", model_of(runs, "scores"), "--input", str(many), "--part-rows", "1",
               "--as", "jsonl"]  # fmt: skip
    ensure_java()
    submit = Path(sys.executable).with_name("spark-submit")
    command = [submit, "--master", "local[1]", "--conf", "spark.ui.enabled=false",
               ROOT / "jobs" / "predict.py", "--engine", "spark"]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        killed = subprocess.Popen([*command, *options, "--to", tmp_path / "out"], env=environment,
                                  stdout=log, stderr=log, start_new_session=True)  # fmt: skip
        while not list((tmp_path / "out").glob("part-*")):
            assert killed.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert 0 < len(list((tmp_path / "out").glob("part-*"))) < 102
    assert run(*options, "--to", tmp_path / "out") == 0
    assert run(*options, "--to", tmp_path / "whole") == 0
    parts = {part.name: part.read_bytes() for part in (tmp_path / "out").glob("part-*")}
    assert len(parts) == 102
    assert parts == {part.name: part.read_bytes() for part in (tmp_path / "whole").glob("part-*")}
    assert len(list((tmp_path / "out").iterdir())) == 103
