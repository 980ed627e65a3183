"""Exported models to serve: a ranking model, and a retrieval model with a drawn catalogue.

Nothing is trained: weights are first values, as an answer costs the same with them. The vectors of
the large catalogue, and of users to measure recall by, are drawn around common centers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import (
    EMBEDDINGS_DIR,
    EXPORT_FILE,
    ITEMS_FILE,
    USERS_FILE,
    ExportOptions,
    seal_card,
)
from conf.artefacts.export import list_files as hash_files
from conf.artefacts.run import read_json, write_json
from conf.schema import FIRST_TOKEN_ID
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.models.registry import build_model

USERS, KNOWN_ITEMS, FIRST_USER, FIRST_ITEM = 200, 600, 1000, 100
RANKER = {"kind": "ranking", "network": "deepfm", "embedding_dim": 16,
          "tasks": {"click": {"label": "label"}}}  # fmt: skip
CENTERS, SPREAD, CATEGORIES, DRAWN_USERS = 2000, 0.6, 40, 1000


def export_models(directory: Path, *, dim: int, items: int) -> None:
    """Exports `ranker` and, into folders of their own, the retrieval model.

    Args:
        directory: `ranker/` and `towers/` become directories of models.
        dim: Length of the vectors.
        items: Items of the drawn catalogue.
    """
    version = write_tiny_dataset(
        directory / "data", config=TinyConfig(users=USERS, items=KNOWN_ITEMS)
    )
    manifest = read_manifest(version)
    towers = {"name": "dssm", "user_hidden_units": [64], "embedding_dim": dim}
    for name, model in (("ranker", RANKER), ("towers", towers)):
        config = TrainConfig.model_validate({"dataset": "d", "name": name, "model": model})
        built = build_model(config.model, manifest, 3)
        run = directory / "runs" / name
        run.mkdir(parents=True)
        trained = TrainedModel(run, built, config, manifest, version)
        written = write_export(trained, ExportOptions(directory / name))
        if name == "towers":
            enlarge(written, items, dim)
    write_columns(directory / "columns.parquet", items)


def draw(count: int, dim: int, seed: int) -> NDArray[np.float32]:
    """Draws vectors around common centers, some of which are much more frequent than others."""
    centers = np.random.default_rng(7).standard_normal((CENTERS, dim), np.float32)
    weights = 1 / np.arange(1, CENTERS + 1) ** 0.5
    rng = np.random.default_rng(seed)
    chosen = rng.choice(CENTERS, count, p=weights / weights.sum())
    return centers[chosen] + np.float32(SPREAD) * rng.standard_normal((count, dim), np.float32)


def enlarge(version: Path, items: int, dim: int) -> None:
    """Gives an export a drawn catalogue, and drawn users by whom recall is measured."""
    embeddings = version / EMBEDDINGS_DIR
    keys = np.arange(FIRST_ITEM, FIRST_ITEM + items)
    _write_vectors(embeddings / ITEMS_FILE, keys, draw(items, dim, 1))
    users = np.arange(FIRST_USER, FIRST_USER + DRAWN_USERS)
    _write_vectors(embeddings / USERS_FILE, users, draw(DRAWN_USERS, dim, 2))
    for path in embeddings.glob("*.txt"):
        path.unlink()
    card = read_json(version / EXPORT_FILE)
    (version / EXPORT_FILE).unlink()
    files = hash_files(version)
    card["embeddings"]["items"]["rows"] = items
    write_json(version / EXPORT_FILE, seal_card({**card, "files": files}))


def _write_vectors(path: Path, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
    offsets = np.arange(0, vectors.size + 1, vectors.shape[1], dtype=np.int32)
    table = pa.table({
        "key": keys,
        "id": keys - keys[0] + FIRST_TOKEN_ID,
        "vector": pa.ListArray.from_arrays(offsets, vectors.ravel()),
    })  # fmt: skip
    pq.write_table(table, path, use_dictionary=False)


def write_columns(path: Path, items: int) -> None:
    """Writes a title and a category of each item; a category in 40 of falling size."""
    rng = np.random.default_rng(5)
    weights = 1 / np.arange(1, CATEGORIES + 1)
    chosen = rng.choice(CATEGORIES, items, p=weights / weights.sum())
    keys = np.arange(FIRST_ITEM, FIRST_ITEM + items)
    names = np.array([f"category_{n}" for n in range(CATEGORIES)])
    titles = pa.array([f"Item {key}" for key in keys])
    pq.write_table(pa.table({"key": keys, "title": titles, "category": names[chosen]}), path)


def build_ranking_row(card: dict[str, Any], user: int, candidates: int) -> dict[str, Any]:
    """Returns a row of `score_items`: a user of the dataset and items to score."""
    rng = np.random.default_rng(user)
    items = (FIRST_ITEM + rng.permutation(KNOWN_ITEMS)[:candidates]).tolist()
    row: dict[str, Any] = {}
    for item in card["signatures"]["score_items"]["inputs"]:
        if "means" in item:
            row[item["name"]] = items
        elif item["is_list"]:
            length = item["length"] or item["max_len"] or 8
            is_text = item["dtype"] == "string"
            row[item["name"]] = [item["pad_token"] if is_text else n for n in items[:length]]
        else:
            row[item["name"]] = FIRST_USER + user if item["dtype"] == "int64" else "F"
    return row
