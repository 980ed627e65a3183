"""Tables and queries between two runs: unchanged they build nothing, changed they build anew."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.dataset import DatasetPaths, published_versions
from conf.errors import InputDataError
from conf.etl import BuildConfig
from conf.provenance import InputFile, InputTable
from etl.build import BuildResult, build_dataset
from etl.inputs import Inputs, find_unwatched
from etl.publish import read_current
from tests.etl.derby import connect_derby
from tests.etl.logs import build_config, write_logs
from tests.etl.test_runs import FEATURES

DATABASE = "jdbc:derby:memory:sluice_inputs;create=true"


@pytest.fixture
def statement(spark) -> Iterator[Any]:
    """A database with a dictionary of users, and a statement to change it by."""
    with connect_derby(spark, DATABASE) as statement:
        statement.execute("CREATE TABLE USERS (ID BIGINT, GENDER VARCHAR(9), SEEN INT)")
        statement.execute("INSERT INTO USERS VALUES (1, 'F', 0), (2, 'M', 0), (3, NULL, 0)")
        yield statement
        statement.execute("DROP TABLE USERS")


def configure(tmp_path: Path, **source: Any) -> BuildConfig:
    logs = write_logs(tmp_path / "logs")
    base = build_config(logs, tmp_path / "datasets", label=None).model_dump(exclude_unset=True)
    users = {
        "key": "user",
        "columns": [
            {"name": "user", "field": "ID", "type": "int64"},
            {"name": "gender", "type": "string", "nullable": True},
        ],
        "new_columns": "ignore",
    }
    base["sources"]["users"] = {**users, **source}
    gender = {"name": "gender", "column": "gender", "role": "user"}
    return BuildConfig.model_validate({**base, "features": [*FEATURES, gender]})


def of_jdbc(tmp_path: Path, **options: Any) -> BuildConfig:
    jdbc = {"url": DATABASE, "table": "USERS"}
    return configure(tmp_path, format="jdbc", jdbc=jdbc, **options)


def state_of(result: BuildResult) -> str | None:
    (table,) = result.manifest.source.tables
    return table.state


def test_a_dictionary_in_a_database_is_watched(spark, tmp_path, statement):
    config = of_jdbc(tmp_path)
    first = build_dataset(spark, config)
    assert first.manifest.source.tables[0].place == f"{DATABASE} USERS"
    assert not build_dataset(spark, config).is_new
    # What the source does not declare is nothing to it; nor is the order of the rows.
    statement.execute("UPDATE USERS SET SEEN = 1")
    statement.execute("DELETE FROM USERS WHERE ID = 1")
    statement.execute("INSERT INTO USERS VALUES (1, 'F', 2)")
    assert not build_dataset(spark, config).is_new
    statement.execute("UPDATE USERS SET GENDER = 'M' WHERE ID = 1")
    second = build_dataset(spark, config)
    assert second.is_new
    assert state_of(second) != state_of(first)
    statement.execute("UPDATE USERS SET GENDER = 'F' WHERE ID = 1")
    assert build_dataset(spark, config).version == first.version


@pytest.mark.slow
def test_what_is_not_watched_is_built_anew_and_said(spark, tmp_path, statement, caplog):
    config = of_jdbc(tmp_path, change_check=None)
    first = build_dataset(spark, config)
    assert state_of(first) is None
    with caplog.at_level(logging.INFO, "sluice.build"):
        assert build_dataset(spark, config).is_new
    assert "nothing tells whether users changed" in caplog.text


def test_a_dictionary_that_changes_while_it_is_read_publishes_nothing(spark, tmp_path, statement):
    config = of_jdbc(tmp_path)

    def change() -> dict[str, int]:
        statement.execute("INSERT INTO USERS VALUES (4, 'F', 0)")
        return {}

    with pytest.raises(InputDataError, match="changed while it was read") as refused:
        build_dataset(spark, config, change)
    assert "users: jdbc:derby" in str(refused.value)
    assert published_versions(tmp_path / "datasets" / "small") == []


def test_a_table_is_watched_and_one_that_was_dropped_leaves_the_version(spark, tmp_path):
    config = configure(tmp_path, format="table", table="sluice_users")
    frame = spark.createDataFrame([(1, "F"), (2, "M"), (3, None)], "id bigint, gender string")
    frame.write.mode("overwrite").saveAsTable("sluice_users")
    first = build_dataset(spark, config)
    assert not build_dataset(spark, config).is_new
    # Written by another process, past this session.
    location = spark.sql("DESCRIBE TABLE EXTENDED sluice_users").where("col_name = 'Location'")
    folder = location.first()["data_type"]
    spark.createDataFrame([(4, "M")], "id bigint, gender string").write.mode("append").parquet(
        folder
    )
    second = build_dataset(spark, config)
    assert second.is_new
    assert second.manifest.counts.read["users"] == first.manifest.counts.read["users"] + 1
    spark.sql("DROP TABLE sluice_users")
    with pytest.raises(InputDataError, match="no such table"):
        build_dataset(spark, config)
    paths = DatasetPaths(tmp_path / "datasets", "small")
    assert read_current(paths) == second.manifest.dataset_version


def test_files_without_times_and_tables_without_states_are_unwatched():
    file = InputFile("log", "/r", 10, 5)
    assert find_unwatched(Inputs((file,), (InputTable("t", "t", "rows:1"),))) == []
    blind = Inputs((InputFile("log", "/r", 10, 0),), (InputTable("t", "t", None),))
    assert find_unwatched(blind) == ["log", "t"]
