"""What is refused as a likely mistake, what is allowed by name, and what follows from that."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from conf.dates import DateRange
from conf.errors import ExitCode, InputDataError
from conf.etl.split import SplitConfig
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.vocabulary import assign_ids, find_odd_tokens
from etl.events.event_counts import EventCounts
from etl.quality.figures import Share
from etl.quality.lint import (
    MIN_ROWS,
    describe_constant,
    find_constants,
    find_empty_vocabularies,
    find_late,
    find_odd_values,
    find_one_class,
    find_short_lookback,
    find_test_in_log,
    find_unknown,
    find_unmatched,
    refuse_negative_weights,
    settle,
)
from etl.quality.statistics import StatisticsAccumulator
from tests.etl.logs import build_config

USERS = {"matched": 0, "unknown_key": 40, "null_key": 2}
CONVERSION = {"source": "items", "keys": {"item": "item"}, "time": "sold_at", "within_hours": 1}
BOUGHT = {"label": {"name": "bought", "conversion": CONVERSION}}


def make_config(tmp_path, allow=None, **changes):
    config = build_config(tmp_path, tmp_path).model_dump(mode="json")
    columns = config["sources"]["items"]["columns"]
    columns.append({"name": "sold_at", "type": "int64", "nullable": True})
    contract = {"allow": allow or []}
    return build_config(tmp_path, tmp_path, sources=config["sources"], contract=contract, **changes)


def test_a_join_without_a_match_is_refused_by_name(tmp_path):
    matches = {"users": USERS, "items": {"matched": 1, "unknown_key": 41}}
    (found,) = find_unmatched(make_config(tmp_path), matches, {}, {})
    assert (found.rule, found.passed) == ("join users", False)
    assert found.received == "none of 42 events has an entry (unknown_key 40, null_key 2)"
    allowed = make_config(tmp_path, ["users"])
    (found,) = find_unmatched(allowed, matches, {}, {})
    assert found.passed
    assert found.received.endswith("; allowed by contract.allow")
    assert found.allowed_as == "users"
    # A day without events has nothing to match.
    assert find_unmatched(make_config(tmp_path), {"users": {"matched": 0}}, {}, {}) == []


def test_windows_that_reach_beyond_the_days_that_a_run_reads_are_said_once(tmp_path):
    day = DateRange(date(2026, 1, 31), date(2026, 1, 31))
    windows = {"week": 7, "month": 30.5, "ever": None}
    rolling = [{"name": n, "keys": ["item"], "window_days": w} for n, w in windows.items()]
    histories = [{"name": "clicked", "window_days": 6}, {"name": "latest"}]

    def find(lookback, dates=day, **days):
        sources = build_config(tmp_path, tmp_path).model_dump(mode="json")["sources"]
        dated = {"path": "{date}.dat", "days": {"lookback_days": lookback}} | days
        sources["ratings"] |= dated
        config = build_config(
            tmp_path, tmp_path, sources=sources, rolling=rolling, histories=histories
        )
        return find_short_lookback(config, dates)

    (found,) = find(7)
    assert found.severity == "warn"
    assert found.received.startswith("month (30.5 days), ever (all of the log); a run reads 7 days")
    (found,) = find(6)
    assert found.received.startswith("week (7 days), month (30.5 days), ever (all of the log)")
    del rolling[2]
    histories[0]["window_days"] = 31.5
    (found,) = find(31)
    assert found.received.startswith("clicked (31.5 days); a run reads 31 days")
    histories[0]["window_days"] = 31
    assert not find(31)
    # Without days the log is read whole, by a run with or without them.
    assert not find(0, None)
    assert not find(0, path="all.dat", days=None)


GIVEN = {"split": SplitConfig(strategy="given", test="users")}
IN_LOG = "11 of 1,000 events of 'users' are in 'ratings' too"
THRESHOLDS = [
    # check, changed config, counts, what is received; None: nothing is said
    (find_late, {}, {"delivered": 1000, "late": 10}, None),
    (find_late, {}, {"delivered": 1000, "late": 11}, "11 of 1,000 rows read for the run's days"),
    (find_late, {}, {"delivered": 0}, None),
    (find_test_in_log, GIVEN, {"test_in_log": 10}, None),
    (find_test_in_log, GIVEN, {"test_in_log": 11}, IN_LOG),
    (find_test_in_log, GIVEN, {}, None),
]


@pytest.mark.parametrize(("check", "changes", "counts", "received"), THRESHOLDS)
def test_what_is_odd_of_a_hundredth_of_the_rows_is_said(tmp_path, check, changes, counts, received):
    config = build_config(tmp_path, tmp_path).model_copy(update=changes)
    assert config.sources["ratings"].max_bad_rows == 0.01
    found = check(config, EventCounts(1100, {"train": 100, "test": 1000}, {}, None, **counts))
    assert [warned.severity for warned in found] == ["warn"] * (received is not None)
    assert all(warned.received.startswith(received) for warned in found)


@pytest.mark.parametrize(
    ("events", "before", "count"),
    [(3, Share(1, 100), 0), (3, Share(99, 100), 1), (3, Share(0, 100), 1), (3, None, 1),
     (500, Share(1, 100), 0), (900, Share(1, 100), 1)],
)  # fmt: skip
def test_of_few_events_none_may_match_by_chance(tmp_path, events, before, count):
    known = {} if before is None else {("joined", "users", None): before}
    matches = {"users": {"matched": 0, "unknown_key": events}}
    assert len(find_unmatched(make_config(tmp_path), matches, {}, known)) == count


def test_conversions_that_nothing_led_to_are_refused_with_why(tmp_path):
    outcomes = {"bought": {"rows": 12, "outside_time": 7, "no_event": 5}}
    (found,) = find_unmatched(make_config(tmp_path, **BOUGHT), {}, outcomes, {})
    assert found.rule == "conversions of label bought"
    assert found.received == "none of 12 makes a sample positive (outside_time 7, no_event 5)"
    assert find_unmatched(make_config(tmp_path, **BOUGHT), {}, {"bought": {"rows": 3}}, {}) == []
    assert found.allowed_as == "items"


def test_empty_vocabularies_are_refused_unless_named_or_nothing_else_could_be(tmp_path):
    tokens = {"gender": 0, "tags": 4, "item": 2}
    (found,) = find_empty_vocabularies(make_config(tmp_path), tokens, ())
    assert (found.rule, found.passed) == ("vocabulary gender", False)
    named = make_config(tmp_path, ["gender"])
    assert all(result.passed for result in find_empty_vocabularies(named, tokens, ()))
    assert find_empty_vocabularies(make_config(tmp_path), tokens, {"users"}) == []


def test_quotes_and_header_lines_among_tokens_are_warned_of():
    text = assign_ids(
        pa.table({"token": ['"7"', "item", '"', "8"], "count": [3, 2, 2, 1]}), "string"
    )
    headed = assign_ids(pa.table({"token": ["u", "USER"], "count": [3, 1]}), "string")
    numbers = assign_ids(pa.table({"token": [7], "count": [3]}), "int64")
    odd = {
        "item": find_odd_tokens([text.slice(0, 2), text.slice(2)], ("item", "other")),
        "fine": find_odd_tokens([text.slice(3)], ("item",)),
        "id": find_odd_tokens([headed], ("userId",)),
        "user": find_odd_tokens([numbers], ("user",)),
    }
    quotes, header, other = find_odd_values(odd)
    assert (quotes.rule, quotes.severity, quotes.passed) == ("vocabulary item", "warn", False)
    assert quotes.received == '1 in quotes, such as "7": they are part of it'
    assert header.received == "item, as its column is named: is it a header line?"
    assert other.received.startswith("USER, ")


N = MIN_ROWS
COLUMNS = [
    # values, what is said of them in the message, or None where they vary
    (pa.array([5] * N), "the value 5"),
    (pa.array([1.5] * N, pa.float32()), "the value 1.5"),
    (pa.array(["x"] * N), "the value x"),
    (pa.array([None] * N, pa.int64()), "null"),
    (pa.array([float("nan")] * N, pa.float32()), "NaN"),
    (pa.array([[]] * N, pa.list_(pa.int64())), "an empty list"),
    (pa.array([[], None] * (N // 2), pa.list_(pa.int64())), "an empty list"),
    (pa.array([[7, 7]] * N), "the value 7"),
    (pa.array([5] * (N - 1)), None),  # too few rows to tell
    (pa.array([5] * N + [6]), None),
    (pa.array([5] * N + [None]), None),
    (pa.array([1.5] * N + [float("nan")], pa.float32()), None),
    (pa.array([[7]] * N + [[7, 7]]), None),
    (pa.array([[7]] * N + [[]]), None),
    (pa.array([[7]] * N + [None]), None),
    (pa.array([[7, 8]] * N), None),
]


def gather(**columns):
    batch = pa.table(columns).combine_chunks().to_batches()[0]
    accumulator = StatisticsAccumulator(batch.schema)
    accumulator.update(batch)
    return json.loads(json.dumps(accumulator.to_dict()))


@pytest.mark.parametrize(("column", "said"), COLUMNS)
def test_a_column_is_constant_where_every_row_is_the_same(column, said):
    found = describe_constant(gather(x=column)["x"])
    assert found == (
        None if said is None else f"{said} in all {len(column)} rows of the train split"
    )


SCHEMA = FeatureSchema(
    (
        FeatureSpec("gender", "int64", "user", encoding="gender", vocabulary_size=3),
        FeatureSpec("tags", "int64", "item", (None,), encoding="tags", vocabulary_size=5),
        FeatureSpec("of_tags", "float32", "item", (None,), encoding="weights:of_tags"),
        FeatureSpec("rating", "float32", "context"),
        FeatureSpec("row", "int64", "id"),
        FeatureSpec("label", "float32", "label"),
        FeatureSpec("weight", "float32", "weight"),
    )
)
SAME = gather(
    gender=pa.array([1] * N),
    tags=pa.array([[2]] * N),
    of_tags=pa.array([[1.0]] * N, pa.list_(pa.float32())),
    rating=pa.array([1.0, 2.0] * (N // 2), pa.float32()),
    row=pa.array([1] * N),
    label=pa.array([0.0] * N, pa.float32()),
    weight=pa.array([1.0] * N, pa.float32()),
)


def find(config, nothing_matched=()):
    constants = find_constants(config, SCHEMA, SAME, nothing_matched)
    return [*constants, *find_one_class(config, {"train": SAME}, nothing_matched)]


def test_constants_that_models_read_and_labels_of_one_class_are_refused(tmp_path):
    found = find(make_config(tmp_path))
    rules = ["constant feature gender", "constant feature tags", "label label of one class"]
    assert [result.rule for result in found] == rules
    assert not any(result.passed for result in found)
    with pytest.raises(InputDataError) as error:
        settle(found)
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    assert error.value.what == "the data look wrong in 3 ways; nothing was published"
    shown = "`contract: {allow: [gender, tags, label]}`"
    assert shown in str(error.value.fix)
    assert "the last version stays current" in str(error.value.fix)
    assert "contract.rules" not in str(error.value.fix)


def test_weights_below_0_are_refused():
    statistics = {"train": SAME, "test": gather(weight=pa.array([1.0, -0.5], pa.float32()))}
    refuse_negative_weights(SCHEMA, {"train": SAME})
    with pytest.raises(InputDataError, match=r"below 0: feature 'weight', split test") as error:
        refuse_negative_weights(SCHEMA, statistics)
    assert "-0.5" in str(error.value.received)


def test_what_is_named_passes_and_so_does_what_follows_from_it(tmp_path):
    allow = ["gender", "tags", "label"]
    found = find(make_config(tmp_path, allow))
    assert all(result.passed for result in found)
    assert settle(found) == tuple(found)
    # Nobody matched a user: their columns are null, and have no vocabulary.
    left = {result.rule for result in find(make_config(tmp_path), {"users"})}
    assert left == {"constant feature tags", "label label of one class"}
    left = find(make_config(tmp_path, ["tags"]), {"users"})
    assert [result.rule for result in left] == ["label label of one class"]


@pytest.mark.parametrize(
    ("part", "is_refused"), [("weekday", False), ("month", False), ("hour", True)]
)
def test_a_run_of_one_day_may_have_one_weekday(tmp_path, part, is_refused):
    encoding = {"kind": "date_part", "part": part}
    when = {"name": "when", "column": "ts", "role": "context", "encoding": encoding}
    features = [*make_config(tmp_path).model_dump(mode="json")["features"], when]
    schema = FeatureSchema((FeatureSpec("when", "int64", "context", encoding="date_part:when"),))
    same = gather(when=pa.array([4] * N))
    found = find_constants(make_config(tmp_path, features=features), schema, same, ())
    assert [result.rule for result in found] == ["constant feature when"] * is_refused


def test_labels_of_conversions_and_of_drawn_negatives(tmp_path):
    names = ["items"]
    config = make_config(tmp_path, names, label={**BOUGHT["label"], "name": "label"})
    assert "label label of one class" not in {r.rule for r in find(config, {"items"})}
    assert "label label of one class" in {r.rule for r in find(config)}
    # Positives alone are what happened; where negatives are drawn for training, some must be there.
    implicit = make_config(tmp_path, label=None)
    assert "label label of one class" not in {r.rule for r in find(implicit)}
    for split, count in (("train", 1), ("test", 0)):
        drawn = {"strategy": "uniform", "per_positive": 1, "splits": [split]}
        drawing = make_config(tmp_path, label=None, negatives=drawn)
        assert sum(r.rule.startswith("label") for r in find(drawing)) == count


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("genders", "did you mean 'gender'"),
        ("labels", "did you mean 'label'"),
    ],
)
def test_names_that_are_not_there_are_refused_before_anything_is_read(tmp_path, name, hint):
    with pytest.raises(ValidationError, match=hint) as error:
        make_config(tmp_path, [name])
    assert "contract.allow" in str(error.value)


def count_ids(values: int, oov: int, rows: int = 40, bucketed: int = 0) -> dict[str, Any]:
    return {"rows": rows, "values": values, "oov": oov, "raw": {"bucketed": bucketed}}


@pytest.mark.parametrize(
    ("item", "warned"),
    [
        ({"train": count_ids(90, 3), "test": count_ids(40, 40)}, True),
        ({"train": count_ids(90, 3), "test": count_ids(40, 9, bucketed=31)}, True),
        ({"train": count_ids(90, 3), "test": count_ids(40, 39)}, False),
        ({"train": count_ids(90, 90), "test": count_ids(40, 40)}, False),  # refused before
        ({"train": count_ids(90, 3), "test": count_ids(0, 0)}, False),  # no value at all
        ({"train": count_ids(90, 3), "test": count_ids(9, 9, rows=9)}, False),  # chance
        ({"test": count_ids(40, 40)}, False),
    ],
)
def test_a_split_that_knows_no_id_is_warned_of(tmp_path, item, warned):
    schema = FeatureSchema((
        FeatureSpec("user", "int64", "user", vocabulary_size=9),
        FeatureSpec("item", "int64", "item", vocabulary_size=9),
        FeatureSpec("step", "int64", "context"),  # numbers that are 1 are no OOV
    ))  # fmt: skip
    same = {"train": count_ids(90, 1), "test": count_ids(40, 40)}
    statistics = {
        split: {"item": item[split], "step": same[split], "user": same[split]} for split in item
    }
    by_user = make_config(tmp_path, split={"strategy": "hash"})
    found = find_unknown(by_user, schema, statistics)
    assert [result.rule for result in found] == ["unknown feature item (test)"] * warned
    assert all(result.severity == "warn" for result in found)
    others = find_unknown(make_config(tmp_path), schema, statistics)
    # Users are apart by design in one split, not in the other.
    assert len(others) == len(found) + ("train" in item)
