"""Configs of `sluice train`, and of the evaluation, export and prediction that follow it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from conf.roots import PublishedRoot
from conf.training.base import Finite
from conf.training.compute import ComputeConfig
from conf.training.devices import DevicesConfig
from conf.training.embeddings import DynamicTableConfig, StaticTableConfig, TableConfig
from conf.training.evaluation import EvaluationConfig, PredictConfig
from conf.training.fit import (
    METRIC_PATTERN,
    CheckpointConfig,
    EarlyStoppingConfig,
    FitConfig,
    HistogramsConfig,
    WarmStartConfig,
)
from conf.training.input import InputConfig
from conf.training.models import (
    BinaryConfig,
    DSSMConfig,
    MFConfig,
    ModelConfig,
    ObjectiveConfig,
    SampledSoftmaxConfig,
)
from conf.training.optimizer import (
    DenseOptimizerConfig,
    OptimizerConfig,
    SparseAdagradConfig,
    SparseAdamConfig,
    SparseFTRLConfig,
    SparseOptimizerConfig,
    SparseSGDConfig,
)
from conf.training.schedule import (
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    PolynomialSchedule,
    ScheduleConfig,
)

__all__ = [
    "METRIC_PATTERN",
    "BinaryConfig",
    "CheckpointConfig",
    "ComputeConfig",
    "ConstantSchedule",
    "CosineSchedule",
    "DSSMConfig",
    "DenseOptimizerConfig",
    "DevicesConfig",
    "DynamicTableConfig",
    "EarlyStoppingConfig",
    "EvaluationConfig",
    "ExponentialSchedule",
    "FitConfig",
    "HistogramsConfig",
    "InputConfig",
    "InverseSqrtSchedule",
    "LinearSchedule",
    "MFConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PolynomialSchedule",
    "PredictConfig",
    "SampledSoftmaxConfig",
    "ScheduleConfig",
    "SparseAdagradConfig",
    "SparseAdamConfig",
    "SparseFTRLConfig",
    "SparseOptimizerConfig",
    "SparseSGDConfig",
    "StaticTableConfig",
    "TableConfig",
    "TrainConfig",
    "WarmStartConfig",
]


class TrainConfig(Finite):
    """Everything that `sluice train` needs."""

    dataset: str = Field(description="Dataset directory or URI, or one version's.")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the run.")
    root: PublishedRoot = "work/runs"
    seed: int = Field(42, ge=0, lt=2**31)
    model: ModelConfig = DSSMConfig()
    input: InputConfig = InputConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    fit: FitConfig = FitConfig()
    devices: DevicesConfig = DevicesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    predict: PredictConfig = PredictConfig()

    @model_validator(mode="after")
    def _check_workers(self) -> TrainConfig:
        if self.devices.strategy == "multi_worker" and self.input.bucket_boundaries:
            raise ValueError(
                "devices.strategy=multi_worker needs lists of one length in all batches, and "
                "input.bucket_boundaries gives them several; leave bucket_boundaries out"
            )
        return self

    @model_validator(mode="after")
    def _check_parameter_servers(self) -> TrainConfig:
        if self.devices.strategy != "parameter_server":
            return self
        if self.compute.xla:
            raise ValueError(
                "compute.xla compiles steps on one device, and devices.strategy=parameter_server "
                "has the variables on others; set compute.xla=false"
            )
        if self.compute.mixed_precision and self.compute.half_dtype != "bfloat16":
            raise ValueError(
                "devices.strategy=parameter_server computes in float32 or bfloat16: steps that "
                "wait for nobody cannot agree on the loss scale of float16; set "
                "compute.half_dtype=bfloat16, or compute.mixed_precision=false"
            )
        return self

    @model_validator(mode="after")
    def _check_dynamic_tables(self) -> TrainConfig:
        tables = [name for name, t in self.model.embeddings.items() if t.kind == "dynamic"]
        if tables and self.devices.strategy in ("multi_worker", "parameter_server"):
            raise ValueError(
                f"devices.strategy={self.devices.strategy} trains in several processes, and "
                f"dynamic tables (model.embeddings.{tables[0]}) are trained in one; set "
                "devices.strategy to auto, none or mirrored"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")
