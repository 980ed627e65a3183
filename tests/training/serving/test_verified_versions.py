"""What is served is what was exported: files, `export.json` and SavedModel are of one export."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.artefacts.export import WARMUP_FILE, Give, seal_card
from conf.artefacts.run import write_json
from conf.errors import UpstreamNotReadyError
from tests.training.serving.tiny_models import PAD
from training.scoring.executor import RowSource
from training.scoring.plan import ScoringRequest, pack_model, plan_task, read_export
from training.serving.models.model_store import ModelStore
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
    task = plan_task(read_export(version), ScoringRequest(tmp_path / "out", Give.SCORES,
                                                          RowSource("rows")))  # fmt: skip
    pack_model(read_export(version), task, tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert set(archive.namelist()) == {
            name for name in files if not name.startswith("assets.extra")
        }


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


def test_a_version_is_what_its_card_says(models: Path, tmp_path: Path) -> None:
    version = tmp_path / "models" / "towers" / "1"
    shutil.copytree(models / "towers" / "1", version, ignore=shutil.ignore_patterns("index"))
    card = json.loads((version / "export.json").read_text())

    def set_input(**changed: object) -> dict:
        about = card["signatures"]["user_embedding"]
        inputs = [{**one, **changed} if one["name"] == "history" else one
                  for one in about["inputs"]]  # fmt: skip
        return {**card["signatures"], "user_embedding": {**about, "inputs": inputs}}

    signatures = {name: one for name, one in card["signatures"].items() if name != "top_k"}
    for changed, said in (
        ({"kind": "ranking"}, "kind ranking, and signatures of retrieval"),
        ({"signatures": signatures}, "signature top_k differs"),
        ({"signatures": set_input(dtype="string")}, "signature user_embedding differs"),
        ({"signatures": set_input(is_list=False)}, "signature user_embedding differs"),
        ({"signatures": set_input(name="h")}, "signature user_embedding differs"),
    ):
        write_json(version / "export.json", seal_card({**card, **changed}))
        assert said in refuse(tmp_path / "models")
    change(version / "users.parquet", -1)  # The letters by which Parquet is known.
    write_json(version / "export.json", card)
    assert "SHA-256" not in refuse(tmp_path / "models", verify=False)


def test_models_are_listed_while_one_is_added(models: Path) -> None:
    store = ModelStore(models)

    class Answering:
        @property
        def current(self) -> object:
            store._models["late"] = cast("Any", SimpleNamespace(current=None))
            return object()

    store._models = {"towers": cast("Any", Answering())}
    assert store.names == ["towers"]
