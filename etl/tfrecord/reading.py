"""What training reads TFRecord files with: all that it imports of `etl`, and nothing else is here.

Records of a file, damage, decoders, rows of batches, checksums, and the compiler of kernels.
"""

from etl.tfrecord.codec.crc32c import crc32c, describe_file
from etl.tfrecord.codec.decode import Decoder, build_decoder
from etl.tfrecord.codec.framing import (
    FIX_CORRUPT,
    HEADER_BYTES,
    BadRange,
    CorruptRecordError,
    RecordBlock,
    detect_compression,
    read_record_blocks,
)
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.codec.kernels import inlined, kernel
from etl.tfrecord.codec.row_placement import RowWriter, allocate, join_steps, list_lengths
from etl.tfrecord.types.features import WireFeature

__all__ = [
    "FIX_CORRUPT",
    "HEADER_BYTES",
    "BadRange",
    "CorruptRecordError",
    "Decoder",
    "RecordBlock",
    "RowWriter",
    "WireFeature",
    "allocate",
    "build_decoder",
    "crc32c",
    "describe_file",
    "detect_compression",
    "infer_features",
    "inlined",
    "join_steps",
    "kernel",
    "list_lengths",
    "read_record_blocks",
]
