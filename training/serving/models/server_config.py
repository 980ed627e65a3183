"""What a server serves, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from conf.paths import ReadablePath
from training.serving.requests.limits import ServerLimits

SHARED_COUNTS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that names the folder where processes keep their counts for each other. Prometheus reads
it when it is imported."""


@dataclass(frozen=True)
class RecommendConfig:
    """What answers `/v1/recommend`.

    Attributes:
        retrieval: Name of the retrieval model; None: the only one there is, if any.
        ranker: Name of the ranking model; None: the only one there is, if any.
        items_file: Titles and further columns of the items, the first one the key; None: those of
            the index.
        blocked_file: Keys of items that are never recommended, one a line.
        is_ranked: Whether a ranking model orders lists, where there is one.
    """

    retrieval: str | None = None
    ranker: str | None = None
    items_file: Path | None = None
    blocked_file: Path | None = None
    is_ranked: bool = True

    def find_name(self, kind: str) -> str | None:
        return self.retrieval if kind == "retrieval" else self.ranker


@dataclass(frozen=True)
class ServerConfig:
    """What is served.

    Attributes:
        directory: Directory of models, local or in an object store.
        poll_seconds: How often it is looked at for new versions and indexes.
        limits: What one request may cost.
        recommend: What answers `/v1/recommend`.
        verify: Whether the SHA-256 of each file of a version is compared before it is loaded.
        pages: Directory of what processes share; None: this one has all for itself.
    """

    directory: ReadablePath
    poll_seconds: float = 2.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    recommend: RecommendConfig = field(default_factory=RecommendConfig)
    verify: bool = True
    pages: Path | None = None
