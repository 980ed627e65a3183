"""Given test and validation events: what of the log lies in their future is left out."""

from __future__ import annotations

from etl.events import count_events, prepare_events
from etl.sources import read_source
from tests.etl.logs import build_config


def test_given_validation_and_test_events_leave_their_future_out(spark, tmp_path):
    columns = [{"name": name, "type": "int64"} for name in ("user", "item", "ts")]
    logs = {
        "log": ["1:10:100", "1:11:200", "1:12:300", "1:13:400", "2:10:500"],
        "valid": ["1:14:200", "1:15:310"],
        "test": ["1:16:300", "2:17:600"],
    }
    for name, lines in logs.items():
        (tmp_path / f"{name}.dat").write_text("\n".join(lines) + "\n")
    sources = {name: {"path": f"{name}.dat", "separator": ":", "columns": columns} for name in logs}
    config = build_config(
        tmp_path,
        tmp_path,
        sources=sources,
        events={"source": "log", "user": "user", "item": "item", "time": "ts"},
        joins=[],
        label=None,
        split={"strategy": "given", "test_source": "test", "validation_source": "valid"},
        features=[
            {"name": "user", "column": "user", "role": "user"},
            {"name": "item", "column": "item", "role": "item"},
        ],
    )
    read = {n: read_source(spark, n, s, str(tmp_path)) for n, s in config.sources.items()}
    prepared = prepare_events(config, read)
    found = {row["item"]: row for row in prepared.frame.where("user = 1").collect()}
    counts = count_events(prepared.frame, config)
    prepared.release()
    kept = {item: row["__split"] for item, row in found.items() if row["__drop"] is None}
    assert kept == {10: "train", 14: "validation", 16: "test"}
    # In the order of what is known: the log, validation, test.
    assert [found[item]["__position"] for item in (10, 14, 16)] == [1, 2, 3]
    # 12 and 13 come with or after the test event, as does 15; 11 with the validation event.
    assert counts.dropped == {"after_test": 3, "after_validation": 1}
    assert counts.splits == {"train": 2, "validation": 1, "test": 2}
