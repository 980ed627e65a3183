"""Encoders of text on tensors: hashed n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from conf.encoders.text import Ngrams
from conf.schema import PAD_ID
from training.encoders.execution import RawValues, Resources, executions
from training.encoders.hashing import hash_text

_SEPARATORS = r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f]+"


@executions.declare(Ngrams)
def _ngrams(operation: Ngrams, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    text = tf.where(raw.is_null, tf.constant(""), raw.values)
    if operation.lower:
        text = tf.strings.lower(text)
    plain = tf.strings.strip(tf.strings.regex_replace(text, _SEPARATORS, " "))
    by_word = operation.unit == "word"
    units = tf.strings.split(plain, " ") if by_word else tf.strings.unicode_split(plain, "UTF-8")
    if by_word:
        units = tf.ragged.boolean_mask(units, tf.not_equal(units, ""))
    separator = " " if by_word else ""
    grams = [tf.strings.ngrams(units, size, separator=separator) for size in operation.sizes]
    ids = tf.ragged.map_flat_values(hash_text, tf.concat(grams, axis=1), operation.buckets)
    return ids.to_tensor(PAD_ID)
