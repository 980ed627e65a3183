"""The contract in a whole build: what stops it, what only warns, what the manifest says."""

from __future__ import annotations

import json
import logging

import pytest

from conf.dataset import DatasetPaths, read_manifest
from conf.errors import ExitCode, InputDataError
from etl.build import build_dataset
from etl.quality.versions import read_statistics
from tests.etl.logs import RATINGS, build_config, write_logs


def test_violated_rules_stop_the_publish_and_are_all_named(spark, built, tmp_path):
    result, config = built
    paths = DatasetPaths(result.version.parents[2], config.name)
    before = paths.current.read_text(), sorted(paths.versions.iterdir())
    logs = write_logs(tmp_path / "logs", [*RATINGS, *(f"1::10::9::{k}" for k in range(500, 520))])
    rules = [
        {"kind": "range", "source": "ratings", "column": "rating", "maximum": 5},
        {"kind": "volume", "source": "ratings", "max_change_percent": 50},
        {"kind": "domain", "source": "users", "column": "gender", "one_of": ["F", "M"]},
        {"kind": "unique", "source": "ratings", "columns": ["user", "item"], "severity": "warn"},
    ]
    changed = build_config(logs, result.version.parents[2], contract={"rules": rules})
    with pytest.raises(InputDataError) as error:
        build_dataset(spark, changed)
    message = error.value.render()
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    assert "range ratings.rating: 20 of 34 (58.8235%) outside; 1 to 9" in message
    assert "volume ratings: 34 rows, 14 before (+142.9 %)" in message
    assert "unique" not in message
    assert "domain" not in message
    assert (paths.current.read_text(), sorted(paths.versions.iterdir())) == before


def test_warnings_and_what_holds_go_into_the_manifest_and_the_log(spark, tmp_path, caplog):
    logs = write_logs(tmp_path / "logs")
    rules = [
        {"kind": "references", "source": "ratings", "column": "user", "dictionary": "users",
         "severity": "warn"},
        {"kind": "freshness", "source": "ratings", "column": "ts", "max_age_hours": 24,
         "date": "1970-01-01"},
        {"kind": "range", "feature": "rating", "minimum": 1, "maximum": 5},
        {"kind": "drift", "feature": "item", "metric": "js", "maximum": 0.1},
        {"kind": "volume", "split": "train", "min_rows": 7, "severity": "warn"},
    ]  # fmt: skip
    contract = {"rules": rules, "slices": ["gender"]}
    config = build_config(logs, tmp_path / "datasets", contract=contract)
    with caplog.at_level(logging.WARNING, "sluice.contract"):
        result = build_dataset(spark, config)
    manifest = read_manifest(result.version)
    passed = {entry["rule"]: entry["passed"] for entry in manifest.contract}
    assert passed == {
        "references ratings.user": False,
        "freshness ratings.ts": True,
        "range feature rating (train)": True,
        "drift feature item (train, js)": True,
        "volume split train": False,
    }
    references = manifest.contract[0]
    assert references["received"] == "2 of 14 (14.2857%) without an entry, such as '8'"
    assert references["allowed"] == "keys of users"
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert warned[1] == ("data contract: volume split train: received 6 rows; allowed at least 7")
    check_statistics(result.version, manifest)


def check_statistics(version, manifest):
    label = manifest.statistics["train"]["gender"]["label"]
    rows = {value: (n, rate) for value, n, rate in label["slices"]}
    assert sum(n for n, _ in rows.values()) == 6
    total = sum(n * rate for n, rate in rows.values())
    assert total / 6 == pytest.approx(manifest.label_rate["train"])
    stored = read_statistics(version)["train"]["rating"]
    assert (
        json.loads(json.dumps(stored))["quantiles"]
        == manifest.statistics["train"]["rating"]["quantiles"]
    )
    assert manifest.statistics_file.path == "statistics.json"
    assert "sketch" in stored
