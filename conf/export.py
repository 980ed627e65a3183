"""Paths of exported models, and what a version says of itself.

DIR/models.config     what `--model_config_file` of TensorFlow Serving reads
DIR/<model>/<n>/      a version, from 1 on; whole as soon as it has its name
    export.json       what it is, how to call it, checksums
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.atomic_output import list_numbered
from conf.errors import UpstreamNotReadyError
from conf.paths import check_entry_name
from conf.run import read_json

EXPORT_FILE = "export.json"
EXPORT_FORMAT_VERSION = 2
MODELS_CONFIG = "models.config"
WARMUP_FILE = "assets.extra/tf_serving_warmup_requests"
EMBEDDINGS_DIR = "embeddings"
TABLES_DIR = "tables"
USERS_FILE = "users.parquet"
ITEMS_FILE = "items.parquet"


@dataclass(frozen=True)
class ExportOptions:
    """Where an export goes.

    Attributes:
        directory: Directory of all models; None: `export/` of the run.
        name: Name of the model; None: that of the run's series.
        keep: Versions that are kept, the newest ones; None: all.
        k: Length of the lists of a retrieval model's default signature.
        tables: Whether every embedding table is written too.
    """

    directory: Path | None = None
    name: str | None = None
    keep: int | None = None
    k: int = 100
    tables: bool = False

    def __post_init__(self) -> None:
        """Refuses a name that could leave the directory.

        Raises:
            ConfigError: The name is not a plain file name.
        """
        if self.name is not None:
            check_entry_name("model", self.name)


def list_models(base: Path) -> list[Path]:
    """Returns the directories of models that have a version."""
    directories = sorted(path for path in base.iterdir() if path.is_dir())
    return [path for path in directories if list_versions(path)]


def list_versions(model: Path) -> list[int]:
    """Returns the versions of a model that are whole, ascending."""
    return [n for n in list_numbered(model) if (model / str(n) / EXPORT_FILE).is_file()]


def find_version(path: Path) -> Path:
    """Returns a version's directory.

    Args:
        path: One, or that of a model (its newest version), or that of a single model's directory.

    Raises:
        UpstreamNotReadyError: There is none.
    """
    if (path / EXPORT_FILE).is_file():
        return path
    if versions := list_versions(path):
        return path / str(versions[-1])
    models = list_models(path) if path.is_dir() else []
    if len(models) == 1:
        return find_version(models[0])
    raise UpstreamNotReadyError(
        "there is no exported model",
        received=str(path),
        allowed=", ".join(str(model) for model in models) or None,
        fix="name one of them" if models else "write one by `sluice export`",
    )


def read_card(version: Path) -> dict[str, Any]:
    """Reads `export.json` of a version.

    Raises:
        UpstreamNotReadyError: It is not there.
        InputDataError: It is damaged.
    """
    return read_json(version / EXPORT_FILE)
