from __future__ import annotations

import pyarrow as pa
import pytest

from conf.operations import MultiHot, SparseIndices, Weights
from etl.encoders.bags import MultiHotEncoder, SparseIndicesEncoder, WeightsEncoder
from etl.encoders.lookup import build_lookup

FLOATS = pa.list_(pa.float32())


def weigh(weights, ids, max_len=None, scaled=False):
    columns = [pa.array(weights, FLOATS), pa.array(ids, pa.list_(pa.int64()))]
    return WeightsEncoder((pa.float32(),), Weights(scaled), max_len).encode(columns).to_pylist()


def test_multi_hot_marks_each_id_once():
    encoder = MultiHotEncoder(build_lookup(pa.array(["a", "b"])), MultiHot("v", 4), True)
    rows = encoder.encode([pa.array([["b", "b"], [], None, ["?", None, "a"]])]).to_pylist()
    assert rows == [[0, 0, 0, 1], [0, 0, 0, 0], None, [0, 1, 1, 0]]


def test_weights_stand_in_the_place_of_ones_and_repeats_are_added():
    tokens = build_lookup(pa.array(["a", "b"]))
    encoder = MultiHotEncoder(tokens, MultiHot("v", 4, True), True, pa.float32())
    weights = pa.array([[0.5, 2.0], [], None, [1.0, None, -3.0]], FLOATS)
    rows = encoder.encode([pa.array([["b", "b"], [], None, ["?", None, "a"]]), weights])
    assert rows.to_pylist() == [[0, 0, 0, 2.5], [0, 0, 0, 0], None, [0, 1.0, -3.0, 0]]
    with pytest.raises(pa.ArrowInvalid, match="row 0 has 2 weights for 1 ids"):
        encoder.encode([pa.array([["a"]]), weights[:1]])


def test_index_spaces_are_laid_one_behind_the_other():
    encoder = SparseIndicesEncoder(SparseIndices((10, 5)), max_len=3)
    columns = [pa.array([[0, 9], None, None]), pa.array([[4, 3], [5, -1, None], None])]
    assert encoder.encode(columns).to_pylist() == [[2, 11, 16], [1, 1, 1], None]


def test_weights_stand_beside_ids_and_missing_ones_are_zero():
    assert weigh([[0.5, None, 3.0], None], [[1, 2, 3], None], max_len=2) == [[0.5, 0.0], None]
    assert weigh([[1.0, 3.0], [0.0]], [[1, 2], [3]], scaled=True) == [[0.25, 0.75], [0.0]]


def test_a_weight_too_many_is_refused():
    with pytest.raises(pa.ArrowInvalid, match="row 1 has 2 weights for 1 ids"):
        weigh([[1.0], [1.0, 2.0]], [[1], [1]])
