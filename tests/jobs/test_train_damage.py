"""`sluice train` on datasets that are damaged on disk: what is said, what is kept, what goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conf.artefacts.run import read_json
from jobs.cli import main
from tests.machine import some_of

SMALL = (
    "model.name=mf",
    "model.embedding_dim=8",
    "input.batch_size=64",
    "fit.epochs=2",
    "evaluation.sampled_negatives=10",
    "name=t",
)
ROWS, OF_A_SHARD = 780, 195


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.training.tiny_dataset import write_tiny_dataset

    return write_tiny_dataset(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def dataset(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "dataset"))


def train(dataset: Path, root: Path, policy: str, *more: str) -> int:
    settings = [*SMALL, f"root={root}", f"input.on_corrupt={policy}"]
    given = [part for setting in settings for part in ("--set", setting)]
    return main(["train", "--dataset", str(dataset), *given, *more, "--log-format", "json"])


def damage(dataset: Path, kind: str) -> Path:
    shard = dataset / "train" / "part-00001.tfrecord"
    content = bytearray(shard.read_bytes())
    if kind == "missing":
        shard.unlink()
    elif kind == "cut":
        shard.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        content[40] ^= 1
        shard.write_bytes(content)
    else:
        shard.write_bytes(content + content)
    return shard


@pytest.mark.parametrize("kind", ["missing", "cut", "flipped", "longer"])
def test_fail_names_the_shard_and_leaves_nothing_current(
    kind: str, dataset: Path, tmp_path: Path, capsys
) -> None:
    shard = damage(dataset, kind)
    assert train(dataset, tmp_path / "runs", "fail") == 3
    told = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert told["event"] == "error"
    assert str(shard) in told["message"] + told.get("received", "")
    assert told["fix"]
    assert not (tmp_path / "runs" / "t" / "CURRENT").exists()


@pytest.mark.parametrize("kind", ["missing", "longer"])
def test_a_shard_with_no_record_to_trust_is_refused_record_by_record(
    kind: str, dataset: Path, tmp_path: Path, capsys
) -> None:
    damage(dataset, kind)
    assert train(dataset, tmp_path / "runs", "skip_record") == 3
    assert "part-00001" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("kind", "policy"),
    some_of(
        [
            ("flipped", "skip_record"),
            ("cut", "skip_record"),
            ("cut", "skip_shard"),
            ("missing", "skip_shard"),
            ("longer", "skip_shard"),
        ],
        [("flipped", "skip_record"), ("missing", "skip_shard")],
    ),
)
def test_the_rest_is_trained_on_counted_and_evaluated(
    kind: str, policy: str, dataset: Path, tmp_path: Path, capsys
) -> None:
    shard = damage(dataset, kind)
    assert train(dataset, tmp_path / "runs", policy) == 0
    captured = capsys.readouterr()
    run = Path(json.loads(captured.out)["run"])
    lines = [json.loads(line) for line in captured.err.splitlines()]
    told = [line["message"] for line in lines if "skipped" in line.get("message", "")]
    assert len(told) == 1  # once, not once an epoch
    assert str(shard) in told[0]
    history = json.loads((run / "history.json").read_text())
    left_out = history[0]["left_out"]
    assert all(entry["left_out"] == left_out for entry in history)
    assert read_json(run / "run_card.json")["training"]["left_out"] == left_out
    lost = OF_A_SHARD if policy == "skip_shard" else left_out["bad_records"]
    assert left_out == ({"shards": 1} if policy == "skip_shard" else {"bad_records": lost})
    assert lost == 1 if (kind, policy) == ("flipped", "skip_record") else lost > 50
    assert history[0]["examples"] == (ROWS - lost) // 64 * 64
    assert main(["evaluate", "--run", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "that the manifest lists is missing" not in page
    assert "not as long as the manifest says" not in page


def test_a_run_on_what_is_left_goes_on(dataset: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    damage(dataset, "missing")

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("training.loop.trainer.Trainer._validate", stop)
        assert train(dataset, tmp_path / "runs", "skip_shard") != 0
    assert train(dataset, tmp_path / "runs", "skip_shard", "--resume") == 0
    assert len(list((tmp_path / "runs" / "t" / "runs").iterdir())) == 1
    dry = train(dataset, tmp_path / "more", "skip_shard", "--dry-run")
    assert dry == 0
    assert not (tmp_path / "more").exists()


def edit_shard(dataset: Path, number: int, **values: object) -> None:
    """Changes what the manifest says of a shard of train."""
    manifest = json.loads((dataset / "manifest.json").read_text())
    [train] = [split for split in manifest["splits"] if split["name"] == "train"]
    train["shards"][number].update(values)
    (dataset / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("is_there", [True, False])
def test_no_more_rows_are_planned_than_a_damaged_shard_could_hold(
    is_there: bool, dataset: Path, tmp_path: Path
) -> None:
    edit_shard(dataset, 1, bytes=16 * 10**15, rows=10**15)
    if not is_there:
        (dataset / "train" / "part-00001.tfrecord").unlink()
    assert train(dataset, tmp_path / "runs", "skip_shard") == 0
    [history] = (tmp_path / "runs" / "t" / "runs").glob("*/history.json")
    epoch = json.loads(history.read_text())[0]
    assert epoch["left_out"] == {"shards": 1}
    assert epoch["examples"] == (ROWS - OF_A_SHARD) // 64 * 64


def test_a_shard_with_more_records_than_the_manifest_says_ends_the_run(
    dataset: Path, tmp_path: Path, capsys
) -> None:
    edit_shard(dataset, 1, rows=OF_A_SHARD - 1)
    assert train(dataset, tmp_path / "runs", "fail") == 3
    told = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert told["event"] == "error"
    assert f"more than {OF_A_SHARD - 1} records" in told["received"]
    assert not (tmp_path / "runs" / "t" / "CURRENT").exists()


@pytest.mark.parametrize("split", ["validation", "test"])
def test_what_a_model_is_measured_on_has_to_be_whole(
    split: str, dataset: Path, tmp_path: Path, capsys
) -> None:
    next((dataset / split).iterdir()).unlink()
    assert train(dataset, tmp_path / "runs", "skip_shard") == 3
    assert f"{split}/part-" in capsys.readouterr().err
