"""The page of results is what finished runs wrote, and README and presets quote nothing else."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.run import (
    METRICS_FILE,
    RUN_CARD_FILE,
    STATUS_INTERRUPTED,
    STATUS_TRAINED,
    resolve_run,
    update_run_card,
    write_json,
)
from conf.load import load_config, preset_names
from conf.manifest import ShardInfo, SplitInfo
from conf.training.train import TrainConfig
from tests.bench.results import __main__ as command
from tests.bench.results import records
from tests.bench.results.experiments import BY_NAME, Experiment, Metric, Published
from tests.bench.results.page import PAGE, render_page
from tests.bench.results.records import (
    Record,
    RefusedError,
    SeedResult,
    UnfinishedRunError,
    digest_setup,
    find_oldest_of_same_rows,
    format_figure,
    read_records,
    read_seed,
    write_record,
)
from tests.docs_site.preset_pages import read_presets
from tests.etl.built_versions import publish
from training.checkpoint.restore import manifest_sha256
from training.monitoring.progress import TrainingProgress
from training.reader.training_data import read_current_data
from training.run_directory import (
    choose_start,
    config_sha256,
    create_run,
    publish_run,
)

ROOT = Path(__file__).parents[2]
ORIGIN = {"commit": "c" * 40, "processor": "a processor"}
EXPERIMENT = Experiment(
    "ml_1m_dssm", "ml-1m", "All ranked.", (Metric("HR@50", "hit_rate@50", "full_all"),), "A plan."
)
OTHER_ROWS = (SplitInfo("train", (ShardInfo("train/part-0", 1, 16, "11111111"),)),)


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
    publish(paths, "20260101T000000000000Z-00000000", splits=OTHER_ROWS)
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


class Command:
    """The command of results, without the steps of training: `sluice train --once` only begins."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dataset = DatasetPaths(folder / "datasets", "d")
        self.is_killed = False
        publish(self.dataset, "20260101T000000000000Z-00000000")
        monkeypatch.setattr(command, "_sluice", self._sluice)
        monkeypatch.setattr(command, "read_seed", lambda experiment, run, origin: origin)

    def train(self, commit: str, *changed: str, processor: str = "p") -> tuple[str, str]:
        """Commit and machine of the run, trained with some settings of the preset changed."""
        settings = (*command._plan(EXPERIMENT, self.dataset.base, 7).settings, *changed)
        config = load_config(TrainConfig, "training", EXPERIMENT.preset, settings)
        file = command.note_origin(config, {"commit": commit, "processor": processor})
        origin: Any = command._train(EXPERIMENT, command._Plan(settings, config), file)
        return origin["commit"], origin["processor"]

    def train_by_hand(self) -> Path:
        config = command._plan(EXPERIMENT, self.dataset.base, 7).config
        return self._end(config, create_run(config))

    @property
    def series(self) -> Path:
        return self.dataset.base.parents[1] / "runs" / f"{EXPERIMENT.name}_seed7"

    def kill(self, commit: str) -> None:
        self.is_killed = True
        with pytest.raises(SystemExit):
            self.train(commit)
        self.is_killed = False

    def _sluice(self, job: str, *words: str) -> None:
        if job != "train":
            return
        settings = [word for flag, word in pairwise(words) if flag == "--set"]
        config = load_config(TrainConfig, "training", words[0], settings)
        alone: Any = SimpleNamespace(count=1)
        start = choose_start(config, TrainingProgress(), alone, once=True)
        run = start.finished or self._end(config, start.unfinished or create_run(config))
        publish_run(config, run)

    def _end(self, config: TrainConfig, run: Path) -> Path:
        data = read_current_data(config)
        status = STATUS_INTERRUPTED if self.is_killed else STATUS_TRAINED
        read = {"path": str(data.version_dir), "manifest_sha256": manifest_sha256(data.manifest)}
        made = {"config": config.resolved(), "config_sha256": config_sha256(config)}
        update_run_card(run, status=status, dataset=read, **made)
        if self.is_killed:
            sys.exit(2)
        return run


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch)


def test_a_run_of_another_config_is_made_by_another_commit(results: Command) -> None:
    other = "optimizer.learning_rate=0.5"
    assert results.train("a") == results.train("b", processor="q") == ("a", "p")
    assert results.train("b", other) == ("b", "p")
    assert results.train("c") == ("a", "p")
    assert results.train("c", other) == ("b", "p")


def test_a_run_of_other_rows_is_made_by_another_commit(results: Command) -> None:
    first = results.dataset.current.read_text()
    assert results.train("a") == ("a", "p")
    publish(results.dataset, "20260102T000000000000Z-00000000", splits=OTHER_ROWS)
    assert results.train("b") == results.train("c") == ("b", "p")
    shutil.rmtree(resolve_run(str(results.series)))
    results.dataset.current.write_text(first)
    assert results.train("d") == ("a", "p")


def test_rows_that_are_back_are_trained_on_anew(results: Command) -> None:
    first = results.dataset.current.read_text()
    results.train("a")
    publish(results.dataset, "20260102T000000000000Z-00000000", splits=OTHER_ROWS)
    results.train("b")
    results.dataset.current.write_text(first)
    assert results.train("c") == ("c", "p")  # The newest run is of the others.


def test_an_ended_run_of_unknown_origin_is_refused(results: Command) -> None:
    results.train_by_hand()
    with pytest.raises(RefusedError, match=r"does not say which commit.*another --work.*remove"):
        results.train("a")


def test_a_run_has_no_origin_of_an_earlier_one(results: Command) -> None:
    assert results.train("a") == ("a", "p")
    run = results.train_by_hand()
    with pytest.raises(RefusedError, match=f"{run.name}: .*does not say which commit"):
        results.train("b")
    shutil.rmtree(run)
    assert results.train("b") == ("a", "p")


def test_a_killed_run_goes_on_at_its_commit_alone(results: Command) -> None:
    results.kill("a")
    with pytest.raises(RefusedError, match="began at commit a; check out a, "):
        results.train("b")
    assert results.train("a", processor="q") == ("a", "p and q")
    assert results.train("b") == ("a", "p and q")


def test_a_killed_run_that_was_removed_is_made_by_who_trains_it_anew(results: Command) -> None:
    results.kill("a")
    shutil.rmtree(results.series)
    assert results.train("b") == ("b", "p")


def test_a_killed_run_of_other_rows_is_refused(results: Command) -> None:
    results.kill("a")
    publish(results.dataset, "20260102T000000000000Z-00000000", splits=OTHER_ROWS)
    with pytest.raises(RefusedError, match="another version of its dataset"):
        results.train("a")


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


def make_seed(number: int, value: float, commit: str = "c" * 40) -> SeedResult:
    figures = {"HR@50": value}
    return SeedResult(number, figures, {"HR@50": 0.1}, 10, 10, 10, 60, 10**9, commit, "p", "")


def make_record(*seeds: SeedResult) -> Record:
    return Record("ml_1m_dssm", "d" * 64, "e" * 64, seeds)


def test_seeds_give_a_mean_and_a_deviation() -> None:
    metric = EXPERIMENT.metrics[0]
    several = make_record(make_seed(1, 0.48), make_seed(2, 0.49), make_seed(3, 0.47))
    assert format_figure(several, metric) == "0.4800 ± 0.0100"
    assert format_figure(make_record(make_seed(1, 0.48)), metric) == "0.4800"
    page = render_page({"ml_1m_dssm": several})
    assert "**0.4800 ± 0.0100**" in page
    assert "published: DeepMatch" in page
    assert "`ml_1m_hstu`" in page.split("Not measured")[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "FOLDER", tmp_path / "measured")
    return records.FOLDER


@pytest.mark.usefixtures("folder")
def test_seeds_are_added_to_a_record() -> None:
    write_record(make_record(make_seed(2, 0.4, "old"), make_seed(3, 0.5, "old")))
    write_record(make_record(make_seed(1, 0.6, "new"), make_seed(3, 0.7, "new")))
    (record,) = read_records().values()
    found = [(seed.seed, seed.figures["HR@50"], seed.commit) for seed in record.seeds]
    assert found == [(1, 0.6, "new"), (2, 0.4, "old"), (3, 0.7, "new")]


@pytest.mark.parametrize("changed", ["split_sha256", "setup_sha256"])
def test_seeds_of_other_work_are_not_put_into_one_record(folder: Path, changed: str) -> None:
    file = write_record(make_record(make_seed(1, 0.4), make_seed(2, 0.5)))
    before = file.read_bytes()
    other = replace(make_record(make_seed(2, 0.6)), **{changed: "f" * 64})
    with pytest.raises(RefusedError, match=rf"--seeds 1 2\), or remove {re.escape(str(file))}"):
        write_record(other)
    assert file.read_bytes() == before
    whole = replace(other, seeds=(make_seed(1, 0.7), *other.seeds))
    write_record(whole)
    assert read_records() == {whole.experiment: whole}


def test_what_makes_the_setup_of_a_record() -> None:
    setup = digest_setup(EXPERIMENT)
    assert digest_setup(replace(EXPERIMENT, protocol="Other words.", chosen_by="No one.")) == setup
    assert digest_setup(replace(EXPERIMENT, settings=("optimizer.learning_rate=0.5",))) != setup
    unseen = (Metric("HR@50", "hit_rate@50", "full_unseen"),)
    assert digest_setup(replace(EXPERIMENT, metrics=unseen)) != setup


@pytest.mark.usefixtures("folder")
def test_a_record_that_would_lose_seeds_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(make_record(make_seed(42, 0.4), make_seed(43, 0.5)))
    dataset = Path(load_config(TrainConfig, "training", EXPERIMENT.preset).dataset).name
    publish(DatasetPaths(tmp_path / "datasets", dataset), "20260101T000000000000Z-00000000")
    done: list[str] = []

    def run(*words: str) -> None:
        done.append(words[0])
        if words[0] == "train":
            sys.exit(2)

    def measure(*seeds: int) -> None:
        arguments = argparse.Namespace(work=tmp_path, seeds=list(seeds))
        command.measure(EXPERIMENT, tmp_path, arguments, "a")

    monkeypatch.setattr(command, "_sluice", run)
    with pytest.raises(RefusedError, match="--seeds 42 43 44"):
        measure(42, 44)
    assert done == ["build", "versions"]
    with pytest.raises(SystemExit):
        measure(42, 43)
    assert done[-1] == "train"
    assert "will be replaced" in capsys.readouterr().out
