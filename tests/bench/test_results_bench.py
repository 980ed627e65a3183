"""The page of results is what finished runs wrote, and README and presets quote nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.run import METRICS_FILE, RUN_CARD_FILE, write_json
from conf.load import load_config, override_config, preset_names
from conf.manifest import ShardInfo, SplitInfo
from conf.training.train import TrainConfig
from tests.bench.results import __main__ as command
from tests.bench.results.experiments import BY_NAME, Experiment, Metric, Published
from tests.bench.results.page import PAGE, render_page
from tests.bench.results.records import (
    Record,
    SeedResult,
    UnfinishedRunError,
    find_oldest_of_same_rows,
    format_figure,
    read_records,
    read_seed,
)
from tests.docs_site.preset_pages import read_presets
from tests.etl.built_versions import publish

ROOT = Path(__file__).parents[2]
ORIGIN = {"commit": "c" * 40, "processor": "a processor"}
EXPERIMENT = Experiment(
    "ml_1m_dssm", "ml-1m", "All ranked.", (Metric("HR@50", "hit_rate@50", "full_all"),), "A plan."
)


def test_the_page_is_made_from_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(read_records())


def test_every_preset_of_public_data_has_an_experiment() -> None:
    own_data = {"demo", "pairs", "sequences"}
    measured = {experiment.preset for experiment in BY_NAME.values()}
    assert measured == set(preset_names("training")) - own_data
    assert sorted(read_records()) == sorted(set(read_records()) & set(BY_NAME))


def test_records_of_the_same_rows_agree_on_popularity() -> None:
    figures: dict[tuple[str, str | None, str], dict[float, str]] = {}
    for name, record in read_records().items():
        for metric in BY_NAME[name].metrics:
            rows = (record.split_sha256, metric.protocol, metric.key)
            for seed in record.seeds:
                if metric.title in seed.popularity:
                    figures.setdefault(rows, {})[seed.popularity[metric.title]] = name
    differing = {rows: found for rows, found in figures.items() if len(found) > 1}
    assert not differing, f"one was measured by code that counted otherwise: {differing}"


def test_heads_of_presets_quote_no_figure() -> None:
    quoted = {
        preset.name: numbers
        for preset in read_presets()
        if preset.kind == "training"
        for numbers in [re.findall(r"\b0\.[0-9]{3,}", " ".join(preset.text))]
        if numbers
    }
    assert not quoted, f"take them out, docs/results.md has them: {quoted}"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_quotes_means_of_records(page: str) -> None:
    rows = re.findall(
        r"^\|([^|]*)\|([^|]*)\| `(sluice train [^`]+)` \|$", (ROOT / page).read_text("utf-8"), re.M
    )
    assert len(rows) >= 6
    by_command = {experiment.command: experiment for experiment in BY_NAME.values()}
    for what, figure, words in rows:
        experiment = by_command[words]
        record = read_records()[experiment.name]
        own, *published = re.split("[(\uff08]", figure.strip())
        figures = [format_figure(record, metric) for metric in experiment.metrics]
        assert own.strip() == " / ".join(figures), words
        assert " / ".join(metric.title for metric in experiment.metrics) in what, words
        best = [" / ".join(f"{f:.4f}" for f in row.figures) for row in experiment.best_published]
        assert re.findall(r"0\.[0-9]{4}(?: / 0\.[0-9]{4})*", "".join(published)) == best, words


def test_the_best_published_rows_are_behind_no_other_in_all_metrics() -> None:
    rows = [
        Published(str(figures), figures, "") for figures in ((0.7, 0.3), (0.8, 0.2), (0.6, 0.1))
    ]
    metrics = (Metric("AUC", "auc"), Metric("log loss", "log_loss"))
    ranked = replace(EXPERIMENT, metrics=metrics, published=tuple(rows))
    assert [row.figures for row in ranked.best_published] == [(0.8, 0.2), (0.6, 0.1)]
    half_known = replace(ranked, published=(*rows, Published("", (0.9, None), "")))
    assert [row.figures[0] for row in half_known.best_published] == [0.9, 0.8, 0.6]


def test_settings_beside_the_preset_name_runs_and_records() -> None:
    more = replace(EXPERIMENT, settings=("model.blocks=4",))
    assert (more.name, EXPERIMENT.name) == ("ml_1m_dssm_model_blocks_4", "ml_1m_dssm")
    assert more.command == "sluice train ml_1m_dssm --set model.blocks=4"


def test_runs_stay_on_the_version_that_they_began_on(tmp_path: Path) -> None:
    paths = DatasetPaths(tmp_path, "d")
    other_rows = (SplitInfo("train", (ShardInfo("train/part-0", 1, 16, "11111111"),)),)
    publish(paths, "20260101T000000000000Z-00000000", splits=other_rows)
    first, _ = (publish(paths, f"2026010{day}T000000000000Z-00000000") for day in (2, 3))
    assert find_oldest_of_same_rows(paths.base) == first.name


def write_run(run: Path, **training: Any) -> Path:
    """A run's card and figures, as training and evaluation leave them."""
    run.mkdir()
    spent = {"train_cpu_seconds": 61.2, "training_finished_at": "2026-11-26T11:14:40Z"}
    ended = {"best_epoch": 9, "epochs": 10, "stopped_early": False, "peak_memory_bytes": 10**9}
    card = {
        "status": training.pop("status", "trained"),
        "config": {"seed": 7, "fit": {"epochs": 10}},
        "timing": spent,
        "training": ended | training,
    }
    systems = {"model": {"hit_rate@50": 0.4868}, "popularity": {"hit_rate@50": 0.1035}}
    protocols = [{"name": "full_unseen", "systems": {}}, {"name": "full_all", "systems": systems}]
    write_json(run / RUN_CARD_FILE, card)
    write_json(
        run / METRICS_FILE, {"split": "test", "headline": "full_unseen", "protocols": protocols}
    )
    return run


def test_a_run_is_read_with_what_made_it(tmp_path: Path) -> None:
    result = read_seed(EXPERIMENT, write_run(tmp_path / "run"), ORIGIN)
    assert result.figures == {"HR@50": 0.4868}
    assert result.popularity == {"HR@50": 0.1035}
    assert (result.seed, result.epochs, result.best_epoch, result.cpu_seconds) == (7, 10, 9, 61)
    assert (result.commit, result.processor) == (ORIGIN["commit"], ORIGIN["processor"])
    assert result.finished_on == "2026-11-26"


def test_a_run_of_another_config_is_made_by_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_sluice", lambda *words: None)
    monkeypatch.setattr(command, "resolve_run", Path)
    monkeypatch.setattr(command, "read_seed", lambda experiment, run, origin: origin)
    preset = load_config(TrainConfig, "training", EXPERIMENT.preset)
    changed = override_config(preset, {"optimizer.learning_rate": 0.5}, "of the test")

    def train(config: TrainConfig, commit: str) -> dict[str, str]:
        monkeypatch.setattr(command, "load_config", lambda *names: config)
        return command._train(EXPERIMENT, tmp_path / "datasets" / "d", 7, {"commit": commit})

    assert train(preset, "a") == train(preset, "b") == {"commit": "a"}
    assert train(changed, "b") == {"commit": "b"}
    assert train(preset, "c") == {"commit": "a"}


@pytest.mark.parametrize(
    ("training", "message"),
    [({"status": "interrupted"}, "interrupted"), ({"epochs": 8}, "8 of 10 epochs")],
)
def test_a_run_that_was_stopped_by_hand_is_refused(
    tmp_path: Path, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnfinishedRunError, match=message):
        read_seed(EXPERIMENT, write_run(tmp_path / "run", **training), ORIGIN)


def test_patience_is_a_plan(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=8, stopped_early=True)
    assert read_seed(EXPERIMENT, run, ORIGIN).epochs == 8


def test_seeds_give_a_mean_and_a_deviation() -> None:
    def seed(number: int, value: float) -> SeedResult:
        figures = {"HR@50": value}
        return SeedResult(number, figures, {"HR@50": 0.1}, 10, 10, 10, 60, 10**9, "c" * 40, "p", "")

    metric = EXPERIMENT.metrics[0]
    several = Record("ml_1m_dssm", "d" * 64, (seed(1, 0.48), seed(2, 0.49), seed(3, 0.47)))
    assert format_figure(several, metric) == "0.4800 ± 0.0100"
    assert format_figure(Record("ml_1m_dssm", "d" * 64, (seed(1, 0.48),)), metric) == "0.4800"
    page = render_page({"ml_1m_dssm": several})
    assert "**0.4800 ± 0.0100**" in page
    assert "published: DeepMatch" in page
    assert "`ml_1m_hstu`" in page.split("Not measured")[1]
