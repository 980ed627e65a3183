"""Wall time of a build's stages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger("sluice.build")


@dataclass
class StageClock:
    """Wall time of each stage, logged as it ends."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage."""
        logger.info("%s …", name)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
        logger.info("%s: %.1f s", name, self.seconds[name])
