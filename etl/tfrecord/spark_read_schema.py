"""Schema of a read: from the manifest where there is one, else inferred from a sample."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from pyspark.sql import types as spark_types

from conf.errors import InputDataError
from etl.tfrecord.decode import FeatureSurvey
from etl.tfrecord.features import WireFeature
from etl.tfrecord.framing import CorruptRecordError, RecordBlock, read_record_blocks
from etl.tfrecord.input_files import DataFile, Listing
from etl.tfrecord.lowering.description import read_description
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.spark_schema import to_spark_schema

BYTE_ARRAY_COLUMN = "byteArray"  # as the JVM connectors name it

_SAMPLE_FILES = 16
_SAMPLE_BLOCK_BYTES = 1 << 20


# Where a type's name in SQL differs from that in a schema's JSON form.
_JSON_NAMES = {"int": "integer", "bigint": "long", "smallint": "short", "tinyint": "byte"}


def parse_simple_type(name: str) -> spark_types.DataType:
    """Reads the simple name of an atomic Spark type; unlike Spark's parser, without a session."""
    return spark_types._parse_datatype_json_string(json.dumps(_JSON_NAMES.get(name, name)))


def resolve_record_type(options: ReadOptions, listing: Listing) -> str:
    """Record type as given, else the manifest's, else `Example`."""
    known = None if listing.committed is None else listing.committed.record_type
    return options.record_type or known or "Example"


def build_schema(options: ReadOptions, listing: Listing) -> spark_types.StructType:
    """Builds the schema of all that the files hold, partition columns last.

    Args:
        options: Options of the read.
        listing: Its files.

    Raises:
        InputDataError: A file is damaged, a feature is not of one kind, or nothing is there.
    """
    schema = _data_schema(options, listing)
    partitions = {name for name, _ in listing.partition_columns}
    fields = [field for field in schema.fields if field.name not in partitions]
    for name, simple_type in listing.partition_columns:
        fields.append(spark_types.StructField(name, parse_simple_type(simple_type)))
    return spark_types.StructType(fields)


def _data_schema(options: ReadOptions, listing: Listing) -> spark_types.StructType:
    record_type = resolve_record_type(options, listing)
    if record_type == "ByteArray":
        return spark_types.StructType().add(BYTE_ARRAY_COLUMN, spark_types.BinaryType())
    committed = listing.committed
    if committed is not None and committed.record_type == record_type:
        _, slots = read_description(committed.lowering)
        features: Sequence[WireFeature] = committed.features
    else:
        slots = {}
        features = infer_sample(listing.files, options, record_type)
    if not features:
        raise InputDataError(
            "no schema can be inferred: the files hold no feature",
            received=", ".join(options.paths),
            fix="give a schema: spark.read.schema(...)",
        )
    return to_spark_schema(features, slots)


def infer_sample(
    files: Sequence[DataFile], options: ReadOptions, record_type: str
) -> list[WireFeature]:
    """Infers features from the first records of some files, or from all records.

    Args:
        files: Files of the read.
        options: How many records to look at, and what to do at damage.
        record_type: `Example` or `SequenceExample`.

    Returns:
        Features in the order in which they first occur.

    Raises:
        CorruptRecordError: A file is damaged and the read is to fail there.
        InputDataError: A feature holds different kinds of values in different records.
    """
    survey = FeatureSurvey(record_type)
    chosen = [file for file in files if file.bytes]
    quota: int | None = None
    if options.infer_records is not None and chosen:
        step = np.linspace(0, len(chosen) - 1, min(_SAMPLE_FILES, len(chosen))).round()
        chosen = [chosen[int(k)] for k in step]
        quota = -(-options.infer_records // len(chosen))
    for file in chosen:
        _survey_file(survey, file, options, quota)
    return survey.features()


def _survey_file(
    survey: FeatureSurvey, file: DataFile, options: ReadOptions, quota: int | None
) -> None:
    is_lenient = options.on_corrupt != "fail"
    left = quota
    for block in read_record_blocks(
        file.path,
        compression=options.compression,
        block_bytes=_SAMPLE_BLOCK_BYTES,
        on_corrupt=_pass_over if is_lenient else None,  # what is read later tells of it
        opener=options.opener,
    ):
        sample = RecordBlock(block.data, block.index[:left], block.offset, block.first_record)
        try:
            survey.update(sample, file.path)
        except CorruptRecordError:
            if not is_lenient:
                raise
            _survey_one_by_one(survey, sample, file.path)
        if left is not None:
            left -= len(sample.index)
            if left <= 0:
                return


def _pass_over(bad: object) -> None:
    pass


def _survey_one_by_one(survey: FeatureSurvey, block: RecordBlock, name: str) -> None:
    for row in range(len(block.index)):
        one = RecordBlock(block.data, block.index[row : row + 1], block.offset, block.first_record)
        try:
            survey.update(one, name)
        except CorruptRecordError:
            continue
