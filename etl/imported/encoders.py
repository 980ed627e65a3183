"""The encoders of imported records: what moved ids stand for."""

from __future__ import annotations

from dataclasses import replace

from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    ColumnEncoding,
    EncoderPlan,
)
from conf.schema import FeatureSchema
from conf.storage.atomic_output import write_text_atomic
from etl.imported.ids import (
    write_vocabularies,
)
from etl.imported.survey import Survey


def write_encoders(survey: Survey, schema: FeatureSchema) -> EncoderPlan:
    """Writes how features come from the files' values: as they are, or by a vocabulary."""
    directory, config = survey.staging / ENCODERS_DIR, survey.features.config
    directory.mkdir()
    written = write_vocabularies(directory, config, schema.features, survey.counts)
    encodings = {
        feature.name: written[feature.table_name].name
        for feature in config.features
        if feature.offset
    }
    features = tuple(
        replace(spec, encoding=encodings.get(spec.name, spec.encoding)) for spec in schema.features
    )
    plan = EncoderPlan(
        FeatureSchema(features),
        tuple(ColumnEncoding(f.name, f.name, f.dtype, f.encoding) for f in features),
        vocabularies=tuple(written.values()),
    )
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    return plan
