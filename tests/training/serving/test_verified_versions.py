"""What is served is what was exported: files, `export.json` and SavedModel are of one export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conf.artefacts.export import WARMUP_FILE, seal_card
from conf.artefacts.run import write_json
from conf.errors import UpstreamNotReadyError
from tests.training.serving.tiny_models import PAD
from training.serving.models.served_version import ServedVersion
from training.serving.models.server_config import ServerConfig
from training.serving.server import Server


def refuse(models: Path, *, verify: bool = True) -> str:
    """Why no model of a directory is served."""
    with pytest.raises(UpstreamNotReadyError, match="no exported model") as caught:
        Server(ServerConfig(models, 60.0, verify=verify))
    return str(caught.value.received)


def change(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "file", ["users.parquet", "embeddings/items.parquet", "variables/variables.data-00000-of-00001"]
)
def test_a_version_with_a_changed_bit_is_not_served(
    models: Path, tmp_path: Path, file: str
) -> None:
    version = tmp_path / "models" / "towers" / "1"
    shutil.copytree(models / "towers" / "1", version)
    change(version / file, -20)
    assert f"{file}: SHA-256" in refuse(tmp_path / "models")


def test_files_that_the_card_does_not_list_are_not_used(models: Path, tmp_path: Path) -> None:
    """Users of another export beside a version that has none, and vectors of a ranking model's."""
    version = tmp_path / "models" / "scores" / "1"
    shutil.copytree(models / "scores" / "1", version)
    card = json.loads((version / "export.json").read_text())
    unlisted = ("users.parquet", "items.parquet", WARMUP_FILE)
    files = {name: info for name, info in card["files"].items() if name not in unlisted}
    write_json(version / "export.json", seal_card({**card, "files": files, "users": None}))
    (version / "embeddings").mkdir()
    vectors = models / "towers" / "1" / "embeddings" / "items.parquet"
    shutil.copy(vectors, version / "embeddings")
    (version / "variables" / "more").write_text("x")
    served = ServedVersion(version)
    assert (served.known, served.warm_up()) == (None, 0)


def test_a_card_with_a_change_is_not_served(models: Path, tmp_path: Path) -> None:
    version = tmp_path / "models" / "scores" / "1"
    shutil.copytree(models / "scores" / "1", version)
    text = (version / "export.json").read_text()
    for before, after in (
        ('"per": "candidate"', '"per": "candidat%"'),
        (f'"pad_token": {PAD}', f'"pad_token": {PAD + 1}'),
        ('"sha256": "', '"sha256": "0'),
        ('"rows": ', '"rows": 1'),
    ):
        assert before in text
        (version / "export.json").write_text(text.replace(before, after, 1))
        assert "export.json: what it says is not that of its fingerprint" in refuse(
            tmp_path / "models"
        )


def test_without_verification_sizes_alone_are_compared(models: Path, tmp_path: Path) -> None:
    version = tmp_path / "models" / "towers" / "1"
    shutil.copytree(models / "towers" / "1", version, ignore=shutil.ignore_patterns("index"))
    change(version / "users.parquet", -1)  # The letters by which Parquet is known.
    assert "SHA-256" not in refuse(tmp_path / "models", verify=False)
