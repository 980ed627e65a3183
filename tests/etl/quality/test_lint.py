"""What is refused as a likely mistake, what is allowed by name, and figures that are far off."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from conf.dates import DateRange
from conf.errors import ExitCode, InputDataError
from conf.etl.split import SplitConfig
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.vocabulary import assign_ids, find_odd_tokens
from etl.events.event_counts import EventCounts
from etl.quality.figures import (
    Figure,
    Share,
    find_figures,
    find_label_rate,
    find_nulls,
    find_oov,
    list_figures,
)
from etl.quality.lint import (
    MIN_ROWS,
    describe_constant,
    find_constants,
    find_empty_vocabularies,
    find_odd_events,
    find_odd_values,
    find_one_class,
    find_short_lookback,
    find_unknown,
    find_unmatched,
    refuse_negative_weights,
    settle,
    warn_of_figure,
)
from etl.quality.statistics import StatisticsAccumulator, merge_statistics, summarize_statistics
from tests.etl.logs import build_config

CONVERSION = {"source": "items", "keys": {"item": "item"}, "time": "sold_at", "within_hours": 1}
BOUGHT = {"name": "bought", "conversion": CONVERSION}


def make_config(tmp_path, *allow: str, **changes):
    config = build_config(tmp_path, tmp_path).model_dump(mode="json")
    columns = config["sources"]["items"]["columns"]
    columns.append({"name": "sold_at", "type": "int64", "nullable": True})
    contract = {"allow": list(allow)}
    return build_config(tmp_path, tmp_path, sources=config["sources"], contract=contract, **changes)


NOTHING = {"matched": 0, "unknown_key": 40, "null_key": 2}
BY_CHANCE = {"matched": 0, "unknown_key": 3}
UNMATCHED = [
    # what became of joins with users, of conversions, share matched before, rule and received
    (NOTHING, {}, None,
     ["join users: none of 42 events has an entry (unknown_key 40, null_key 2)"]),
    ({"matched": 1, "unknown_key": 41}, {}, None, []),
    ({"matched": 0}, {}, None, []),  # a day without events
    (None, {"rows": 12, "outside_time": 7, "no_event": 5}, None,
     ["conversions of label bought: none of 12 makes a sample positive "
      "(outside_time 7, no_event 5)"]),
    (None, {"rows": 3}, None, []),
    (BY_CHANCE, {}, Share(1, 100), []),
    ({"matched": 0, "unknown_key": 500}, {}, Share(1, 100), []),
    *[
        ({"matched": 0, "unknown_key": rows}, {}, before,
         [f"join users: none of {rows} events has an entry (unknown_key {rows})"])
        for rows, before in (
            (3, Share(99, 100)), (3, Share(0, 100)), (3, None), (900, Share(1, 100)),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("joined", "converted", "before", "said"), UNMATCHED)
def test_what_matches_nothing_is_refused_unless_by_chance(
    tmp_path, joined, converted, before, said
):
    matches = {} if joined is None else {"users": joined}
    outcomes = {"bought": converted} if converted else {}
    known = {} if before is None else {("joined", "users", None): before}
    config = make_config(tmp_path, label=BOUGHT)
    found = list(find_unmatched(config, matches, outcomes, known))
    assert [f"{result.rule}: {result.received}" for result in found] == said
    assert all(f.allowed_as == ("users" if joined else "items") and not f.passed for f in found)
    config = make_config(tmp_path, "users", "items", label=BOUGHT)
    allowed = list(find_unmatched(config, matches, outcomes, known))
    assert [result.passed for result in allowed] == [True] * len(said)
    assert all(result.received.endswith("; allowed by contract.allow") for result in allowed)


@pytest.mark.parametrize(
    ("lookback", "windows", "histories", "longer"),
    [
        (
            7,
            {"week": 7, "month": 30.5, "ever": None},
            6,
            "month (30.5 days), ever (all of the log)",
        ),
        (6, {"week": 7, "month": 30.5}, 6, "week (7 days), month (30.5 days)"),
        (31, {"week": 7}, 31.5, "clicked (31.5 days)"),
        (31, {"week": 7}, 31, None),
        (None, {"ever": None}, 6, None),  # without days the log is read whole
    ],
)
def test_windows_beyond_the_days_that_a_run_reads(tmp_path, lookback, windows, histories, longer):
    sources = build_config(tmp_path, tmp_path).model_dump(mode="json")["sources"]
    days = {"path": "{date}.dat", "days": {"lookback_days": lookback}}
    sources["ratings"] |= {"path": "all.dat", "days": None} if lookback is None else days
    config = build_config(
        tmp_path, tmp_path, sources=sources,
        rolling=[{"name": n, "keys": ["item"], "window_days": w} for n, w in windows.items()],
        histories=[{"name": "clicked", "window_days": histories}, {"name": "latest"}],
    )  # fmt: skip
    day = DateRange(date(2026, 1, 31), date(2026, 1, 31))
    found = [warned.received for warned in find_short_lookback(config, day)]
    assert [text.partition(";")[0] for text in found] == ([] if longer is None else [longer])
    assert not list(find_short_lookback(config, None))


THRESHOLDS = [
    # counts, what is received; None: nothing is said
    ({"delivered": 1000, "late": 10}, None),
    ({"delivered": 1000, "late": 11}, "11 of 1,000 rows read for the run's days"),
    ({"test_in_log": 10}, None),
    ({"test_in_log": 11}, "11 of 1,000 events of 'users' are in 'ratings' too"),
]


@pytest.mark.parametrize(("counts", "received"), THRESHOLDS)
def test_what_is_odd_of_a_hundredth_of_the_rows_is_said(tmp_path, counts, received):
    given = SplitConfig(strategy="given", test="users")
    config = build_config(tmp_path, tmp_path).model_copy(update={"split": given})
    counted = EventCounts(1100, {"train": 100, "test": 1000}, {}, None, **counts)
    found = list(find_odd_events(config, counted, {}, None))
    assert [warned.severity for warned in found] == ["warn"] * (received is not None)
    assert all(warned.received.startswith(received) for warned in found)


def test_empty_vocabularies_are_refused_unless_named_or_nothing_else_could_be(tmp_path):
    tokens = {"gender": 0, "tags": 4, "item": 2}
    (found,) = find_empty_vocabularies(make_config(tmp_path), tokens, ())
    assert (found.rule, found.passed) == ("vocabulary gender", False)
    (found,) = find_empty_vocabularies(make_config(tmp_path, "gender"), tokens, ())
    assert found.passed
    assert find_empty_vocabularies(make_config(tmp_path), tokens, {"users"}) == []


def test_quotes_and_header_lines_among_tokens_are_warned_of():
    tokens = {"token": ['"7"', "item", '"', "8"], "count": [3, 2, 2, 1]}
    text = assign_ids(pa.table(tokens), "string")
    headed = assign_ids(pa.table({"token": ["u", "USER"], "count": [3, 1]}), "string")
    odd = {
        "item": find_odd_tokens([text.slice(0, 2), text.slice(2)], ("item", "other")),
        "fine": find_odd_tokens([text.slice(3)], ("item",)),
        "id": find_odd_tokens([headed], ("userId",)),
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
    assert found == (said and f"{said} in all {len(column)} rows of the train split")


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


def find(config, *nothing_matched: str):
    constants = find_constants(config, SCHEMA, SAME, nothing_matched)
    return [*constants, *find_one_class(config, {"train": SAME}, nothing_matched)]


GENDER, TAGS = "constant feature gender", "constant feature tags"
ONE_CLASS = "label label of one class"
DRAWN = {"strategy": "uniform", "per_positive": 1}
REFUSED = [
    # names allowed, changes of the config, sources that matched nothing, what is refused
    ((), {}, (), [GENDER, TAGS, ONE_CLASS]),
    (("gender", "tags", "label"), {}, (), []),
    # Nobody matched a user: their columns are null, and have no vocabulary.
    ((), {}, ("users",), [TAGS, ONE_CLASS]),
    (("tags",), {}, ("users",), [ONE_CLASS]),
    (("items",), {"label": {**BOUGHT, "name": "label"}}, ("items",), [GENDER]),
    (("items",), {"label": {**BOUGHT, "name": "label"}}, (), [GENDER, TAGS, ONE_CLASS]),
    # Positives alone are what happened; where negatives are drawn for training, some must be there.
    ((), {"label": None}, (), [GENDER, TAGS]),
    ((), {"label": None, "negatives": {**DRAWN, "splits": ["train"]}}, (),
     [GENDER, TAGS, ONE_CLASS]),
    ((), {"label": None, "negatives": {**DRAWN, "splits": ["test"]}}, (), [GENDER, TAGS]),
]  # fmt: skip


@pytest.mark.parametrize(("allow", "changes", "nothing_matched", "refused"), REFUSED)
def test_constants_that_models_read_and_labels_of_one_class_are_refused(
    tmp_path, allow, changes, nothing_matched, refused
):
    found = find(make_config(tmp_path, *allow, **changes), *nothing_matched)
    assert [result.rule for result in found if not result.passed] == refused


def test_all_that_is_refused_is_refused_at_once(tmp_path):
    with pytest.raises(InputDataError) as error:
        settle(find(make_config(tmp_path)))
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    assert "`contract: {allow: [gender, tags, label]}`" in str(error.value.fix)
    allowed = find(make_config(tmp_path, "gender", "tags", "label"))
    assert settle(allowed) == tuple(allowed)


def test_weights_below_0_are_refused():
    statistics = {"train": SAME, "test": gather(weight=pa.array([1.0, -0.5], pa.float32()))}
    refuse_negative_weights(SCHEMA, {"train": SAME})
    with pytest.raises(InputDataError, match=r"below 0: feature 'weight', split test") as error:
        refuse_negative_weights(SCHEMA, statistics)
    assert "-0.5" in str(error.value.received)


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


@pytest.mark.parametrize("name", ["genders", "labels"])
def test_names_that_are_not_there_are_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(ValidationError, match=f"did you mean '{name[:-1]}'") as error:
        make_config(tmp_path, name)
    assert "contract.allow" in str(error.value)


def count_ids(values: int, oov: int, rows: int = 40, bucketed: int = 0) -> dict[str, Any]:
    return {"rows": rows, "values": values, "oov": oov, "raw": {"bucketed": bucketed}}


@pytest.mark.parametrize(
    ("train", "test", "warned"),
    [
        (count_ids(90, 3), count_ids(40, 40), True),
        (count_ids(90, 3), count_ids(40, 9, bucketed=31), True),
        (count_ids(90, 3), count_ids(40, 39), False),
        (count_ids(90, 90), count_ids(40, 40), False),  # refused before
        (count_ids(90, 3), count_ids(0, 0), False),  # no value at all
        (count_ids(90, 3), count_ids(9, 9, rows=9), False),  # chance
        (None, count_ids(40, 40), False),
    ],
)
def test_a_split_that_knows_no_id_is_warned_of(tmp_path, train, test, warned):
    schema = FeatureSchema((
        FeatureSpec("user", "int64", "user", vocabulary_size=9),
        FeatureSpec("item", "int64", "item", vocabulary_size=9),
        FeatureSpec("step", "int64", "context"),  # numbers that are 1 are no OOV
    ))  # fmt: skip
    same = {"train": count_ids(90, 1), "test": count_ids(40, 40)}
    statistics = {
        split: {"item": item, "step": same[split], "user": same[split]}
        for split, item in (("train", train), ("test", test)) if item is not None
    }  # fmt: skip
    by_user = make_config(tmp_path, split={"strategy": "hash"})
    found = list(find_unknown(by_user, schema, statistics))
    assert [result.rule for result in found] == ["unknown feature item (test)"] * warned
    assert all(result.severity == "warn" for result in found)
    # Users are apart by design in one split, not in the other.
    others = list(find_unknown(make_config(tmp_path), schema, statistics))
    assert len(others) == len(found) + (train is not None)


MANY = 1_000_000


@pytest.mark.parametrize(
    ("kind", "before", "now", "rows", "is_far"),
    [
        # Shares matched, null or OOV, of very many rows: half as much again, one point at least.
        ("oov", 0.991, 0.97, MANY, True),
        ("oov", 0.991, 0.985, MANY, False),
        ("oov", 0.0, 0.02, MANY, True),
        ("oov", 0.0, 0.009, MANY, False),
        ("oov", 0.20, 0.28, MANY, False),
        ("oov", 0.20, 0.31, MANY, True),
        ("oov", 0.5, 0.59, MANY, False),
        ("oov", 0.5, 0.62, MANY, True),
        ("oov", 1.0, 0.5, MANY, True),
        # Of few rows chance does more.
        ("oov", 0.9, 0.8, 30, False),
        ("oov", 0.9, 0.2, 30, True),
        ("oov", 0.0, 0.02, 100, False),
        ("oov", 0.5, 0.0, 3, False),
        # Rates of labels are held closer.
        ("label", 0.001, 0.002, MANY, True),
        ("label", 0.001, 0.0011, MANY, False),
        ("label", 0.001, 0.002, 10_000, False),
        ("label", 0.04, 0.045, MANY, False),
        ("label", 0.5, 0.61, MANY, True),
        ("label", 0.0, 0.001, MANY, True),
    ],
)
def test_a_share_is_far_beyond_its_bound_and_chance(kind, before, now, rows, is_far):
    shares = (Share(round(share * rows), rows) for share in (now, before))
    assert Figure(kind, "x", None, *shares).is_far is is_far


@pytest.mark.parametrize("kind", ["null", "label"])
def test_chance_alone_is_never_far(kind):
    rng = np.random.default_rng(3)
    for share in (0.0, 0.001, 0.02, 0.3, 0.5, 0.97, 1.0):
        for rows in (5, 40, 3_000, MANY):
            draws = rng.binomial(rows, share, (500, 2)).tolist()
            shares = [(Share(a, rows), Share(b, rows)) for a, b in draws]
            assert not any(Figure(kind, "x", None, *pair).is_far for pair in shares)


FIGURE_SCHEMA = FeatureSchema(
    (
        FeatureSpec("word", "int64", "user", encoding="word", vocabulary_size=5),
        FeatureSpec("tags", "int64", "item", (None,), 9, encoding="word", vocabulary_size=5),
        FeatureSpec("price", "float32", "context"),
        FeatureSpec("scaled", "float32", "context", encoding="normalize:scaled"),
        FeatureSpec("mixed", "int64", "context", encoding="cross:mixed", vocabulary_size=9),
        FeatureSpec("label", "float32", "label"),
        FeatureSpec("stars", "float32", "label"),
        FeatureSpec("row", "int64", "id"),
    )
)
RAW = {
    "word": {"missing": 1, "null_values": 0, "bucketed": 1},
    "tags": {"missing": 1, "null_values": 2, "bucketed": 0},
    "scaled": {"missing": 2, "null_values": 0, "bucketed": 0, "values": {"nan": 1}},
    "mixed": {"missing": 0, "null_values": 0, "bucketed": 0},
}


def statistics(raw: bool = True):
    table = {
        "word": [1, 1, 2, 4],  # one null, one unknown, one in a bucket
        "tags": [[1, 2, 1], [], None, [1]],
        "price": pa.array([1.0, None, float("nan"), 3.0], pa.float32()),
        "scaled": pa.array([0.0, 0.0, 0.0, 1.0], pa.float32()),
        "mixed": [1, 5, 6, 7],
        "label": pa.array([1, 0, 0, 0], pa.float32()),
        "stars": pa.array([1, 4, 5, 5], pa.float32()),
        "row": [1, 2, 3, 4],
    }
    batch = pa.table(table).combine_chunks().to_batches()[0]
    accumulator = StatisticsAccumulator(batch.schema)
    accumulator.update(batch)
    found = json.loads(json.dumps(accumulator.to_dict()))
    for name, own in RAW.items() if raw else ():
        found[name]["raw"] = own
    return found


def test_nulls_and_oov_are_told_apart_by_the_raw_column():
    found, blind = summarize_statistics(statistics()), summarize_statistics(statistics(raw=False))
    expected = {
        # nulls, OOV, and nulls where the raw column is unknown
        "word": (Share(1, 4), Share(2, 3), None),
        "tags": (Share(1, 4), Share(1, 2), None),
        "price": (Share(2, 4), None, Share(2, 4)),
        "scaled": (Share(3, 4), None, None),
        "mixed": (Share(1, 4), None, Share(1, 4)),
    }
    for spec in FIGURE_SCHEMA.features[:5]:
        own, without = found[spec.name], blind[spec.name]
        told = (find_nulls(spec, own), find_oov(spec, own), find_nulls(spec, without))
        assert told == expected[spec.name]
        assert find_oov(spec, without) is None
    assert find_nulls(FIGURE_SCHEMA["price"], {}) is None


def test_only_labels_of_zeros_and_ones_have_a_rate():
    found = statistics(raw=False)
    assert find_label_rate(found["label"]) == Share(1, 4)
    assert find_label_rate(found["stars"]) is None
    assert find_label_rate(merge_statistics([found, found])["label"]) == Share(2, 8)


def test_figures_stand_beside_those_before_and_the_far_ones_are_warned_of():
    now = find_figures(
        FIGURE_SCHEMA,
        {"train": summarize_statistics(statistics()), "catalog": {}},
        matches={"users": {"matched": 900, "unknown_key": 100}},
        conversions={"label": {"rows": 1_000, "no_event": 995}},
        tokens={"word": 3, "new": 10},
    )
    matches = {"users": {"matched": 9_990, "unknown_key": 10}}
    before = find_figures(FIGURE_SCHEMA, {}, matches, {}, {"word": 800})
    figures = {figure.title: figure for figure in list_figures(now, before)}
    far = {title for title, figure in figures.items() if figure.is_far}
    joined = "share of events matched by join users"
    assert far == {joined, "tokens of vocabulary word"}
    # One point, and four standard errors of 0.33 points.
    assert warn_of_figure(figures[joined]).allowed == "a change of at most 2.33 points"
    conversions = "share of conversions that make a sample positive, of label label"
    assert figures[conversions].before is None
    assert figures["rate of label label (train)"].now == Share(1, 4)
    assert figures["share of OOV of feature word (train)"].now == Share(2, 3)
    assert not any(figure.is_far for figure in list_figures(now, None))
