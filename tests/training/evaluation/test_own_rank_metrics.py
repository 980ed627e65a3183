"""Metrics of one's own of ranks: what they are given, where they are measured, what is refused."""

from __future__ import annotations

import gzip
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from conf.artefacts.run import read_json
from conf.errors import ConfigError, ExitCode, OwnCodeError, TrainingInterruptedError
from conf.load import override_config
from conf.manifest import Manifest
from conf.metrics import METRICS, find_direction, is_minimised
from conf.training.train import TrainConfig
from jobs.compare import compare
from jobs.evaluate import evaluate, evaluate_lists, print_list_metrics, print_metrics
from jobs.reporting.report import write_report
from tests.training.evaluation.test_own_metrics import Messages
from tests.training.predictions import write_lists
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.apply.answers import Source
from training.checkpoint.restore import TrainedModel, load_run
from training.evaluation.comparison import compare_runs
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import build_item_index
from training.evaluation.metrics import RankingMeans, measure
from training.evaluation.own_metrics import build_measures
from training.fit import fit_run, plan_run
from training.input.batches import build_eval_dataset
from training.loop.early_stopping import selection_metric
from training.models.retrieval import require_retrieval
from training.monitoring.progress import NoProgress
from training.monitoring.run_logs import read_history
from training.refit import fit_chosen

SOURCE = """
import os
import signal

import numpy as np

def found(ranks, k):
    return np.any(ranks <= k, axis=1)

def share(ranks, k):
    return np.sum(ranks <= k, axis=1) / np.sum(~np.isnan(ranks), axis=1)

def missed(ranks, k, cost=1.0):
    relevant = ~np.isnan(ranks)
    return cost * np.sum(relevant & ~(ranks <= k), axis=1) / relevant.sum(axis=1)

def graded(ranks, k, base=2.0):
    return np.sum(np.where(ranks <= k, base ** -ranks, 0.0), axis=1)

BUFFER = np.zeros(5000)

def buffered(ranks, k):
    BUFFER[: len(ranks)] = np.any(ranks <= k, axis=1)
    return BUFFER[: len(ranks)]

def enormous(ranks, k):
    return np.full(len(ranks), 1e39)

def large(ranks, k):
    return np.full(len(ranks), 1e38)

def mean(ranks, k):
    return np.mean(ranks <= k)

def mean_of_all(ranks, k):
    return np.full(len(ranks), np.mean(ranks <= k))

def padded(ranks, k):
    return np.mean(ranks <= k, axis=1)

def squeezed(ranks, k):
    return np.any(ranks <= k, axis=1).squeeze()

def flags(ranks, k):
    return ranks <= k

def no_number(ranks, k):
    return np.sum(ranks, axis=1)

def endless(ranks, k):
    return np.full(len(ranks), np.inf)

def words(ranks, k):
    return ["much"] * len(ranks)

def imaginary(ranks, k):
    return np.full(len(ranks), 1j)

def ragged(ranks, k):
    return [[1.0] * (n % 2) for n in range(len(ranks))]

def sorting(ranks, k):
    ranks.sort()
    return ranks[:, 0]

def writing(ranks, k):
    ranks.setflags(write=True)
    return ranks[:, 0]

def broken(ranks, k):
    return ranks["no"]

def leaving(ranks, k):
    raise SystemExit(0)

def of_tasks(labels, scores, weights):
    return np.average(labels == scores, weights=weights)

def few(ranks, k, most=16):
    if len(ranks) > most:
        raise RuntimeError("not these")
    return np.any(ranks <= k, axis=1)

def undefined(ranks, k):
    return np.full(len(ranks), np.nan if len(ranks) > 16 else 0.0)

def interrupted(ranks, k):
    try:
        if len(ranks) > 16:
            os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        pass
    return np.zeros(len(ranks))
"""

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"
OWN_MODULES = {"own_rank_metrics.py": SOURCE}
KS = (1, 5, 10)
pytestmark = pytest.mark.usefixtures("in_own_folder")


def own(function: str, **settings: Any) -> dict[str, Any]:
    return {"function": f"own_rank_metrics:{function}", **settings}


METRICS_ASKED = {
    "own_found": own("found"),
    "own_share": own("share"),
    "own_missed": own("missed", params={"cost": 2.0}, direction="lower"),
    "own_graded": own("graded", params={"base": 1.5}),
    "own_buffered": own("buffered"),
}


def plan(version: Path, root: Path, metrics: dict[str, Any], **settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(version),
            "name": "own",
            "root": str(root),
            "model": {"name": "mf", "embedding_dim": 4},
            "input": {"batch_size": 64},
            "evaluation": {"metrics": metrics, "ks": KS},
            "fit": {"epochs": 2},
            **settings,
        }
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version whose users have several held-out events, some of unknown items."""
    config = TinyConfig(users=30, items=500, events_per_user=18, leave_out=3, own_group=0.3)
    return write_tiny_dataset(tmp_path_factory.mktemp("several"), config=config)


def equal_built_in(values: dict[str, float]) -> bool:
    """Whether metrics of one's own are those of Sluice that they repeat, at every cut-off."""
    for k in KS:
        hit, recall = values[f"hit_rate@{k}"], values[f"recall@{k}"]
        assert values[f"own_found@{k}"] == values[f"own_buffered@{k}"] == hit
        assert values[f"own_share@{k}"] == pytest.approx(recall)
        assert values[f"own_missed@{k}"] == pytest.approx(2 - 2 * recall)
    return True


def rank_by_hand(trained: TrainedModel) -> list[float]:
    """The rank of each test row's target in the whole catalogue."""
    model = require_retrieval(trained.model)
    index = build_item_index(model, trained.version_dir, trained.manifest, 64)
    inputs = (*model.user_inputs, "movie_id")
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, "test", 1000, inputs)
    users = model.embed_users({name: batch[name] for name in model.user_inputs}).numpy()
    place = {item: number for number, item in enumerate(index.ids.tolist())}
    ranks = []
    for row, item in zip(users @ np.asarray(index.vectors).T, batch["movie_id"], strict=True):
        at = place.get(int(item))
        ranks.append(np.inf if at is None else float(np.count_nonzero(row >= row[at])))
    return ranks


def test_metrics_are_shown_where_ranking_metrics_are(several: Path, tmp_path: Path) -> None:
    stopping = {"metric": "own_missed@5", "patience": 5}
    fit = {"epochs": 3, "early_stopping": stopping, "validation": {"every_steps": 3}}
    run = fit_run(plan(several, tmp_path, METRICS_ASKED, fit=fit), NoProgress())
    history = read_history(run)
    assert all(equal_built_in(dict(record.validation)) for record in history)
    lines = (run / "validations.jsonl").read_text().splitlines()
    assert lines
    assert all(equal_built_in(json.loads(line)["validation"]) for line in lines)
    missed = [record.validation["own_missed@5"] for record in history]
    training = read_json(run / "run_card.json")["training"]
    assert training["best_epoch"] == int(np.argmin(missed)) + 1
    assert training["selected_by"] == "own_missed@5"
    trained = load_run(run)
    found = evaluate_split(trained, "test", baselines=True)
    assert {protocol["per"] for protocol in found["protocols"]} == {"event", "user"}
    assert len(found["protocols"]) == 4
    for protocol in found["protocols"]:
        assert set(protocol["systems"]) == {"model", "ease", "popularity", "random"}
        assert all(map(equal_built_in, protocol["systems"].values()))
        for against in protocol["differences"]["against"].values():
            assert against["own_found@10"] == against["hit_rate@10"]
            low, high = (against["own_missed@10"][end] for end in ("low", "high"))
            assert low <= against["own_missed@10"]["difference"] <= high
    groups = found["slices"]["item_frequency"]
    assert len(groups) > 1
    assert all(equal_built_in(group["systems"][s]) for group in groups for s in group["systems"])
    [events] = [p for p in found["protocols"] if p["name"] == "full_all"]
    graded = [1.5**-rank if rank <= 5 else 0.0 for rank in rank_by_hand(trained)]
    assert events["systems"]["model"]["own_graded@5"] == pytest.approx(np.mean(graded))
    users = evaluate_split(
        replace(trained, config=override_config(trained.config, {"evaluation.per": "user"}, "x")),
        "test",
    )
    assert equal_built_in(users["protocols"][0]["systems"]["model"])
    groups = users["slices"]["user_frequency"]
    assert all(equal_built_in(group["systems"]["model"]) for group in groups)


@pytest.mark.parametrize("name", ["dssm", "sasrec", "hstu", "comirec"])
def test_every_kind_of_retrieval_model_has_them(
    name: str, tiny_version: Path, tmp_path: Path
) -> None:
    fit = {"epochs": 1, "early_stopping": {"metric": "own_missed@5"}}
    model = {"name": name, "embedding_dim": 4}
    run = fit_run(plan(tiny_version, tmp_path, METRICS_ASKED, model=model, fit=fit), NoProgress())
    assert equal_built_in(dict(read_history(run)[0].validation))


def test_values_are_those_of_plain_loops(several: Path, tmp_path: Path) -> None:
    measures = build_measures(plan(several, tmp_path, METRICS_ASKED))
    rng = np.random.default_rng(1)
    ranks = np.array([rng.permutation(12)[:4] + 1.0 for _ in range(40)])
    ranks[rng.random(ranks.shape) < 0.3] = np.inf
    ranks[::2, 2:] = np.nan
    for per in ("event", "user"):
        values = measure(ranks, measures, per)
        for k in KS:
            for row, found in zip(ranks, values[f"own_graded@{k}"], strict=True):
                inside = [rank for rank in row.tolist() if rank <= k]
                assert found == pytest.approx(sum(1.5**-rank for rank in inside))
    whole, parts = RankingMeans(measures, "user"), RankingMeans(measures, "user")
    whole.update(ranks)
    for part in (ranks[:0], ranks[:7], ranks[7:8], ranks[8:]):
        parts.update(part)
    assert parts.result() == pytest.approx(whole.result())
    assert measure(ranks[:, 0], measures)["own_found@5"].tolist() == (ranks[:, 0] <= 5).tolist()


def test_commands_and_the_report_show_them(
    several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fit = {"epochs": 2, "early_stopping": {"metric": "own_missed@5"}}
    run = fit_run(plan(several, tmp_path, METRICS_ASKED, fit=fit), NoProgress())
    monkeypatch.setenv("COLUMNS", "200")
    print_metrics(evaluate(run))
    shown = capsys.readouterr().out
    assert shown.count("own_missed@10") == 4  # Of each protocol.
    assert "own_missed@5" not in shown
    trained, file = load_run(run), tmp_path / "lists.json.gz"
    write_lists(trained, file, 12, Source(as_of="validation"))
    lists = evaluate_lists(run, file)
    assert equal_built_in(lists["metrics"])
    print_list_metrics(lists)
    assert "own_missed" in capsys.readouterr().out
    for name in METRICS_ASKED:  # A report begins without them.
        monkeypatch.delitem(METRICS, name)
    card = read_json(run / "run_card.json")
    del card["training"]["best_epoch"]  # As while the run goes on.
    (run / "run_card.json").write_text(json.dumps(card))
    page = write_report(run).read_text()
    assert find_direction("own_missed@5") == "lower"
    assert page.count("own_missed@5") >= 2  # Of epochs, and of protocols.


def test_written_lists_of_shorter_length_have_the_cut_offs_that_they_reach(
    several: Path, tmp_path: Path
) -> None:
    run = fit_run(plan(several, tmp_path, METRICS_ASKED), NoProgress())
    file = tmp_path / "lists.json.gz"
    write_lists(load_run(run), file, 5, Source(as_of="validation"))
    with gzip.open(file, "rt") as lines:
        assert len(json.loads(next(iter(lines)))["items"]) == 5
    found = evaluate_lists(run, file)
    assert found["ks"] == [1, 5]
    assert {"own_found@1", "own_found@5"} < set(found["metrics"])
    assert "own_found@10" not in found["metrics"]


@pytest.mark.parametrize("per", ["event", "user"])
def test_runs_are_compared_by_them_with_the_first_ones_direction(
    per: str, tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    config = plan(tiny_version, tmp_path, METRICS_ASKED)
    config = override_config(config, {"evaluation.per": per}, "of a test")
    first, second = (
        TrainedModel(Path(), TinyTowers(tiny_manifest, seed=seed), config, tiny_manifest,
                     tiny_version)
        for seed in (3, 4)
    )  # fmt: skip
    plan(tiny_version, tmp_path, {"own_missed": own("missed")})
    assert not is_minimised("own_missed@5")
    found = compare_runs(first, second, "test")["metrics"]
    assert is_minimised("own_missed@5")
    assert found["own_found@5"] == found["hit_rate@5"]
    recall, missed = found["recall@5"], found["own_missed@5"]
    assert missed["difference"] == pytest.approx(-2 * recall["difference"])
    assert missed["low"] == pytest.approx(-2 * recall["high"])


def test_a_comparison_may_be_decided_by_one(tiny_version: Path, tmp_path: Path) -> None:
    runs = [
        fit_run(plan(tiny_version, tmp_path, METRICS_ASKED, name=name, seed=seed), NoProgress())
        for name, seed in (("a", 1), ("b", 2))
    ]
    found = compare(*runs, metric="own_missed@5", margin=-2.0)
    assert found["passed"] is True
    assert found["lead"] == pytest.approx(-found["metrics"]["own_missed@5"]["high"])


def test_a_refit_is_chosen_by_one(tiny_version: Path, tmp_path: Path) -> None:
    fit = {"epochs": 3, "early_stopping": {"metric": "own_missed@5"}, "refit": True}
    rows = {"batch_size": 64, "validation": {"hash_of": "user_id", "share": 0.3}}
    config = plan(tiny_version, tmp_path, METRICS_ASKED, fit=fit, input=rows)
    fit_chosen(config, NoProgress())
    [file] = tmp_path.glob("own/refits/*/trials.json")
    state = json.loads(file.read_text())
    [trial] = state["trials"]
    assert state["metric"] == "own_missed@5"
    assert trial["value"] == min(trial["curve"])


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        (own("mean"), r"for each row.*float64 of shape \(\).*their mean is the metric"),
        (own("flags"), r"bool of shape \(16, 4\), of ranks of shape \(16, 4\).*\.py:\d+"),
        (own("words"), r"<U4 of shape \(16,\)"),
        (own("imaginary"), r"complex128 of shape"),
        (own("ragged"), r"fails on 16 rows.*ValueError"),
        (own("squeezed"), r"bool of shape \(\), of ranks of shape \(1, 1\)"),
        (own("no_number"), r"not finite.*nan; ranks 1, nan, nan, nan; k=1 in \S*\.py:\d+.*padding"),
        (own("endless"), r"not finite"),
        (own("enormous"), r"too large.*1e\+39.*from -1e\+38 to 1e\+38"),
        (own("mean_of_all"), r"another value beside other rows.*k=1 in \S*\.py:\d+"),
        (own("padded"), r"another value beside other rows.*0\.25.* 1; ranks.*isnan"),
        (own("sorting"), "fails on 16 rows.*read-only"),
        (own("writing"), "fails on 16 rows.*WRITEABLE"),
        (own("broken"), r"fails on 16 rows.*own_rank_metrics\.py:\d+"),
        (own("leaving"), r"fails on 16 rows.*SystemExit in \S*own_rank_metrics\.py:\d+"),
        (own("missed", params={"cots": 1}), "did you mean 'cost'"),
        (own("missed", params={"k": 1}), "takes no such parameter"),
        (own("mised"), "did you mean 'missed'"),
        (own("of_tasks"), r"tasks of ranking models.*\(labels, scores\).*\(ranks, k\)"),
        ({"function": "math:hypot"}, "does not tell its parameters"),
    ],
)
def test_faults_of_a_metric_are_said_before_anything_is_written(
    metric: dict[str, Any], error: str, tiny_version: Path, tmp_path: Path
) -> None:
    config = plan(tiny_version, tmp_path / "runs", {"own_metric": metric})
    with pytest.raises(ConfigError, match="(?s)" + error) as caught:
        plan_run(config)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "runs").exists()


def test_the_largest_values_are_trained_on_and_evaluated(
    tiny_version: Path, tmp_path: Path
) -> None:
    run = fit_run(plan(tiny_version, tmp_path, {"own_large": own("large")}), NoProgress())
    assert read_history(run)[0].validation["own_large@5"] == pytest.approx(1e38)
    measured = json.loads(json.dumps(evaluate_split(load_run(run), "test"), allow_nan=False))
    assert measured["protocols"][0]["systems"]["model"]["own_large@5"] == pytest.approx(1e38)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("own_found", "(?s)is not evaluated.*own_found@1"),
        ("own_found@7", r"evaluation\.ks"),
        ("own_fond@5", "did you mean 'own_found@5'"),
        ("own_absent@5", "is not evaluated"),
    ],
)
def test_what_is_not_measured_chooses_no_epoch(
    asked: str, error: str, tiny_version: Path, tmp_path: Path
) -> None:
    fit = {"epochs": 1, "early_stopping": {"metric": asked}}
    with pytest.raises(ConfigError, match=error):
        plan_run(plan(tiny_version, tmp_path, METRICS_ASKED, fit=fit))


def test_names_of_metrics_are_checked_by_the_config(tiny_version: Path, tmp_path: Path) -> None:
    for asked in ("own_found@0", "own_found@", "label/own_found@5"):
        fit = {"epochs": 1, "early_stopping": {"metric": asked}}
        with pytest.raises(ValidationError, match="metric"):
            plan(tiny_version, tmp_path, METRICS_ASKED, fit=fit)
    fit = {"epochs": 1, "early_stopping": {"metric": "own_missed@10"}}
    config = plan(tiny_version, tmp_path, METRICS_ASKED, fit=fit)
    assert selection_metric(config) == "own_missed@10"


@pytest.mark.parametrize("function", ["few", "undefined"])
@pytest.mark.parametrize("validation", [None, {"every_steps": 2}])
def test_a_metric_that_fails_on_the_split_loses_no_step(
    function: str, validation: dict[str, int] | None, tiny_version: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The function is corrected, and training goes on where it was."""
    fit = {"epochs": 2, "validation": validation}
    config = plan(tiny_version, tmp_path, {"own_few": own(function)}, fit=fit)
    messages = Messages()
    with pytest.raises(OwnCodeError, match=r"fails on \d\d rows|not finite") as caught:
        fit_run(config, messages)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert re.search(r"own_rank_metrics\.py:\d+", str(caught.value.received))
    assert any("the state is saved" in text and "--resume" in text for text in messages.texts)
    monkeypatch.setattr(sys.modules["own_rank_metrics"], function, lambda ranks, k: ranks[:, 0] < k)
    run = fit_run(config, messages, resume=True)
    where = "resuming in epoch 1 after step " + ("2" if validation else "12")
    assert where in messages.texts
    monkeypatch.undo()
    monkeypatch.chdir(Path(sys.modules["own_rank_metrics"].__file__ or "").parent)
    with pytest.raises(OwnCodeError, match=r"fails on \d\d rows|not finite"):
        evaluate_split(load_run(run), "test")


def test_a_signal_ends_a_validation_inside_a_metric(tiny_version: Path, tmp_path: Path) -> None:
    """Not the function's fault, whatever exceptions it catches."""
    config = plan(tiny_version, tmp_path, {"own_signal": own("interrupted")})
    with pytest.raises(TrainingInterruptedError, match="its state is saved"):
        fit_run(config, NoProgress())


def test_lists_of_ranking_models_have_the_cut_offs_alone(
    tiny_version: Path, tmp_path: Path
) -> None:
    model = {"kind": "ranking", "network": "lr", "embedding_dim": 4}
    measures = build_measures(plan(tiny_version, tmp_path, METRICS_ASKED, model=model))
    assert (measures.ks, dict(measures.own)) == (KS, {})


def test_the_metric_of_the_guide_chooses_the_epoch(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GUIDE.read_text("utf-8").split("## A metric of ranks")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [text] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "own_measures.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_measures", raising=False)
    run = fit_run(plan(tiny_version, tmp_path / "runs", {}, **yaml.safe_load(text)), NoProgress())
    found = [record.validation["own_rank_biased@10"] for record in read_history(run)]
    training = read_json(run / "run_card.json")["training"]
    assert training["best_epoch"] == int(np.argmax(found)) + 1
    trained = load_run(run)
    evaluated = evaluate_split(trained, "test")
    [protocol] = [p for p in evaluated["protocols"] if p["name"] == "full_all"]
    gains = [0.2 * 0.8 ** (rank - 1) for rank in rank_by_hand(trained) if rank <= 10]
    value = sum(gains) / evaluated["rows"]
    assert protocol["systems"]["model"]["own_rank_biased@10"] == pytest.approx(value)
    monkeypatch.delitem(sys.modules, "own_measures")
