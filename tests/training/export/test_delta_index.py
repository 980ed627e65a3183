"""A delta gives the next version an index like that of its base, or says what it lacks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from conf.artefacts.export import (
    EMBEDDINGS_DIR,
    INDEX_DIR,
    ExportOptions,
    IndexKind,
    IndexOptions,
    list_versions,
)
from conf.artefacts.run import read_json
from conf.errors import InputDataError
from conf.training.train import TrainConfig
from jobs.models import app as models_app
from jobs.support.run_app import run_app
from tests.training.tiny_dataset import write_tiny_dataset
from training.checkpoint.restore import load_run
from training.export.delta import apply_delta, find_base, write_delta
from training.export.saved_model import write_export
from training.fit import fit_run
from training.index.index_build import add_items, build_index
from training.index.item_columns import read_vectors
from training.monitoring.progress import TrainingProgress
from training.serving.model_store import ModelStore


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with one version, and what leads to the next."""
    root = tmp_path_factory.mktemp("delta_index")
    version = write_tiny_dataset(root / "data")
    runs: list[Path] = []
    for number in range(2):
        warm = {"path": str(runs[0]), "moments": "reset"} if runs else None
        config = TrainConfig.model_validate({
            "dataset": str(version), "name": f"m{number}", "root": str(root / "runs"),
            "model": {"name": "dssm", "embedding_dim": 4},
            "input": {"batch_size": 64, "shuffle_buffer": 300},
            "optimizer": {"learning_rate": 0.05},
            "fit": {"epochs": 1, "early_stopping": None, "warm_start": warm},
        })  # fmt: skip
        runs.append(fit_run(config, TrainingProgress()))
    write_export(load_run(runs[0]), ExportOptions(root / "models", "m"))
    last = load_run(runs[1])
    delta = write_delta(last, find_base(last, "start"), ExportOptions(root / "deltas", "m"))
    return root / "models" / "m", delta


@pytest.fixture
def served(trained: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "models" / "m"))


@pytest.fixture
def delta(trained: tuple[Path, Path]) -> Path:
    return trained[1]


def _index(model: Path, tmp_path: Path) -> Path:
    """Indexes version 1 by another kind, with columns and an item that was added."""
    items, new = tmp_path / "items.csv", tmp_path / "new.csv"
    lines = [f"{100 + i},film {i},k{i}\n" for i in range(20)]
    items.write_text("".join(["movie_id,title,key\n", *lines]))
    build_index(model / "1", IndexOptions(IndexKind.HNSW, items))
    new.write_text("movie_id,genres,title,key\n9000,genre_1|genre_all,a new film,k\n")
    return add_items(model / "1", new)[0]


def test_the_index_of_the_base_is_built_anew(
    delta: Path, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _index(served, tmp_path)
    assert run_app(models_app, ["apply", str(served), "--delta", str(delta)]) == 0
    assert "1 items that were added to the index of version 1" in capsys.readouterr().err
    version = served / "2"
    about = read_json(version / INDEX_DIR / "1" / "index.json")
    assert about["kind"] == "hnsw"
    items = pq.read_table(version / INDEX_DIR / "1" / "items.parquet")
    titles = dict(zip(items["key"].to_pylist(), items["column:title"].to_pylist(), strict=True))
    assert (titles[100], titles[119], titles[139]) == ("film 0", "film 19", None)
    assert 9000 not in titles
    assert items["column:key"].to_pylist().count("k19") == 1
    # It is an index of the new vectors: the server takes it, and finds what an exact search finds.
    old, new = (read_vectors(pq.read_table(served / n / EMBEDDINGS_DIR / "items.parquet"))
                for n in ("1", "2"))  # fmt: skip
    assert not np.allclose(old, new)
    store = ModelStore(served.parent)
    store.refresh()
    known = store.get("m").known
    assert (store.get("m").number, known.number) == (2, 1)
    user = new[3] + 0.5
    positions, _ = known.index.search(user, 5, np.ones(len(new), bool))
    assert positions.tolist() == np.argsort(-(new @ user), kind="stable")[:5].tolist()


def test_a_base_without_an_index_gives_none(delta: Path, served: Path) -> None:
    assert not (apply_delta(delta, served) / INDEX_DIR).exists()


def test_a_damaged_index_is_refused_and_the_model_is_as_it_was(
    delta: Path, served: Path, tmp_path: Path
) -> None:
    file = _index(served, tmp_path) / "items.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(InputDataError, match="is damaged"):
        apply_delta(delta, served)
    assert list_versions(served) == [1]


def test_without_faiss_it_is_said_what_builds_the_index(
    delta: Path, served: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    _index(served, tmp_path)
    monkeypatch.setitem(sys.modules, "faiss", None)
    for name in ("index_build", "vector_index"):
        monkeypatch.delitem(sys.modules, f"training.index.{name}")
    assert run_app(models_app, ["apply", str(served), "--delta", str(delta)]) == 0
    assert not (served / "2" / INDEX_DIR).exists()
    assert f"sluice index --export {served / '2'}" in capsys.readouterr().out
