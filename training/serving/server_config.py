"""What a server serves, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from conf.paths import ReadablePath
from training.serving.limits import ServerLimits

SHARED_COUNTS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that names the folder where processes keep their counts for each other. Prometheus reads
it when it is imported."""


@dataclass(frozen=True)
class RecommendConfig:
    """What answers `/v1/recommend`."""

    retrieval: str | None = None  # Name of the model that retrieves; None: the only one, if any.
    ranker: str | None = None  # Name of the model that ranks; None: the only one, if any.
    items_file: Path | None = None  # Columns of the items, the first one the key.
    blocked_file: Path | None = None  # Keys of items that are never recommended, one a line.
    is_ranked: bool = True  # Whether a ranking model orders lists, where there is one.


@dataclass(frozen=True)
class ServerConfig:
    """What is served."""

    directory: ReadablePath  # Of models, local or in an object store.
    poll_seconds: float = 2.0  # Between looks for new versions and indexes.
    limits: ServerLimits = field(default_factory=ServerLimits)
    recommend: RecommendConfig = field(default_factory=RecommendConfig)
    verify: bool = True  # Whether the SHA-256 of each file of a version is compared.
    pages: Path | None = None  # Directory of what processes share; None: this one has all.
