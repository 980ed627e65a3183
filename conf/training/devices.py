"""Which devices train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.training.base import Finite

StrategyKind = Literal["auto", "none", "mirrored", "multi_worker", "parameter_server"]


class DevicesConfig(Finite):
    """Which devices compute a step, and how many processes they are spread over.

    Attributes:
        strategy: `auto`: all GPUs where there are any, else `cpu_replicas` logical CPU devices.
            `none`: one device. `mirrored`: as `auto`, by MirroredStrategy even on one device.
            `multi_worker`: the processes that `TF_CONFIG` names, each with all its GPUs or its
            CPU. `parameter_server`: workers, each with one GPU or its CPU, that update the
            variables on parameter servers without waiting for each other.
        worker_timeout_s: Seconds without a sign of life after which another process is taken for
            dead, and by which the processes may start apart.
        cpu_replicas: Logical CPU devices of one process where there is no GPU.
    """

    strategy: StrategyKind = "auto"
    cpu_replicas: int = Field(1, ge=1)
    worker_timeout_s: int = Field(60, ge=5)

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> DevicesConfig:
        if self.cpu_replicas > 1 and self.strategy not in ("auto", "mirrored"):
            raise ValueError(
                f"strategy {self.strategy} has one CPU device per process, and cpu_replicas is "
                f"{self.cpu_replicas}; leave cpu_replicas out, or use mirrored"
            )
        return self
