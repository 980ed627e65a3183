"""The plan of a build, as `--dry-run` prints it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from etl.versions.run_fingerprint import RunRequest
from jobs.support.build_plan import list_lines, plan
from tests.etl.logs import columns

DAY = datetime.date(2026, 1, 20)


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


def test_a_plan_is_a_page(tmp_path):
    (tmp_path / "log.tsv").write_text("7\t9\ttv\t3\t1768900000\n")
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
    (tmp_path / "log.tsv").write_text("7\t9\ttv\t3\t1768900000\n")
    split = {"strategy": "leave_one_out", "validation": validation}
    shards = plan(log_config(tmp_path, "log.tsv", split=split), RunRequest(None))["shards"]
    assert ("validation" in shards) == validation
    assert {"train", "test", "catalog", "users"} <= set(shards)
