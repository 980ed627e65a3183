from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.errors import ExitCode
from conf.run import read_json, resolve_run
from jobs.cli import run_app
from jobs.export import app


@pytest.mark.parametrize("model", ["dssm", "mf"])
def test_served_vectors_score_as_the_exported_ones(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.jobs.runs import write_tiny_run

    series = write_tiny_run(tmp_path, {"name": model})
    assert run_app(app, ["--run", str(series)]) == ExitCode.OK
    assert "40 items, 60 users" in capsys.readouterr().out
    run = resolve_run(str(series))
    card = read_json(run / "export" / "export.json")
    assert card["model"] == model
    assert read_json(run / "run_card.json")["timing"]["export_seconds"] > 0
    items = pq.read_table(run / "export" / "embeddings" / "items.parquet")
    tower = tf.saved_model.load(str(run / "export" / "item_tower" / "1"))
    raw = {"movie_id": tf.constant(items["key"].to_pylist(), tf.int64)}
    inputs = card["towers"]["item_tower"]["signatures"]["serving_default"]["inputs"]
    if "genres" in {item["name"] for item in inputs}:
        groups = [[f"genre_{(key - 100) % 4}", "genre_all" if (key - 100) % 3 == 0 else ""]
                  for key in items["key"].to_pylist()]
        raw["genres"] = tf.constant(groups)
    served = tower.signatures["serving_default"](**raw)["embedding"]
    np.testing.assert_allclose(served, items["vector"].to_pylist(), atol=1e-6)


def test_json_names_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.jobs.runs import write_tiny_run

    series = write_tiny_run(tmp_path, {"name": "mf"})
    assert run_app(app, ["--run", str(series), "--log-format", "json"]) == ExitCode.OK
    target = Path(json.loads(capsys.readouterr().out)["export"])
    assert (target / "user_tower" / "1" / "saved_model.pb").is_file()
