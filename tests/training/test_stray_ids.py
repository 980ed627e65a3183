from __future__ import annotations

import pytest
import tensorflow as tf

from conf.manifest import Manifest
from training.stray_ids import find_stray_id

FEATURES = ["user_id", "history", "label"]


@pytest.mark.parametrize("bad", [-1, 62, 10**12])  # 60 users, padding, OOV
def test_the_first_id_beyond_the_vocabulary_is_named(bad: int, tiny_manifest: Manifest) -> None:
    assert tiny_manifest.schema["user_id"].vocabulary_size == 62
    good = {
        "user_id": tf.constant([0, 61], tf.int64),
        "history": tf.ragged.constant([[2, 3], []], dtype=tf.int64),
        "label": tf.constant([99.0, -5.0]),
    }
    assert find_stray_id([good, good], tiny_manifest, FEATURES) is None
    stray = {**good, "user_id": tf.constant([5, bad], tf.int64)}
    error = find_stray_id([good, stray], tiny_manifest, FEATURES)
    assert error is not None
    assert "'user_id'" in error.what
    assert str(error.received).startswith(str(bad))
    assert error.allowed == "0 to 61"


def test_lists_are_looked_at_too(tiny_manifest: Manifest) -> None:
    for lists in (tf.ragged.constant([[2], [-7]], dtype=tf.int64), tf.constant([[2, 0], [-7, 0]])):
        error = find_stray_id([{"history": lists}], tiny_manifest, FEATURES)
        assert error is not None
        assert "'history'" in error.what
