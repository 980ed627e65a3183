"""Writes the golden files of this folder: by protobuf and TensorFlow alone, none of our code.

Run `python tests/contract/golden/generate.py` from the repository root; needed only when a file is
added. `test_codec_golden.py` says what they must hold.
"""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

FOLDER = Path(__file__).parent
INTS = [0, 1, -1, 127, 128, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 3.4028234663852886e38, 1e-45]
STRINGS = [b"", b"plain", "snow \u2603 \U0001f600".encode(), bytes(range(256))]
LONG_KEY = "k" * 200


def build_feature(kind: str, values: list) -> tf.train.Feature:
    feature = tf.train.Feature()
    target = getattr(feature, kind)
    target.SetInParent()
    target.value.extend(values)
    return feature


def build_features() -> dict[str, tf.train.Feature]:
    """Every kind, as one value, as several and as none, under plain and odd keys."""
    return {
        "i": build_feature("int64_list", [INTS[-1]]),
        "ints": build_feature("int64_list", INTS),
        "no_ints": build_feature("int64_list", []),
        "f": build_feature("float_list", [1.5]),
        "floats": build_feature("float_list", FLOATS),
        "no_floats": build_feature("float_list", []),
        "b": build_feature("bytes_list", [STRINGS[2]]),
        "strings": build_feature("bytes_list", STRINGS),
        "no_strings": build_feature("bytes_list", []),
        "": build_feature("int64_list", [7]),
        "\u043a\u043b\u044e\u0447": build_feature("int64_list", [8]),
        LONG_KEY: build_feature("float_list", [2.5]),
    }


def build_example() -> bytes:
    example = tf.train.Example()
    for key, feature in build_features().items():
        example.features.feature[key].CopyFrom(feature)
    return example.SerializeToString(deterministic=True)


def build_sequence() -> bytes:
    message = tf.train.SequenceExample()
    for key, feature in build_features().items():
        message.context.feature[key].CopyFrom(feature)
    lists = message.feature_lists.feature_list
    lists["sequence_ints"].feature.extend(
        [build_feature("int64_list", INTS), build_feature("int64_list", []),
         build_feature("int64_list", [5])])  # fmt: skip
    lists["sequence_strings"].feature.append(build_feature("bytes_list", STRINGS))
    lists["sequence_floats"].feature.append(build_feature("float_list", [0.25]))
    lists["sequence_empty"].SetInParent()
    return message.SerializeToString(deterministic=True)


def main() -> None:
    """Writes all files."""
    empty = tf.train.Example().SerializeToString()
    records = {
        "example": [build_example(), empty, build_example()],
        "sequence": [build_sequence(), empty],
        "bytearray": [*STRINGS, bytes(5000)],
    }
    for name, payloads in records.items():
        for compression in ("", "GZIP", "ZLIB") if name == "example" else ("",):
            suffix = f".{compression.lower()}" if compression else ""
            options = tf.io.TFRecordOptions(compression_type=compression)
            path = FOLDER / f"{name}.tfrecord{suffix}"
            with tf.io.TFRecordWriter(str(path), options) as writer:
                for payload in payloads:
                    writer.write(payload)


if __name__ == "__main__":
    main()
