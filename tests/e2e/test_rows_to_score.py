"""A day without labels becomes rows, and these get the scores of the same rows with labels."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import yaml

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import PART, ExportOptions
from conf.dates import DateRange
from conf.errors import ConfigError, ExitCode, InputDataError
from conf.etl.build import BuildConfig
from conf.training.train import TrainConfig
from etl import rows_to_score
from etl.build import build_dataset
from etl.rows_to_score import RECORD_FILE, choose_columns, leave_out_labels, write_rows_to_score
from etl.versions.run_fingerprint import RunRequest
from jobs.build_dataset import app
from jobs.support.run_app import run_app
from tests.training.apply.predictions import write_scores
from training.apply.answers import Asked, Source, plan_answers
from training.apply.export import Export
from training.apply.parts import JOB_FILE, Job, RowSource
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.models.ranking import NetworkRankingModel
from training.raw_inputs.files import RawFile
from training.raw_inputs.requests import read_names
from training.serving.tensors import parse_predict

FIRST = datetime.date(2026, 1, 1)
DAYS = 4
LAST = FIRST + datetime.timedelta(DAYS - 1)
LOG = ("row", "user", "item", "at", "price", "tags", "clicked")
"""A click is a label, and what a history and a rate of earlier events are made of."""
MODEL = {
    "kind": "ranking",
    "network": "dcn",
    "tasks": {"click": {"label": "label"}},
    "embedding_dim": 4,
    "embedding_stddev": 1.0,
}
ENCODINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "row_id": ("row", "id", {"kind": "identity"}),
    "user": ("user", "user", {"kind": "vocabulary"}),
    "item": ("item", "item", {"kind": "vocabulary"}),
    "history": ("history", "user", {"kind": "vocabulary", "name": "item"}),
    "liked": ("liked_item", "user", {"kind": "vocabulary", "name": "item"}),
    "tags": ("tags", "context", {"kind": "vocabulary"}),
    "hour": ("at", "context", {"kind": "date_part", "part": "hour"}),
    "price": ("price", "context", {"kind": "normalize"}),
    "cost": ("cost", "context", {"kind": "normalize"}),
    "seen_before": ("seen_before", "context", {"kind": "normalize"}),
    "rate": ("rate", "context", {"kind": "identity"}),
}


def draw_rows() -> list[list[dict[str, Any]]]:
    """The log, a list of rows per day.

    On the last day users click on nothing but what they see last: no later row of the day is made
    of a click that nobody knows yet.
    """
    rng, days = np.random.default_rng(7), []
    for day in range(DAYS):
        rows = []
        for number in range(60):
            second = int(rng.integers(86_400))
            time = datetime.datetime.combine(FIRST, datetime.time()) + datetime.timedelta(
                day, second
            )
            rows.append({
                "row": day * 100 + number,
                "user": f"u{rng.integers(9)}",
                "item": f"i{rng.integers(12)}",
                "at": time.isoformat(sep=" "),
                "price": None if number % 7 == 0 else float(np.round(rng.random() * 9, 2)),
                "tags": [f"t{n}" for n in range(number % 3)],
                "clicked": int(rng.random() < 0.4),
            })  # fmt: skip
        days.append(rows)
    last = {row["user"]: row["row"] for row in sorted(days[-1], key=lambda row: row["at"])}
    for row in days[-1]:
        row["clicked"] *= row["row"] == last[row["user"]]
    return days


def write_log(folder: Path, kind: str, label: str) -> Path:
    """Writes a file per day; `label` tells what the last one has: `given`, `null` or `absent`."""
    folder.mkdir()
    (folder / "costs.csv").write_text(
        "".join(
            f"i{item},{FIRST + datetime.timedelta(day)},{item + day / 8}\n"
            for item in range(12)
            for day in range(DAYS)
        )
    )
    for day, rows in enumerate(draw_rows()):
        last = day == DAYS - 1 and label != "given"
        columns = LOG[:-1] if last and label == "absent" else LOG
        kept = [{n: None if last and n == "clicked" else row[n] for n in columns} for row in rows]
        WRITERS[kind](folder / f"{FIRST + datetime.timedelta(day)}", kept)
    return folder


def write_csv(path: Path, rows: list[dict[str, Any]], *, header: bool = False) -> None:
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        if header:
            writer.writerow(list(rows[0]))
        for row in rows:
            writer.writerow(["|".join(v) if isinstance(v, list) else v for v in row.values()])


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.with_suffix(".json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if "clicked" in table.column_names and table["clicked"].null_count:
        table = table.set_column(len(LOG) - 1, "clicked", pa.nulls(len(rows), pa.int64()))
    times = pa.array([datetime.datetime.fromisoformat(row["at"]) for row in rows])
    pq.write_table(table.set_column(3, "at", times), path.with_suffix(".parquet"))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "csv": write_csv,
    "header": lambda path, rows: write_csv(path, rows, header=True),
    "json": write_json_lines,
    "parquet": write_parquet,
}


def build_config(folder: Path, kind: str, **changes: Any) -> BuildConfig:
    types = {"row": "int64", "price": "float32?", "at": "timestamp", "clicked": "int64"}
    columns = []
    for name in LOG:
        declared = types.get(name, "string")
        column: dict[str, Any] = {"name": name, "type": declared.rstrip("?")}
        if name == "tags":
            column = {"name": name, "type": "list<string>", "nullable": True}
            column |= {} if kind in ("json", "parquet") else {"separator": "|"}
        columns.append(column | ({"nullable": True} if declared.endswith("?") else {}))
    suffix, read = {
        "csv": ("csv", {"format": "csv"}),
        "header": ("csv", {"format": "csv", "header": True}),
        "json": ("json", {"format": "json"}),
        "parquet": ("parquet", {"format": "parquet"}),
    }[kind]
    first = {"name": "valid", "type": "timestamp"}
    data = {
        "name": "days",
        "data_dir": str(folder),
        "sources": {
            "log": {
                "path": f"{{date}}.{suffix}",
                "columns": columns,
                "days": {"lookback_days": DAYS - 1, "allow_empty_days": True},
                **read,
            },
            "costs": {
                "path": "costs.csv",
                "format": "csv",
                "key": "item",
                "columns": [
                    {"name": "item", "type": "string"}, first, {"name": "cost", "type": "float32"},
                ],
            },
        },
        "events": {"source": "log", "user": "user", "item": "item", "time": "at"},
        "joins": [{"source": "costs", "column": "item", "valid_from": "valid"}],
        "histories": [
            {"name": "history", "max_len": 5},
            {"name": "liked", "columns": ["item"], "where": {"column": "clicked", "at_least": 1}},
        ],
        "rolling": [
            {"name": "seen_before", "keys": ["item"]},
            {
                "name": "rate",
                "keys": ["item"],
                "where": {"column": "clicked", "at_least": 1},
                "rate": [1.0, 2.0],
                "delay_s": 86_400,
            },
        ],
        "label": {"column": "clicked", "at_least": 1},
        "split": {"strategy": "temporal", "validation": "1 day", "test": "1 day"},
        "features": [
            {"name": name, "column": column, "role": role, "encoding": encoding,
             **({"max_len": 5} if name in ("history", "liked", "tags") else {})}
            for name, (column, role, encoding) in ENCODINGS.items()
        ],
        "contract": {"allow": ["label"]},
        "output": {"root": str(folder.parent / "datasets"), "shards": 2, "eval_shards": 1},
    }  # fmt: skip
    return BuildConfig.model_validate({**data, **changes})


@pytest.fixture(scope="module")
def trained(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A model of the log with all labels; its weights are drawn, not trained."""
    folder = tmp_path_factory.mktemp("labelled")
    config = build_config(write_log(folder / "log", "csv", "given"), "csv")
    whole = RunRequest(DateRange(FIRST, LAST))
    version = build_dataset(spark, config, request=whole).version
    manifest, evaluation = read_manifest(version), {"batch_size": 17}
    run = TrainConfig.model_validate(
        {"dataset": "d", "name": "n", "model": MODEL, "evaluation": evaluation}
    )
    return TrainedModel(folder, NetworkRankingModel(run.model, manifest, 5), run, manifest, version)


@pytest.fixture(scope="module")
def expected(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> pd.Series:
    """The scores of the last day's rows with labels, by row."""
    target = tmp_path_factory.mktemp("scores") / "scores.parquet"
    write_scores(trained, target, "test")
    scores = pq.read_table(target)["click"].to_numpy()
    [records] = build_eval_dataset(
        trained.version_dir, trained.manifest, "test", 1000, ("row_id", "label")
    )
    assert set(records["label"].numpy()) == {0.0, 1.0}
    found = pd.Series(scores, index=records["row_id"].numpy()).sort_index()
    assert len(found) == 60
    assert found.nunique() > 50
    return found


def write_rows(spark: Any, folder: Path, kind: str, label: str) -> Path:
    config = build_config(write_log(folder / "log", kind, label), kind)
    target = folder / "some rows.parquet"
    write_rows_to_score(spark, config, DateRange(LAST, LAST), target)
    return target


def check_scores(found: pd.DataFrame, expected: pd.Series) -> None:
    found = found.set_index("row").sort_index()
    np.testing.assert_array_equal(found.index, expected.index)
    np.testing.assert_allclose(found["click"], expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def rows(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(spark, tmp_path_factory.mktemp("unlabelled"), "csv", "absent")


def test_predict_gives_the_scores_of_the_same_rows_with_labels(
    trained: TrainedModel, expected: pd.Series, rows: Path, tmp_path: Path
) -> None:
    assert [file.name for file in sorted(rows.iterdir())] == [RECORD_FILE, "part-00000.parquet"]
    assert (rows / "part-00000.parquet").stat().st_mode & 0o137 == 0  # Owner and group alone.
    assert "clicked" not in pq.read_schema(rows / "part-00000.parquet").names
    record = json.loads((rows / RECORD_FILE).read_text())
    assert (record["rows"], record["dates"]) == (60, [str(LAST), str(LAST)])
    # Each row that was read is written, or counted with the reason why it is not.
    bad = sum(record["bad"].get("log", {}).values())
    assert record["read"]["log"] == bad + sum(record["dropped"].values()) + 60
    assert record["dropped"]["outside_dates"] > 0
    assert write_scores(trained, tmp_path / "own.parquet", "test", RawFile(rows, "row")) == 60
    check_scores(pq.read_table(tmp_path / "own.parquet").to_pandas(), expected)


@pytest.fixture(scope="module")
def export(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(trained, options=ExportOptions(tmp_path_factory.mktemp("models")))


def test_executors_give_them_too(
    export: Path, expected: pd.Series, rows: Path, tmp_path: Path
) -> None:
    table = pq.read_table(rows)
    source = RowSource((str(rows),), "parquet", "row", columns=tuple(table.column_names))
    answers = plan_answers(Export(export), Asked(), Source(file=RawFile(rows)))
    job = Job(tmp_path / "out", "parquet", answers, source, rows=60)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOB_FILE).touch()
    [batch] = table.append_column(PART, pa.array([0] * 60)).combine_chunks().to_batches()
    list(job.compute(str(export), [batch]))
    check_scores(pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pandas(), expected)


def test_a_server_gives_them_too(export: Path, expected: pd.Series, rows: Path) -> None:
    card = json.loads((export / "export.json").read_text())
    inputs = card["signatures"]["serving_default"]["inputs"]
    signature = tf.saved_model.load(str(export)).signatures["serving_default"]
    specs = signature.structured_input_signature[1]
    names = sorted({item["column"] for item in inputs})
    found = []
    for row in pq.read_table(rows).to_pylist():
        instance = json.loads(json.dumps({name: row[name] for name in names}))
        arrays, _ = parse_predict({"instances": [instance]}, specs, read_names(inputs))
        score = signature(**{n: tf.constant(v, specs[n].dtype) for n, v in arrays.items()})
        found.append({"row": row["row"], "click": float(score["click"][0])})
    check_scores(pd.DataFrame(found), expected)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "label"),
    [(kind, label) for kind in WRITERS for label in ("null", "absent")] + [("csv", "given")],
)
def test_labels_may_be_null_missing_or_there(
    spark: Any, trained: TrainedModel, expected: pd.Series, tmp_path: Path, kind: str, label: str
) -> None:
    rows = write_rows(spark, tmp_path, kind, label)
    write_scores(trained, tmp_path / "own.parquet", "test", RawFile(rows, "row"))
    check_scores(pq.read_table(tmp_path / "own.parquet").to_pandas(), expected)


def test_the_zone_of_the_session_changes_no_time(spark: Any, rows: Path, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        found = write_rows(spark, tmp_path, "csv", "absent")
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert pq.read_table(found).equals(pq.read_table(rows))


def test_a_day_without_rows_leaves_the_earlier_ones(spark: Any, tmp_path: Path) -> None:
    config = build_config(write_log(tmp_path / "log", "csv", "absent"), "csv")
    config = config.model_copy(
        update={"events": config.events.model_copy(update={"where": "price > 99"})}
    )
    target = tmp_path / "rows.parquet"
    target.mkdir()
    (target / RECORD_FILE).write_text("{}")
    with pytest.raises(InputDataError) as caught:
        write_rows_to_score(spark, config, DateRange(LAST, LAST), target)
    assert "where_not_met 60" in str(caught.value)
    assert [file.name for file in target.iterdir()] == [RECORD_FILE]


def test_an_input_that_changes_meanwhile_leaves_the_earlier_ones(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_log(tmp_path / "log", "csv", "absent")
    target = tmp_path / "rows.parquet"
    target.mkdir()
    (target / RECORD_FILE).write_text("{}")
    written = rows_to_score._write_row_files

    def write_and_change(*arguments: Any) -> None:
        written(*arguments)
        [file] = log.rglob(f"{LAST}.csv")
        file.write_text(file.read_text() + "\n")

    monkeypatch.setattr(rows_to_score, "_write_row_files", write_and_change)
    with pytest.raises(InputDataError):
        write_rows_to_score(spark, build_config(log, "csv"), DateRange(LAST, LAST), target)
    assert [file.name for file in target.iterdir()] == [RECORD_FILE]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["log", target.name]


def test_the_plan_names_files_and_columns(tmp_path: Path, capsys: Any) -> None:
    config = build_config(write_log(tmp_path / "log", "csv", "absent"), "csv")
    file, target = tmp_path / "days.yaml", tmp_path / "rows.parquet"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    command = [str(file), "--date", str(LAST), "--rows-to", str(target)]
    assert run_app(app, [*command, "--dry-run"]) == ExitCode.OK
    planned = json.loads(capsys.readouterr().out)
    assert set(planned["columns"]) >= {"row", "at", "liked_item", "rate"}
    assert "clicked" not in planned["columns"]
    assert f"{LAST}.csv" in " ".join(planned["inputs"])
    assert run_app(app, [*command, "--refit"]) == ExitCode.CONFIG
    assert "--rows-to with --refit" in capsys.readouterr().err
    assert run_app(app, [*command[:-1], str(tmp_path / "rows")]) == ExitCode.CONFIG
    assert run_app(app, [*command[:-1], "s3://bucket/rows.parquet"]) == ExitCode.CONFIG
    assert "must be on a file system" in capsys.readouterr().err
    target.write_text("mine")
    assert run_app(app, [*command, "--dry-run"]) == ExitCode.CONFIG
    assert "earlier rows, which are replaced" in capsys.readouterr().err
    assert target.read_text() == "mine"


def test_a_name_stands_for_one_column(tmp_path: Path) -> None:
    """`user` names a feature made of another column: the column goes by its reader's name."""
    config = build_config(tmp_path, "csv")
    renamed = {"user": "person", "cost": "user"}
    features = [
        {**feature, "name": renamed.get(feature["name"], feature["name"])}
        for feature in config.model_dump(exclude_unset=True)["features"]
    ]
    chosen = choose_columns(build_config(tmp_path, "csv", features=features))
    assert (chosen["person"], chosen["cost"], "user" in chosen) == ("user", "cost", False)
    encoding = {"kind": "cross", "crossed_with": ["user"], "buckets": 9}
    both = {"name": "both", "column": "item", "role": "context", "encoding": encoding}
    with pytest.raises(ConfigError):
        choose_columns(build_config(tmp_path, "csv", features=[*features, both]))


def test_conversions_are_not_read(tmp_path: Path) -> None:
    config = build_config(tmp_path, "csv")
    orders = {"path": "orders.csv", "columns": [
        {"name": "user", "type": "string"}, {"name": "at", "type": "timestamp"},
    ]}  # fmt: skip
    sources = {**config.model_dump(exclude_unset=True)["sources"], "orders": orders}
    conversion = {"source": "orders", "keys": {"user": "user"}, "time": "at", "within_hours": 1}
    waiting = build_config(tmp_path, "csv", sources=sources, label={"conversion": conversion})
    assert set(leave_out_labels(waiting).sources) == {"log", "costs"}
    assert leave_out_labels(waiting).all_labels == ()
    assert "clicked" in choose_columns(waiting)
