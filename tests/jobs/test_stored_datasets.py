"""From a dataset in an object store the jobs give what they give from the same one on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from conf.artefacts.run import read_json
from jobs.cli import main
from tests.object_servers import SCHEMES, ObjectServer, upload

SETTINGS = [
    "model.name=dssm",
    "model.embedding_dim=8",
    "input.batch_size=64",
    "input.shuffle_buffer=100",
    "fit.epochs=2",
    "evaluation.sampled_negatives=10",
    "name=t",
]


@dataclass(frozen=True)
class Stored:
    """A dataset on disk, and its copy in a store.

    Attributes:
        local: Its directory.
        uri: Its URI.
        server: Where it lies.
    """

    local: Path
    uri: str
    server: ObjectServer

    @property
    def folder(self) -> str:
        """Its path there."""
        return self.uri.partition(f"{self.server.base}/")[2]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.training.tiny_dataset import write_tiny_dataset

    return write_tiny_dataset(tmp_path_factory.mktemp("datasets")).parent.parent


@pytest.fixture(params=SCHEMES)
def stored(request: pytest.FixtureRequest, server_of: Callable[[str], ObjectServer]) -> Stored:
    server = server_of(request.param)
    local = request.getfixturevalue("local")  # not written where there is no server
    place = server.place(f"datasets/{request.node.name}")
    return Stored(local, upload(local, place), server)


def train(dataset: str, root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Path:
    settings = [part for setting in (*SETTINGS, f"root={root}") for part in ("--set", setting)]
    command = ["train", "--dataset", dataset, *settings, "--log-format", "json", *more]
    assert main(command) == 0
    return Path(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])


def losses(run: Path) -> list[tuple[float, dict[str, float]]]:
    entries = json.loads((run / "history.json").read_text())
    return [(entry["loss"], entry["validation"]) for entry in entries]


@pytest.mark.slow
def test_every_job_gives_the_same(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = train(str(stored.local), tmp_path / "here", capsys)
    there = train(stored.uri, tmp_path / "there", capsys)
    card = read_json(there / "run_card.json")["dataset"]
    assert card["path"].startswith(f"{stored.uri}/versions/")
    assert losses(here) == losses(there)
    for run in (here, there):
        for job in ("evaluate", "predict", "export"):
            assert main([job, "--run", str(run)]) == 0, job
    assert read_json(here / "metrics.json") == read_json(there / "metrics.json")
    lists = [(run / "recommendations.json.gz").read_bytes() for run in (here, there)]
    assert lists[0] == lists[1]
    for name in ("users", "items"):
        tables = [
            pq.read_table(run / f"export/t/1/embeddings/{name}.parquet") for run in (here, there)
        ]
        assert tables[0].equals(tables[1])
    page = (there / "report.html").read_text()
    assert stored.uri in page
    assert "cannot be" not in page


@pytest.mark.slow
def test_a_run_goes_on_and_starts_from_a_run_of_a_stored_version(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(stored.uri, tmp_path, capsys, "--no-report")
    again = train(
        stored.uri, tmp_path, capsys, "--no-report", "--resume", "--set", f"fit.warm_start={run}"
    )
    assert again != run
    report = read_json(again / "warm_start.json")
    assert report["rows"]["movie_id"]["transferred"] == report["rows"]["movie_id"]["rows"]
    mixed = f'input.mix=[{{"dataset": "{stored.uri}", "weight": 0.3}}]'
    assert train(str(stored.local), tmp_path / "mixed", capsys, "--no-report", "--set", mixed)


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(command)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return code, text


def test_what_is_not_there_ends_in_a_message(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = stored.server.scheme

    def dry_run(uri: str) -> tuple[int, str]:
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        return refused(["train", "--dataset", uri, *settings, "--dry-run"], capsys)

    code, text = dry_run(f"{scheme}://no-such-bucket/datasets/tiny")
    missing = "No NameNode hosts found" if scheme == "hdfs" else "there is no such bucket"
    assert (code, missing in text) == (2, True)
    code, text = dry_run(f"{stored.uri}-none")
    assert (code, "there is no published dataset version here" in text) == (4, True)
    [version] = [path for path in (stored.local / "versions").iterdir() if path.is_dir()]
    place = stored.server.place(f"{stored.folder}/versions/{version.name}")
    assert dry_run(place.uri)[0] == 0
    for name in ("encoders/movie_id.parquet", "train/part-00000.tfrecord"):
        place.delete(name)
        code, text = dry_run(stored.uri)
        assert code == 3
        assert f"{place.uri}/{name}" in text
        place.put(name, b"cut")
        code, text = dry_run(stored.uri)
        assert (code, "not as long as the manifest says" in text) == (3, True)
        place.put(name, (version / name).read_bytes())
    place.parent.parent.put("CURRENT", b"another\n")
    code, text = dry_run(stored.uri)
    assert (code, "names a published dataset version that is not there" in text) == (3, True)


def test_a_train_shard_that_is_gone_can_be_done_without(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = stored.server.place(stored.folder)
    [gone] = [key for key in place.list_objects() if key.endswith("train/part-00001.tfrecord")]
    place.delete(gone)
    run = train(stored.uri, tmp_path, capsys, "--no-report", "--set", "input.on_corrupt=skip_shard")
    history = json.loads((run / "history.json").read_text())
    assert [entry["left_out"] for entry in history] == [{"shards": 1}] * 2
    assert history[0]["examples"] == 585 // 64 * 64


def test_a_shard_that_goes_while_it_is_needed(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(stored.uri, tmp_path, capsys, "--no-report")
    folder = stored.folder
    place = stored.server.place(folder)
    [gone] = [key for key in place.list_objects() if key.endswith("test/part-00000.tfrecord")]
    place.delete(gone)
    code, text = refused(["evaluate", "--run", str(run)], capsys)
    assert code == 3
    assert f"{stored.uri}/{gone}" in text
