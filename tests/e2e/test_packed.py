"""The same logs in both layouts: the same model, the same metrics, the same ranked lists."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.run import read_json, resolve_run
from etl.build import build_dataset
from jobs.cli import main
from tests.etl.logs import build_config, write_logs
from training.monitoring.run_logs import read_history

pytestmark = pytest.mark.slow

USERS, ITEMS, EVENTS = 60, 40, 14


def write_events(folder: Path) -> Path:
    """Users who keep to their own half of the items."""
    rng = np.random.default_rng(0)
    logs = write_logs(folder, [])
    users = [f"{u}::{'FM'[u % 2]}::g" for u in range(USERS)]
    items = [f"{i}::{'xy'[i % 2]}|z" for i in range(ITEMS)]
    (logs / "users.dat").write_text("\n".join(users) + "\n")
    (logs / "items.dat").write_text("\n".join(items) + "\n")
    rows = []
    for user in range(USERS):
        own = rng.permutation(np.arange(user % 2, ITEMS, 2))[:EVENTS]
        rows += [
            f"{user}::{item}::{rng.integers(1, 6)}::{100 * place + user}"
            for place, item in enumerate(own)
        ]
    (logs / "ratings.dat").write_text("\n".join(rows) + "\n")
    return logs


@pytest.fixture(scope="module")
def runs(spark, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Dataset version and run by layout."""
    found = {}
    logs = write_events(tmp_path_factory.mktemp("logs"))
    for layout in ("columns", "packed"):
        folder = tmp_path_factory.mktemp(layout)
        config = build_config(logs, folder / "datasets", joins=[
            {"source": "users", "column": "user"}, {"source": "items", "column": "item"},
        ])  # fmt: skip
        output = config.output.model_copy(update={"layout": layout})
        build_dataset(spark, config.model_copy(update={"output": output}))
        dataset = folder / "datasets" / "small"
        settings = (
            "model.name=dssm", "model.embedding_dim=8", "model.objective.positives=every_row",
            "input.batch_size=64", "fit.epochs=2",
            "name=run", "seed=5", f"root={folder / 'runs'}", "evaluation.ks=[10]",
        )  # fmt: skip
        arguments = [part for setting in settings for part in ("--set", setting)]
        assert main(["train", "--dataset", str(dataset), *arguments]) == 0
        series = folder / "runs" / "run"
        assert main(["evaluate", "--run", str(series)]) == 0
        assert main(["predict", "--run", str(series)]) == 0
        found[layout] = resolve_version(dataset), resolve_run(str(series))
    return found


@pytest.mark.exhaustive
def test_the_layouts_differ_and_the_packed_one_is_smaller(runs):
    manifests = {layout: read_manifest(version) for layout, (version, _) in runs.items()}
    assert {layout: manifest.layout for layout, manifest in manifests.items()} == {
        "columns": "columns",
        "packed": "packed",
    }
    sizes = {layout: manifest.split("train").bytes for layout, manifest in manifests.items()}
    assert sizes["packed"] < sizes["columns"]


@pytest.mark.exhaustive
def test_metrics_are_the_same(runs):
    columns, packed = (read_json(run / "metrics.json") for _, run in runs.values())
    assert packed["protocols"] == columns["protocols"]
    losses = [[epoch.loss for epoch in read_history(run)] for _, run in runs.values()]
    assert losses[0] == losses[1]


@pytest.mark.exhaustive
def test_ranked_lists_are_the_same(runs):
    columns, packed = (
        gzip.decompress((run / "recommendations.json.gz").read_bytes()) for _, run in runs.values()
    )
    assert packed == columns
