"""Inputs of requests: times of the build's unit, names of the source's columns, null and floats."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from training.raw_inputs.files import RawFile
from training.raw_inputs.inputs import InputColumn, SourceNames
from training.raw_inputs.requests import RawValueError, build_array, read_names
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import RequestLimits
from training.serving.requests.tensors import check_examples, parse_predict

NULL, PAD = -(2**61), -(2**63)
HOUR = InputColumn("hour", "hour", "ts", "int64", False, None, None, None, NULL,
                   time_unit="ms", time_kind="event")  # fmt: skip
BORN = replace(HOUR, name="born", feature="born", column="born_ms", time_kind="date")
USER = InputColumn("uid", "uid", "user_id", "string", False, None, None, None, "<null>")
VIEWED = InputColumn("viewed", "viewed", "viewed", "string", True, None, 15, "<pad>", "<null>")
AGES = InputColumn("ages", "ages", "ages", "float32", True, None, 15, None, None, True)
TIMES = InputColumn("times", "times", "times", "int64", True, None, 15, PAD, NULL,
                    time_unit="ms", time_kind="date")  # fmt: skip
INPUTS = (HOUR, BORN, USER, VIEWED, AGES)
MS = 1_794_268_800_297
ROW = {"hour": MS, "born": 315_532_800_000, "uid": "u1", "viewed": ["a", "b"], "ages": [1.0, 2.0]}


def specs(inputs: tuple[InputColumn, ...]) -> dict[str, tf.TensorSpec]:
    return {
        item.name: tf.TensorSpec([None, None] if item.is_list else [None], item.dtype)
        for item in inputs
    }


def about(inputs: tuple[InputColumn, ...]) -> SourceNames:
    return read_names(item.to_json() for item in inputs)


def predict(rows: list[dict], inputs: tuple[InputColumn, ...] = INPUTS) -> dict[str, np.ndarray]:
    return parse_predict({"instances": rows}, specs(inputs), about(inputs))[0]


def read_file(tmp_path, rows: list[dict], inputs=INPUTS) -> dict[str, np.ndarray]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = RawFile(path).read(inputs, 100)
    return found.inputs


@pytest.mark.parametrize(
    ("values", "said"),
    [([MS // 1000], "seconds, and the model reads milliseconds"),
     ([MS // 1000, MS // 1000 + 9], "seconds, and the model reads milliseconds"),
     ([MS * 1000], "microseconds"), ([14], "no time in milliseconds"),
     ([MS, 0], "no time in milliseconds"), ([MS, 23], "not a part of them such as the hour")],
)  # fmt: skip
def test_times_of_another_unit_are_refused_in_every_way_in(tmp_path, values, said) -> None:
    rows = [{**ROW, "hour": value} for value in values]
    columns = {name: [row[name] for row in rows] for name in ROW}
    asks = (
        lambda: predict(rows),
        lambda: parse_predict({"inputs": columns}, specs(INPUTS), about(INPUTS)),
        lambda: build_array("hour", values, specs(INPUTS)["hour"], HOUR.to_json()),
        lambda: check_examples(examples(values), [HOUR.to_json()]),
    )
    for ask in asks:
        with pytest.raises((RequestError, RawValueError)) as refused:
            ask()
        assert str(refused.value).startswith("input hour holds")
        assert said in str(refused.value)
    with pytest.raises(InputDataError, match=said):
        read_file(tmp_path, rows)


def examples(values: list[int]) -> np.ndarray:
    texts = []
    for value in values:
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        features = tf.train.Features(feature={"hour": feature})
        texts.append(tf.train.Example(features=features).SerializeToString())
    return np.array(texts, object)


def test_inputs_may_have_the_names_of_the_source_s_columns(tmp_path) -> None:
    own = predict([ROW])
    named = {"ts": MS, "born_ms": ROW["born"], "user_id": "u1", "viewed": ["a", "b"],
             "ages": [1.0, 2.0]}  # fmt: skip
    columns = {"inputs": {name: [value] for name, value in named.items()}}
    for found in (predict([named]), predict([{**named, **ROW}]), read_file(tmp_path, [named]),
                  read_file(tmp_path, [{**named, **ROW}]),
                  parse_predict(columns, specs(INPUTS), about(INPUTS))[0]):  # fmt: skip
        assert found.keys() == own.keys()
        for name, values in own.items():
            assert found[name].tolist() == values.tolist()
    both = {**ROW, "user_id": "u2"}
    with pytest.raises(RawValueError, match=r"uid is made of .user_id., and both"):
        predict([both])
    with pytest.raises(InputDataError, match="'uid' is made of 'user_id', and both"):
        read_file(tmp_path, [ROW | {"user_id": "u1"}, both])


def test_null_is_the_empty_list(tmp_path) -> None:
    rows = [{**ROW, "viewed": None, "ages": None}, ROW]
    found = predict(rows)
    assert found["viewed"].tolist() == [[b"<pad>", b"<pad>"], [b"a", b"b"]]
    assert found["ages"].tolist() == [[0.0, 0.0], [1.0, 2.0]]
    assert predict(rows[:1])["ages"].tolist() == [[0.0]]
    of_file = read_file(tmp_path, rows)
    for name in ("viewed", "ages"):
        assert of_file[name].tolist() == found[name].tolist()
    fixed = replace(AGES, length=3)
    spec = tf.TensorSpec([None, 3], tf.float32)
    assert build_array("ages", [None], spec, fixed.to_json()).tolist() == [[0.0] * 3]
    per_item = tf.TensorSpec([None, None, None], tf.string)
    found = build_array("viewed", [[["a", "b"], None]], per_item, VIEWED.to_json())
    assert found.tolist() == [[[b"a", b"b"], [b"<pad>", b"<pad>"]]]


@pytest.mark.parametrize("values", [["x" * 20_000, *["a"] * 2000], [["x" * 20_000, *[1] * 2000]]])
def test_text_among_numbers_is_refused_before_it_takes_room(values) -> None:
    """An array of texts has the room of the longest one for each: 160 MB here."""
    spec = tf.TensorSpec([None] * np.ndim(values[0][:1]) + [None], tf.int64)
    tracemalloc.start()
    try:
        with pytest.raises(RawValueError, match="must be whole numbers"):
            build_array("count", values, spec)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_padding_is_bounded_by_the_values_of_a_request() -> None:
    rows = {"instances": [{"viewed": ["a"] * 90}, {"viewed": None}]}
    limits = RequestLimits(values=179)
    with pytest.raises((RequestError, RawValueError), match="with 2 rows more than 179 values"):
        parse_predict(rows, specs((VIEWED,)), about((VIEWED,)), limits)
    found, _ = parse_predict(rows, specs((VIEWED,)), about((VIEWED,)), RequestLimits(values=180))
    assert found["viewed"].shape == (2, 90)
