"""What training reads TFRecord files with: all that it imports of `etl`, and nothing else is here.

Records of a file, damage, paths and URIs, copies of what lies in stores, decoders, rows of batches,
checksums, and the compiler of kernels.
"""

from conf.storage.lease import Lease, hold_lease, read_holder
from conf.storage.locations import Compression, FileOpener, find_path, is_remote
from conf.storage.working_copy import (
    WorkingCopy,
    describe_place,
    find_working_copy,
    find_working_path,
    move_folder,
    open_working_copy,
    remove_folder,
)
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.decode_columns import BadRecord
from etl.tfrecord.codec.decode_packed import PackedDecoder, has_slots, packed_features
from etl.tfrecord.codec.framing import (
    FIX_CORRUPT,
    HEADER_BYTES,
    BadRange,
    CorruptRecordError,
    RecordBlock,
    corrupt_record,
    read_record_blocks,
)
from etl.tfrecord.codec.kernels import inlined, kernel
from etl.tfrecord.codec.rows import RowWriter, allocate, join_steps, list_lengths
from etl.tfrecord.types.features import WireFeature

__all__ = [
    "FIX_CORRUPT",
    "HEADER_BYTES",
    "BadRange",
    "BadRecord",
    "Compression",
    "CorruptRecordError",
    "FileOpener",
    "Lease",
    "PackedDecoder",
    "RecordBlock",
    "RowWriter",
    "WireFeature",
    "WorkingCopy",
    "allocate",
    "build_decoder",
    "corrupt_record",
    "crc32c",
    "describe_place",
    "find_path",
    "find_working_copy",
    "find_working_path",
    "has_slots",
    "hold_lease",
    "inlined",
    "is_remote",
    "join_steps",
    "kernel",
    "list_lengths",
    "move_folder",
    "open_working_copy",
    "packed_features",
    "read_holder",
    "read_record_blocks",
    "remove_folder",
]
