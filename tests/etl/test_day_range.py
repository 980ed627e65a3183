"""Days of a run: refused where nothing of the build depends on them."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from conf.dates import DateRange
from conf.errors import ConfigError
from etl.build import check_config
from etl.day_range import check_dates
from etl.runs import RunRequest
from tests.etl.logs import build_config
from tests.etl.samples_log import ctr_config

DAY = DateRange(date(2026, 1, 31), date(2026, 1, 31))


def log_source(**changes):
    columns = [{"name": "click", "type": "int64"}, {"name": "site", "type": "string"}]
    columns += [{"name": "device", "type": "string"}, {"name": "at", "type": "timestamp"}]
    return {"sources": {"log": {"path": "log.tsv", "columns": columns, **changes}}}


def test_a_day_that_nothing_depends_on_is_refused():
    config = ctr_config(Path("."), **log_source())
    with pytest.raises(ConfigError, match="nothing of this build depends on days") as refused:
        check_config(config, RunRequest(DAY))
    assert refused.value.exit_code == 2
    check_config(config, RunRequest())


@pytest.mark.parametrize(
    "changes",
    [
        log_source(path="logs/{date}.tsv"),
        log_source(days={"column": "at"}),
        log_source()
        | {"contract": {"rules": [{"kind": "freshness", "source": "log", "column": "at",
                                   "max_age_hours": 30, "unit": "ms"}]}},
    ],
)  # fmt: skip
def test_days_of_an_input_or_a_rule_count(changes):
    check_dates(ctr_config(Path("."), **changes), DAY)


@pytest.mark.parametrize("what", ["freshness", "column 'at'"])
def test_a_run_without_the_day_that_a_rule_or_a_bound_asks_for_is_refused_at_once(what):
    changes = log_source()
    if what == "freshness":
        rule = {"kind": "freshness", "source": "log", "column": "at", "unit": "ms"}
        changes |= {"contract": {"rules": [rule | {"max_age_hours": 30}]}}
    else:
        changes["sources"]["log"]["columns"][3]["not_after"] = "run_date"
    config = ctr_config(Path("."), **changes)
    with pytest.raises(ConfigError, match=what) as refused:
        check_config(config, RunRequest())
    assert "--date" in refused.value.render()
    check_config(config, RunRequest(DAY))


def test_a_bound_by_the_run_s_day_and_times_of_events_count():
    changes = log_source()
    changes["sources"]["log"]["columns"][3]["not_after"] = "run_date"
    check_dates(ctr_config(Path("."), **changes), DAY)
    check_dates(build_config(Path("."), Path(".")), DAY)
