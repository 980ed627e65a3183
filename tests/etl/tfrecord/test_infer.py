"""Features inferred from files that TensorFlow wrote."""

import pyarrow as pa
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from etl.tfrecord.decode import WireFeature, infer_features
from etl.tfrecord.writer import ShardWriter


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_inference_over_files(tmp_path, compression: str) -> None:
    def write(name: str, rows: list[dict]) -> str:
        path = str(tmp_path / name)
        options = tf.io.TFRecordOptions(compression_type=compression)
        with tf.io.TFRecordWriter(path, options) as writer:
            for row in rows:
                message = tf.train.Example()
                for key, (kind, values) in row.items():
                    target = getattr(message.features.feature[key], kind)
                    target.SetInParent()
                    target.value.extend(values)
                writer.write(message.SerializeToString())
        return path

    first = write("a", [{"x": ("int64_list", [1])}, {"y": ("float_list", [])}, {}])
    second = write("b", [{"x": ("int64_list", [1, 2]), "z": ("bytes_list", [b"q"])}])
    features = infer_features([first, second])
    assert set(features) == {
        WireFeature("x", "int64", True), WireFeature("y", "float32"), WireFeature("z", "bytes")
    }  # fmt: skip
    third = write("c", [{"x": ("bytes_list", [b"q"])}])
    with pytest.raises(InputDataError, match="different kinds"):
        infer_features([first, third])


def test_first_record_need_not_hold_every_feature(tmp_path) -> None:
    rows = 300
    columns = {
        f"c{k}": pa.array([None] * k + [1] * (rows - k), pa.int64()) for k in range(0, rows, 29)
    }
    batch = pa.record_batch(columns)
    with ShardWriter(tmp_path / "shard", batch.schema) as writer:
        writer.write(batch)
    assert [feature.name for feature in infer_features([tmp_path / "shard"])] == list(columns)
