"""Which devices train."""

from __future__ import annotations

from pydantic import Field

from conf.training.base import Finite


class DevicesConfig(Finite):
    """All GPUs where there are any; else this many logical CPU devices."""

    cpu_replicas: int = Field(1, ge=1)
