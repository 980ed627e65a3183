"""The estimate of a plan: rows and records of any input, within a factor of two."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from etl.build_estimate import SizeEstimate, estimate_sizes
from etl.stages.run_stages import check_config
from etl.versions.run_fingerprint import RunRequest
from jobs.support.build_plan import find_inputs, list_lines, plan
from tests.etl.logs import columns

ROWS, DAYS = 30_000, 10
DAY_S = 86_400
DAY = datetime.date(2026, 1, 20)


def build_log(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Ten days in order of time; devices and ratings are drawn, every fifth rating is missing."""
    rng = np.random.default_rng(3)
    start = int(datetime.datetime(2026, 1, 11, tzinfo=datetime.UTC).timestamp())
    return {
        "user": rng.integers(1, 10**6, rows),
        "item": rng.integers(1, 500, rows),
        "device": rng.choice(["tv", "phone", "desk"], rows, p=[0.7, 0.2, 0.1]),
        "rating": np.where(np.arange(rows) % 5 == 0, "", rng.integers(1, 6, rows).astype(str)),
        "ts": np.sort(start + rng.integers(0, DAYS * DAY_S, rows)),
    }


LOG = build_log()
TEXT = "".join("\t".join(map(str, row)) + "\n" for row in zip(*LOG.values(), strict=True))


def log_config(folder: Path, file: str, **changes: Any) -> BuildConfig:
    source = {"path": file, "columns": columns(
        user="int64", item="int64", device="string", rating="int64?", ts="int64"
    )}  # fmt: skip
    data = {
        "name": "small", "data_dir": str(folder),
        "sources": {"log": {**source, **changes.pop("source", {})}},
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts",
                   **changes.pop("events", {})},
        "split": {"strategy": "hash"},
        "features": [{"name": n, "column": n, "role": r} for n, r in
                     (("user", "user"), ("item", "item"), ("device", "context"))],
        "output": {"root": str(folder / "datasets")},
    }  # fmt: skip
    return BuildConfig.model_validate({**data, **changes})


def estimate(config: BuildConfig, dates: DateRange | None = None) -> SizeEstimate:
    features = check_config(config, RunRequest(dates))
    return estimate_sizes(config, features, find_inputs(config, dates), dates)


def is_near(found: int | None, truth: float) -> bool:
    return found is not None and truth / 1.3 < found < truth * 1.3


def write_parquet(path: Path) -> None:
    table = pa.table({**LOG, "rating": [int(v) if v else None for v in LOG["rating"]]})
    pq.write_table(table, path, row_group_size=7_000)


def write_orc(path: Path) -> None:
    table = pa.table({**LOG, "rating": [int(v) if v else None for v in LOG["rating"]]})
    orc.write_table(table, str(path))


def write_json(path: Path) -> None:
    rows = [dict(zip(LOG, map(str, row), strict=True)) for row in zip(*LOG.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "log.tsv": ({}, lambda path: path.write_text(TEXT)),
    "log.tsv.gz": ({}, lambda path: path.write_bytes(gzip.compress(TEXT.encode()))),
    "log.tsv.bz2": ({}, lambda path: path.write_bytes(bz2.compress(TEXT.encode()))),
    "log.csv": (
        {"format": "csv", "header": True},
        lambda path: path.write_text("user,item,device,rating,ts\n" + TEXT.replace("\t", ",")),
    ),
    "log.json": ({"format": "json"}, write_json),
    "log.parquet": ({"format": "parquet"}, write_parquet),
    "log.orc": ({"format": "orc"}, write_orc),
}


@pytest.mark.parametrize("file", list(WRITERS))
def test_rows_and_conditions_of_any_format(tmp_path, file):
    source, write = WRITERS[file]
    write(tmp_path / file)
    plain = estimate(log_config(tmp_path, file, source=source))
    assert is_near(plain.rows["log"], ROWS)
    assert plain.records == plain.rows["log"]
    where = {"where": "device <> 'tv' and ts & 1 = 0"}
    found = estimate(log_config(tmp_path, file, source=source, events=where))
    assert is_near(found.records, ROWS * 0.3 * 0.5)
    labelled = estimate(log_config(tmp_path, file, source=source,
                                   label={"column": "rating", "at_least": 4}))  # fmt: skip
    assert is_near(labelled.records, ROWS * 0.8)
    two_days = DateRange(DAY - datetime.timedelta(1), DAY)
    assert is_near(estimate(log_config(tmp_path, file, source=source), two_days).records, ROWS / 5)
    assert plain.notes == found.notes == ()


def test_days_before_the_run_s_own_are_no_records(tmp_path):
    days = [DAY - datetime.timedelta(back) for back in range(4)]
    for day in days:
        start = datetime.datetime.combine(day, datetime.time(), datetime.UTC).timestamp()
        lines = [f"{n}\t{n % 50}\ttv\t3\t{int(start) + n}\n" for n in range(2_000)]
        (tmp_path / f"{day}.tsv").write_text("".join(lines))
    config = log_config(tmp_path, "{date}.tsv", source={"days": {"lookback_days": 3}})
    found = estimate(config, DateRange(DAY, DAY))
    assert is_near(found.rows["log"], 8_000)
    assert is_near(found.records, 2_000)


def test_what_is_read_of_the_start_of_a_packed_text_tells_no_days(tmp_path):
    rng = np.random.default_rng(4)
    text = "".join(f"{line}{rng.bytes(30).hex()}\n" for line in TEXT.splitlines())
    (tmp_path / "log.tsv.gz").write_bytes(gzip.compress(text.encode(), 1))
    assert (tmp_path / "log.tsv.gz").stat().st_size > 1 << 20
    config = log_config(tmp_path, "log.tsv.gz", events={"where": "device = 'phone'"})
    found = estimate(config, DateRange(DAY, DAY))
    assert is_near(found.rows["log"], ROWS)
    assert is_near(found.records, ROWS * 0.2)
    assert found.notes == ("events outside the run's days",)


def test_a_condition_may_read_the_second_values_of_entries(tmp_path):
    lines = [f"{n}\t{n % 90}{'_7' if n % 3 == 0 else ''}\ttv\t3\t{n}\n" for n in range(3_000)]
    (tmp_path / "log.tsv").write_text("".join(lines))
    declared = columns(user="int64", item="int64", device="string", rating="int64?", ts="int64")
    declared[1]["pair"] = {"name": "shelf", "type": "int64"}
    config = log_config(tmp_path, "log.tsv", source={"columns": declared},
                        events={"where": "shelf is not null"})  # fmt: skip
    found = estimate(config)
    assert is_near(found.records, 1_000)
    assert found.notes == ()


def test_negatives_and_down_sampling_count(tmp_path):
    (tmp_path / "log.tsv").write_text(TEXT)
    label = {"column": "rating", "at_least": 3}  # three of five ratings
    drawn = log_config(tmp_path, "log.tsv", label=label,
                       negatives={"strategy": "uniform", "per_positive": 4})  # fmt: skip
    assert is_near(estimate(drawn).records, ROWS * 0.8 * (1 + 0.6 * 4))
    thinned = log_config(tmp_path, "log.tsv", label=label, down_sampling={"rate": 0.1})
    assert is_near(estimate(thinned).records, ROWS * 0.8 * (0.6 + 0.04))


def test_what_cannot_be_told_is_said(tmp_path):
    (tmp_path / "log.tsv").write_text(TEXT)
    (tmp_path / "items.tsv").write_text("1\ta\n")
    config = log_config(tmp_path, "log.tsv", events={"where": "genre = 'a'"}, sources={
        "log": {"path": "log.tsv", "columns": columns(user="int64", item="int64", device="string",
                                                      rating="int64?", ts="int64")},
        "items": {"path": "items.tsv", "key": "item",
                  "columns": columns(item="int64", genre="string")},
    }, joins=[{"source": "items", "column": "item"}], train_samples="all")  # fmt: skip
    found = estimate(config)
    assert found.notes == ("events that do not meet events.where",)
    table = log_config(tmp_path, "log.tsv")
    source = table.sources["log"].model_copy(
        update={"path": None, "format": "table", "table": "shop.log"}
    )
    table = table.model_copy(update={"sources": {"log": source}})
    found = estimate(table)
    assert (found.rows["log"], found.records, found.output_bytes) == (None, None, None)
    text = "\n".join(list_lines(plan(table, RunRequest())))
    assert "rows not known before they are read" in text


def test_an_empty_or_damaged_file_ends_no_plan(tmp_path):
    (tmp_path / "log.parquet").write_bytes(b"PAR1 nothing of the kind")
    config = log_config(tmp_path, "log.parquet", source={"format": "parquet"})
    assert estimate(config).records is None
    (tmp_path / "log.tsv").write_text("\n")
    assert estimate(log_config(tmp_path, "log.tsv")).records in (0, 1)


def test_a_plan_is_a_page(tmp_path):
    (tmp_path / "log.tsv").write_text(TEXT)
    split = {"strategy": "temporal", "validation": "1 day", "test": "1 day"}
    config = log_config(tmp_path, "log.tsv", split=split)
    dates = DateRange(DAY - datetime.timedelta(9), DAY)
    lines = list_lines(plan(config, RunRequest(dates)))
    assert len(lines) < 25
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for part in ("2026-01-11 to 2026-01-20", "log: 1 file", "train until 2026-01-19T00:00",
                 "test from 2026-01-20T00:00", "features", "user, item", "--full"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("validation", [True, False])
def test_a_plan_has_shards_of_the_splits_that_are_asked_for(tmp_path, validation):
    (tmp_path / "log.tsv").write_text(TEXT)
    split = {"strategy": "leave_one_out", "validation": validation}
    shards = plan(log_config(tmp_path, "log.tsv", split=split), RunRequest(None))["shards"]
    assert ("validation" in shards) == validation
    assert {"train", "test", "catalog", "users"} <= set(shards)
