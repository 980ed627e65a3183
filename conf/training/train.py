"""The whole config of `sluice train`: devices, precision, epochs, checkpoints, evaluation.

The parts of models, optimizers and input have files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from conf.config_base import OWN_CODE_PATTERN, PublishedRoot, StrictFinite, keep_apart
from conf.errors import ConfigError
from conf.metrics import OWN_PREFIX, build_stopping_pattern, register_metric
from conf.training.input import FilterConfig, InputConfig
from conf.training.models import DSSMConfig, ModelConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.trials import RefitConfig

StrategyKind = Literal["auto", "none", "mirrored", "multi_worker"]
PARAMETER_SERVER_FIX = (
    "set devices.strategy=multi_worker, and model.embeddings.TABLE={kind: dynamic, shard: workers} "
    "for each table that no machine holds: docs/guide/training-dynamic.md, 'Rows shared by workers'"
)


class DevicesConfig(StrictFinite):
    """The devices that compute a step, and the processes that they are spread over.

    Attributes:
        strategy: `auto`: all GPUs where there are any, else `cpu_replicas` logical CPU devices.
            `none`: one device. `mirrored`: as `auto`, by MirroredStrategy even on one device.
            `multi_worker`: the processes that `TF_CONFIG` names, each with all its GPUs or its
            CPU.
        worker_timeout_s: Seconds without a sign of life after which another process is taken for
            dead, and by which the processes may start apart.
        cpu_replicas: Logical CPU devices of one process where there is no GPU.
    """

    strategy: StrategyKind = "auto"
    cpu_replicas: int = Field(1, ge=1)
    worker_timeout_s: int = Field(60, ge=5)

    @field_validator("strategy", mode="before")
    @classmethod
    def _refuse_parameter_servers(cls, strategy: Any) -> Any:
        if strategy == "parameter_server":
            # Not a ValueError: then it is the whole message, of configs and of earlier runs.
            raise ConfigError(
                "devices.strategy=parameter_server is gone: its steps had no order",
                received="devices.strategy=parameter_server",
                allowed=", ".join(get_args(StrategyKind)),
                fix=PARAMETER_SERVER_FIX,
            )
        return strategy

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> DevicesConfig:
        if self.cpu_replicas > 1 and self.strategy not in ("auto", "mirrored"):
            raise ValueError(
                f"strategy {self.strategy} has one CPU device per process, and cpu_replicas is "
                f"{self.cpu_replicas}; leave cpu_replicas out, or use mirrored"
            )
        return self


class ComputeConfig(StrictFinite):
    """Computation of a step; weights and optimizer state are float32 in any case."""

    mixed_precision: bool = Field(False, description="Products of matrices in bfloat16.")
    tf32: bool = Field(
        False, description="On a GPU: products of float32 by tensor cores, with 10 bits of 23."
    )


METRIC_PATTERN = build_stopping_pattern()


class EarlyStoppingConfig(StrictFinite):
    """Stops when `patience` validations have brought no better metric; keeps the best weights."""

    metric: str | None = Field(
        None,
        pattern=METRIC_PATTERN,
        description="None: ndcg@10; of ranking models auc, or rmse, of the first task.",
    )
    patience: int = Field(
        3, ge=1, description="Validations without a better metric, after which training ends."
    )
    by: Literal["epochs", "steps"] = Field(
        "epochs", description="steps: the validations of fit.validation, not those of epochs."
    )


class CheckpointConfig(StrictFinite):
    """When the state of training is saved, beside the end of each epoch, and how much is kept."""

    at_start: bool = Field(False, description="Before the first step, too.")
    every_steps: int | None = Field(None, ge=1, description="Steps, counted over the whole run.")
    every_minutes: float | None = Field(
        None, gt=0, description="Saved at the end of the compiled loop that is running by then."
    )
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept, to resume from.")
    keep_best: int = Field(1, ge=1, description="Best epochs so far kept, the newest to use.")
    asynchronous: bool = Field(
        True, description="Write while training goes on, at the price of one copy of the state."
    )


class WarmStartConfig(StrictFinite):
    """Weights to begin with: of an earlier run, or, of single tables, of files."""

    path: str | None = Field(
        None, description="A run, a series of runs (its last finished one) or a checkpoint"
    )
    tables: dict[str, str] = Field(
        {},
        description="By a table's name, the file of its rows: Parquet, `.npz` or text.",
    )
    moments: Literal["reset", "transfer"] = Field(
        "reset", description="transfer: the optimizers' state, their step count included."
    )
    mismatched: Literal["refuse", "fresh"] = Field(
        "refuse", description="fresh: weights of another shape start as in a new run."
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> WarmStartConfig:
        if self.path is None and not self.tables:
            raise ValueError("nothing to start from: set `path`, `tables` or both")
        if self.path is None and self.moments == "transfer":
            raise ValueError("files hold no moments: leave `moments` out, or set `path`")
        return self


def _path_alone(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _read_switch(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


class StepValidationConfig(StrictFinite):
    """Validation between the ends of epochs."""

    every_steps: int = Field(ge=1, description="Steps, counted over the whole run.")
    batches: int | None = Field(
        None, ge=1, description="The first ones, of evaluation.batch_size rows; None: all."
    )


_GONE = ("histograms", "gradient_norms", "graph")


class FitConfig(StrictFinite):
    """Length of the training, and what is done between its steps."""

    epochs: int | None = Field(10, ge=1, description="None: max_steps alone ends training.")
    max_steps: int | None = Field(
        None, ge=1, description="Steps of the run; without epochs, as many epochs as they take."
    )
    validation: StepValidationConfig | None = None
    early_stopping: EarlyStoppingConfig | None = EarlyStoppingConfig()
    refit: Annotated[RefitConfig | None, BeforeValidator(_read_switch)] = Field(
        None,
        description="true, or a mapping: choose the epoch, and settings, on the rows that "
        "input.validation holds out, then train a fresh model on all rows for as many epochs.",
    )
    steps_per_loop: int = Field(64, ge=1, description="Steps inside one compiled loop.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    warm_start: Annotated[WarmStartConfig | None, BeforeValidator(_path_alone)] = None

    @model_validator(mode="before")
    @classmethod
    def _let_steps_end_it(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        # Cards of earlier runs name keys that are gone; they are off there.
        known = {name: value for name, value in values.items() if value or name not in _GONE}
        return known if known.get("max_steps") is None else {"epochs": None, **known}

    @model_validator(mode="after")
    def _check_length(self) -> FitConfig:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("nothing ends training: set epochs, max_steps or both")
        stopping = self.early_stopping
        if stopping is not None and stopping.by == "steps" and self.validation is None:
            raise ValueError(
                "early_stopping.by=steps needs validations between steps: set "
                "validation.every_steps, or early_stopping.by=epochs"
            )
        return self

    @model_validator(mode="after")
    def _check_refit(self) -> FitConfig:
        if self.refit is None:
            return self
        if self.max_steps is not None or self.epochs is None:
            raise ValueError(
                "refit trains on all rows for as many epochs as were best: set epochs, and leave "
                "max_steps out"
            )
        if self.early_stopping is None and not self.refit.space:
            raise ValueError(
                "refit has nothing to choose: early_stopping is null, so that the last epoch is "
                "kept, and refit.space is empty; set one of them"
            )
        if self.early_stopping is not None and self.early_stopping.by == "steps":
            raise ValueError("refit chooses an epoch: set early_stopping.by=epochs")
        return self

    def count_steps(self, steps_per_epoch: int) -> int:
        """Returns the steps of a run that nothing stops early."""
        ends = (self.max_steps, self.epochs and self.epochs * steps_per_epoch)
        return min(end for end in ends if end is not None)


class OwnMetricConfig(StrictFinite):
    """A metric of one's own in NumPy: a number of all rows of a task, or of each ranked row."""

    function: str = Field(
        pattern=OWN_CODE_PATTERN,
        description="`package.module:function` of one's own: of `(labels, scores)`, or, of "
        "retrieval models, of `(ranks, k)`.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the function."
    )
    direction: Literal["higher", "lower"] = Field("higher", description="Which way it is better.")

    @field_validator("params")
    @classmethod
    def _keep_weights_apart(cls, params: dict[str, Any]) -> dict[str, Any]:
        return keep_apart(params, "weights")


class EvaluationConfig(StrictFinite):
    """Protocols; the full catalogue is always ranked."""

    ks: tuple[int, ...] = Field((1, 5, 10, 20, 50), description="Cut-offs of the lists.")
    per: tuple[Literal["event", "user"], ...] | None = Field(
        None,
        min_length=1,
        description="A row per event, or per user with all held-out items; the first is the "
        "headline. None: events, and users where some have several events in the split.",
    )
    slices: tuple[str, ...] | None = Field(
        None,
        description="user_frequency, item_frequency, or features with few values; None: both "
        "frequencies, as far as train counts them.",
    )
    mask_seen: bool = Field(True, description="Leave out items that the user has met.")
    sampled_negatives: int | None = Field(
        99,
        ge=1,
        description="Items that a target is ranked among in the sampled protocol; None: no "
        "such protocol.",
    )
    filter: tuple[FilterConfig, ...] = Field(
        (), description="Metrics are of the rows that pass all of these alone, in validation too."
    )
    batch_size: int = Field(1024, ge=1, description="Rows that are scored at a time.")
    metrics: dict[Annotated[str, Field(pattern=rf"^{OWN_PREFIX}\w+$")], OwnMetricConfig] = Field(
        default_factory=dict,
        description="Metrics of one's own, by a name that begins with `own_`: of a ranking "
        "model's tasks, or of the ranks of a retrieval model at each of `ks`.",
    )

    @field_validator("metrics")
    @classmethod
    def _register(cls, metrics: dict[str, OwnMetricConfig]) -> dict[str, OwnMetricConfig]:
        for name, metric in metrics.items():
            register_metric(name, metric.direction)
        return metrics

    @field_validator("per", "slices", mode="before")
    @classmethod
    def _one_or_several(cls, names: Any) -> Any:
        if names == "both":
            raise ValueError("both are the list [event, user]; the first is the headline")
        return (names,) if isinstance(names, str) else names

    @field_validator("ks")
    @classmethod
    def _sorted_positive(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if not ks or min(ks) < 1:
            raise ValueError("cut-offs must be 1 or more")
        return tuple(sorted(set(ks)))


class PredictConfig(StrictFinite):
    """Ranked lists per user."""

    k: int = Field(20, ge=1, description="Length of the lists.")
    mask_seen: bool = Field(True, description="Leave out items that the user has met.")
    task: str | None = Field(None, description="Of a ranking model: what ranks; None: the first.")


class MlflowConfig(StrictFinite):
    """An MLflow tracking server that gets the run's params, metrics and artefacts as it trains."""

    tracking_uri: str | None = Field(
        None, description="Address of the server; None: what MLflow's own settings name."
    )


_STEP_RANGE_PATTERN = re.compile(r"([0-9]+):([0-9]+)")
_STEP_RANGE_ALLOWED = "FROM:TO, whole numbers, FROM less than TO, such as 100:120"


@dataclass(frozen=True)
class StepRange:
    """Steps of a run, counted over all epochs.

    Attributes:
        start: Steps that are done when the range begins.
        end: Steps that are done when it ends.
    """

    start: int
    end: int

    def require_within(self, steps: int) -> None:
        """Refuses a range that a run of so many steps does not reach.

        Raises:
            ConfigError: The range ends after the run.
        """
        if self.end > steps:
            raise ConfigError(
                "--profile names steps that the run does not have",
                received=f"{self.start}:{self.end}",
                allowed=f"0 to {steps}",
                fix="name earlier steps, or raise fit.epochs",
            )


def parse_step_range(text: str) -> StepRange:
    """Reads `FROM:TO`.

    Raises:
        ConfigError: It is not two whole numbers, or the range is empty.
    """
    match = _STEP_RANGE_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            "--profile must name two steps", received=text, allowed=_STEP_RANGE_ALLOWED
        )
    start, end = map(int, match.groups())
    if start >= end:
        raise ConfigError(
            "the range of --profile is empty", received=text, allowed=_STEP_RANGE_ALLOWED
        )
    return StepRange(start, end)


class TrainConfig(StrictFinite):
    """Everything that `sluice train` needs."""

    dataset: str = Field(description="Dataset directory or URI, or one version's.")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the run.")
    root: PublishedRoot = Field("work/runs", description="Folder of runs, on a file system.")
    seed: int = Field(
        42, ge=0, lt=2**31, description="Seed of first weights, order of rows and draws."
    )
    model: ModelConfig = Field(
        DSSMConfig(), description="What is trained: a retrieval model by name, or a ranking model."
    )
    input: InputConfig = InputConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    fit: FitConfig = FitConfig()
    devices: DevicesConfig = DevicesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    predict: PredictConfig = PredictConfig()
    mlflow: Annotated[MlflowConfig | None, BeforeValidator(_read_switch)] = None

    @model_validator(mode="after")
    def _check_workers(self) -> TrainConfig:
        if self.devices.strategy == "multi_worker" and self.input.bucket_boundaries:
            raise ValueError(
                "devices.strategy=multi_worker needs lists of one length in all batches, and "
                "input.bucket_boundaries gives them several; leave bucket_boundaries out"
            )
        return self

    @model_validator(mode="after")
    def _check_refit(self) -> TrainConfig:
        if self.fit.refit is None:
            return self
        if self.input.validation is None:
            raise ValueError(
                "fit.refit chooses on rows of train that are held out, and then trains on them "
                "too: say which by input.validation, such as {hash_of: [USER, ITEM], share: 0.1}. "
                "A split `validation` of the dataset stays apart"
            )
        if getattr(self.model, "calibration", None) is not None:
            raise ValueError(
                "model.calibration is fitted to rows that do not train, and fit.refit trains on "
                "all of them in the end; leave one of them out"
            )
        if self.devices.strategy == "multi_worker":
            raise ValueError(
                "fit.refit trains several runs in one process, and devices.strategy=multi_worker "
                "spreads one over several; set auto, none or mirrored, or leave fit.refit out"
            )
        return self

    @model_validator(mode="after")
    def _check_dynamic_tables(self) -> TrainConfig:
        tables = {n: t for n, t in self.model.embeddings.items() if t.kind == "dynamic"}
        _check_sharded_tables(self, [name for name, table in tables.items() if table.shard])
        tiers = [name for name, table in tables.items() if table.device_rows]
        if tiers and self.devices.strategy == "multi_worker":
            raise ValueError(
                f"model.embeddings.{tiers[0]}.device_rows: rows in two tiers are trained in one "
                "process; set devices.strategy to auto, none or mirrored, or leave it out"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")


def _check_sharded_tables(config: TrainConfig, names: Sequence[str]) -> None:
    """Refuses tables whose rows workers share where there are none, or no place to meet.

    Raises:
        ValueError: There is such a table, and something does not fit.
    """
    if not names:
        return
    key = f"model.embeddings.{names[0]}.shard"
    if config.devices.strategy != "multi_worker":
        raise ValueError(
            f"{key}=workers deals rows out to the processes of devices.strategy=multi_worker, and "
            f"the strategy is {config.devices.strategy}; leave `shard` out, or set "
            "devices.strategy=multi_worker"
        )
    if "://" in config.root:
        raise ValueError(
            f"{key}=workers has each process write its rows into the run, and the root "
            f"{config.root} is a store, which each would write a copy of; set root to a directory "
            "that all processes see"
        )
    warm = config.fit.warm_start
    if warm is not None and warm.tables:
        raise ValueError(
            f"{key}=workers takes no rows from files (fit.warm_start.tables); start from a run by "
            "fit.warm_start.path, or leave `shard` out"
        )
