"""The record codec: Arrow columns ⇄ bytes of `tf.train.Example`, compiled by numba."""


def warm_kernels() -> None:
    """Compiles, or loads from the cache, every kernel of the write and the read path.

    Compiling takes 15 to 30 seconds on one core, loading from the cache about half a second. Call
    it where the cache is filled once for many processes: at installation, when an image is built,
    or on the driver before local workers start.
    """
    import numpy as np
    import pyarrow as pa

    from etl.tfrecord.codec import decode, encode, framing, infer
    from etl.tfrecord.codec.crc32c import crc32c
    from etl.tfrecord.types.features import RECORD_TYPES

    crc32c(b"")
    framing.find_record(0, 0, True)
    for record_type in RECORD_TYPES:
        columns: dict[str, pa.Array] = {"b": pa.array([b"x"])}
        if record_type != "ByteArray":
            columns |= {"i": pa.array([1]), "l": pa.array([[1.0, 2.0]], pa.list_(pa.float32()))}
        data = encode.encode(pa.record_batch(columns), record_type)
        block = framing.RecordBlock(data, framing.index_records(data), 0, 0)
        collector = infer.FeatureCollector(record_type)
        collector.update(block)
        infer.count_feature_lists(block)
        decode.build_decoder(collector.features(), record_type).decode_block(block)
    one = np.zeros(1, np.int64)
    decode.RowWriter([one], [0]).write([pa.array([1])], one)
