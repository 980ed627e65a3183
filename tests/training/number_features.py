"""An untrained ranking model that reads numbers: scalars of both widths, a list, one unscaled."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from conf.artefacts.dataset import read_manifest
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.numbers import Normalize
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.models.registry import build_model

NAN, INF = math.nan, math.inf
BAD = [NAN, INF, -INF, 1e39, -1e39]
MODEL = {"kind": "ranking", "network": "mmoe", "embedding_dim": 4, "embedding_stddev": 1.0,
         "params": {"experts": 2, "hidden_units": [4]},
         "features": ["user_id", "movie_id", "price", "cost", "plain", "tastes"],
         "pooling": {"tastes": {"combiner": "mean"}},
         "tasks": {"click": {"label": "label"},
                   "like": {"label": "label", "objective": "squared_error"}}}  # fmt: skip
ROW = {"user_id": 1003, "movie_id": 107, "price": 2.5, "cost": -1.0, "plain": 0.5,
       "tastes": [0.5, 1.5]}  # fmt: skip


def add_numbers(version: Path) -> None:
    """Adds features of numbers to a version, without values in its records."""
    file = version / "encoders" / "encoders.json"
    plan = EncoderPlan.from_json(json.loads(file.read_text()))
    specs, columns = list(plan.schema.features), list(plan.columns)
    for name, raw, is_list in (("price", "float32", False), ("cost", "float64", False),
                               ("tastes", "float32", True)):  # fmt: skip
        shape, max_len = ((None,), 4) if is_list else ((), None)
        specs.append(FeatureSpec(name, "float32", "context", shape, max_len, f"normalize:{name}",
                                 pad_value=0.0))  # fmt: skip
        inputs = (RawColumn(name, raw, is_list),)
        scaled = Normalize(center=1.0, factor=0.5)
        columns.append(ColumnEncoding(name, name, raw, f"normalize:{name}", scaled, inputs))
    specs.append(FeatureSpec("plain", "float32", "context"))
    columns.append(ColumnEncoding("plain", "plain", "float32"))
    schema = FeatureSchema(tuple(specs))
    plan = replace(plan, schema=schema, columns=tuple(columns))
    manifest = replace(read_manifest(version), schema=schema, encoder_files=(),
                       encoders_fingerprint=plan.fingerprint)  # fmt: skip
    file.write_text(plan.dumps())
    (version / "manifest.json").write_text(manifest.dumps())


def build_number_model(root: Path) -> TrainedModel:
    """Writes a tiny version and returns a model over features of numbers, which no record holds."""
    version = write_tiny_dataset(root / "data", config=TinyConfig(items=12))
    add_numbers(version)
    manifest = read_manifest(version)
    config = TrainConfig.model_validate({"dataset": "d", "name": "numbers", "model": MODEL})
    model = build_model(config.model, manifest, 3)
    return TrainedModel(root / "run", model, config, manifest, version)
