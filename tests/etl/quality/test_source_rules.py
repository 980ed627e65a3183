"""Every kind of rule on sources, over one small source and its dictionary."""

from __future__ import annotations

from datetime import date

import pytest

from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.etl.contract import ContractConfig
from etl.quality.contract import ask_rules, check_source_rules
from etl.sources.bad_rows import count_rows
from etl.sources.read import read_source
from tests.etl.logs import build_config

LOG = ["1\ta\t0.5\t10|20\t1000", "2\tb\t4.1\t10\t2000", "2\tc\t\t\t3600", "x\ta\t1\t\t1",
       "4\t\t9.5\t30|10\t7200"]  # fmt: skip
KEYS = ["1", "2", "3", "1"]


@pytest.fixture(scope="module")
def read(spark, tmp_path_factory):
    """The sources, their config, and their rows."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / "log.tsv").write_text("\n".join(LOG) + "\n")
    (folder / "keys.tsv").write_text("\n".join(KEYS) + "\n")
    base = build_config(folder, folder / "out").model_dump()
    columns = [
        {"name": "id", "type": "int64"},
        {"name": "word", "type": "string"},
        {"name": "price", "type": "float32", "nullable": True},
        {"name": "tags", "type": "list<int64>", "separator": "|", "nullable": True},
        {"name": "ts", "type": "int64"},
    ]
    config = BuildConfig.model_validate({
        **base,
        "sources": {
            "log": {"path": "log.tsv", "columns": columns},
            "keys": {"path": "keys.tsv", "columns": columns[:1], "key": "id"},
        },
        "events": {"source": "log", "user": "id", "item": "word", "time": "ts"},
        "joins": [],
        "label": None,
        "features": [
            {"name": "id", "column": "id", "role": "user"},
            {"name": "word", "column": "word", "role": "item"},
        ],
    })  # fmt: skip
    # The item's column may not be null in a config; the rows here are read as if it might.
    config.sources["log"].columns[1].__dict__["nullable"] = True
    return config, {
        name: read_source(spark, name, source, str(folder))
        for name, source in config.sources.items()
    }


def check(read, *rules, run_date=date(1970, 1, 1)):
    config, sources = read
    contract = ContractConfig.model_validate({"rules": rules})
    config = config.model_copy(update={"contract": contract})
    sources = ask_rules(config, sources)
    counts = {name: count_rows(source) for name, source in sources.items()}
    return check_source_rules(config, sources, counts, {"log": 8}, run_date)


LOG_RULES = [
    # rule, passes, what is received
    ({"kind": "type", "column": "id", "type": "int64"}, False, "1 of 5"),
    ({"kind": "type", "column": "id", "type": "int64", "max_rate": 0.2}, True, "1 of 5"),
    ({"kind": "range", "column": "price", "maximum": 4.1}, False, "1 of 3"),
    ({"kind": "range", "column": "price", "minimum": 0.5, "maximum": 9.5}, True, "0 of 3"),
    ({"kind": "range", "column": "price", "minimum": 1, "max_rate": 0.4}, True, "0.5 to 9.5"),
    ({"kind": "range", "column": "tags", "maximum": 20}, False, "1 of 3"),
    ({"kind": "domain", "column": "word", "one_of": ["a", "b"]}, False, "such as 'c'"),
    ({"kind": "domain", "column": "tags", "one_of": [10, 20, 30]}, True, "0 of 3"),
    ({"kind": "null_rate", "column": "word", "max_rate": 0.25}, True, "1 of 4"),
    ({"kind": "null_rate", "column": "tags", "max_rate": 0.2}, False, "1 of 4"),
    ({"kind": "unique", "column": "id"}, False, "1 of 4"),
    ({"kind": "unique", "column": ["id", "word"]}, True, "0 of 3"),
    ({"kind": "references", "column": "id", "dictionary": "keys"}, False, "such as '4'"),
    ({"kind": "references", "column": "id", "dictionary": "keys", "max_rate": 0.25}, True, "1 of"),
    ({"kind": "volume", "minimum": 5}, False, "4 rows"),
    ({"kind": "volume", "max_change_percent": 50}, True, "-50.0 %"),
    ({"kind": "volume", "max_change_percent": 49}, False, "8 before"),
    ({"kind": "freshness", "column": "ts", "maximum": 22}, True, "22.0 h old"),
    ({"kind": "freshness", "column": "ts", "maximum": 21.9}, False, "1970-01-01, 22.0 h"),
    ({"kind": "freshness", "column": "ts", "maximum": 99, "date": "1969-12-31"}, False,
     "2.0 h ahead"),
]  # fmt: skip


def test_each_kind_of_rule_in_one_pass(read):
    results = check(read, *({"source": "log", **rule} for rule, _, _ in LOG_RULES))
    for result, (rule, passes, received) in zip(results, LOG_RULES, strict=True):
        assert result.passed is passes, (rule, result)
        assert received in result.received, (rule, result)
        assert result.rule.startswith(rule["kind"])


def test_freshness_needs_a_day_unless_the_wall_clock_is_asked_for(read):
    rule = {"kind": "freshness", "source": "log", "column": "ts", "maximum": 1}
    with pytest.raises(ConfigError, match="--date"):
        check(read, rule, run_date=None)
    (result,) = check(read, {**rule, "date": "now"}, run_date=None)
    assert not result.passed  # more than an hour since 1970
