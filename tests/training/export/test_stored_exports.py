"""Exports in stores: numbered, kept, withdrawn and followed there, from several machines."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

from conf.artefacts.export import (
    EXPORT_FILE,
    find_published,
    list_files,
    list_versions,
    read_card,
    read_versions,
    roll_back,
)
from conf.artefacts.run import write_json
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.paths import ReadablePath
from conf.publication.entries import hold_numbers
from conf.publication.holds import hold_lease
from conf.publication.working_copy import WORK_DIR_VARIABLE, WorkingCopy
from conf.training.models import DSSMConfig
from conf.training.train import TrainConfig
from jobs.cli import main
from tests.fake_store import FakeStore, reached_as
from tests.object_servers import SCHEMES, ObjectServer
from training.export.stored_models import (
    FollowedModels,
    bring_export,
    find_place,
    resolve_export,
)
from training.fit import fit_run
from training.monitoring.progress import TrainingProgress
from training.serving.model_store import ModelStore
from training.serving.served_version import Loading, ServedVersion

Machine = Callable[[str], None]
RUN = "s3://bucket/runs/t"
MODELS = "s3://bucket/models"


class Killed(BaseException):
    """In place of a signal."""


@dataclass(frozen=True)
class World:
    """A store with a run and the version of a model that it was exported as."""

    store: FakeStore
    version: Path  # on the machine that exported it
    log: list[str]  # what the export asked of the store


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_version: Path) -> World:
    with pytest.MonkeyPatch.context() as patch, reached_as("s3", patch) as store:
        work = tmp_path_factory.mktemp("work")
        patch.setenv(WORK_DIR_VARIABLE, str(work))
        config = TrainConfig.model_validate(
            {
                "dataset": str(tiny_version),
                "name": "t",
                "root": "s3://bucket/runs",
                "model": DSSMConfig(embedding_dim=8).model_dump(),
                "input": {"batch_size": 64, "shuffle_buffer": 100},
                "fit": {"epochs": 1},
            }
        )
        fit_run(config, TrainingProgress())
        store.log.clear()
        assert main(["export", "--run", RUN, "--to", MODELS, "--index"]) == 0
    return World(store, work / "s3/bucket/models/t/1", [*store.log])


@pytest.fixture
def store(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    world.store.log.clear()
    with reached_as("s3", monkeypatch, world.store) as store:
        yield store
    store.hook = lambda name: None


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A place of its own for a model."""
    return f"s3://bucket/{request.node.name.partition('[')[0]}/m"


def publish(uri: str, keep: int | None = None, content: str = "weights") -> int:
    """Writes a version that only looks like one."""
    with (
        hold_numbers(find_place(uri), EXPORT_FILE) as held,
        held.next_entry(keep) as (staging, target),
    ):
        (staging / "variables").mkdir()
        (staging / "variables" / "variables.data").write_text(content)
        (staging / "saved_model.pb").write_text("graph")
        files = list_files(staging)
        card = {"run_path": f"/run{target.name}", "dataset_version": "v1", "files": files}
        write_json(staging / "export.json", card)
    return int(target.name)


def run_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main([*command, "--log-format", "json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_version_is_complete_with_its_last_files(world: World) -> None:
    puts = [line.removeprefix("put bucket/models/") for line in world.log if "put" in line[:4]]
    puts = [name for name in puts if not name.endswith(".lease") and name.startswith(("t/", "mo"))]
    assert puts[-1] == "models.config"
    assert set(puts[-3:-1]) == {"t/1/saved_model.pb", "t/1/export.json"}
    assert {f"t/1/{name}" for name in list_files(world.version) if name[0] != "."} <= set(puts)
    text = world.store.get("models/models.config")[0].decode()
    [found] = text_format.Parse(text, ModelServerConfig()).model_config_list.config
    assert (found.name, found.base_path) == ("t", f"{MODELS}/t")


def test_another_machine_uses_what_was_exported(
    world: World, store: FakeStore, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    [listed] = run_json(["models", "list", f"{MODELS}/t"], capsys)
    run = str(listed["run"])
    assert run.startswith(f"{RUN}/runs/")
    assert (listed["version"], listed["published"], listed["withdrawn"]) == (1, True, False)
    [found] = run_json(["models", "published", f"{MODELS}/t"], capsys)
    assert found == {"version": 1, "run": run}
    once = ["export", "--run", run, "--to", MODELS, "--once"]
    assert run_json(once, capsys) == [{"export": f"{MODELS}/t/1"}]
    assert not [line for line in store.log if line.startswith("put bucket/models/t/1")]
    indexed = ["index", "--export", f"{MODELS}/t", "--once"]
    assert run_json(indexed, capsys) == [{"index": f"{MODELS}/t/1/index/1"}]
    built = run_json(["index", "--export", f"{MODELS}/t/1", "--keep", "1"], capsys)
    assert built == [{"index": f"{MODELS}/t/1/index/2"}]
    left = {key.split("/")[3] for key in store.objects("bucket/models") if "/1/index/" in key}
    assert left == {".lease", "2"}
    brought = list_files(bring_export(MODELS))
    files = read_card(world.version)["files"]
    assert {name: brought[name] for name in files} == files
    evaluated = ["evaluate", "--run", RUN, "--export", f"{MODELS}/t"]
    assert run_json(evaluated, capsys)[0]["served"] == f"{MODELS}/t/1"


def test_an_export_into_a_run_is_brought_back_with_it(
    world: World, store: FakeStore, machine: Machine, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def copy(staging: Path, *_: object) -> None:
        shutil.copytree(world.version, staging, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns(".*"))  # fmt: skip

    monkeypatch.setattr("training.export.saved_model.write_version", copy)
    [written] = run_json(["export", "--run", RUN], capsys)
    run = find_published(find_place(f"{MODELS}/t")).run
    assert written == {"export": f"{run}/export/t/1"}
    machine("third")
    [listed] = run_json(["models", "list", f"{run}/export/t"], capsys)
    assert (listed["version"], listed["run"]) == (1, run)
    text = store.get(f"{run.removeprefix('s3://bucket/')}/export/models.config")[0].decode()
    assert f'"{run}/export/t"' in text
    again = ["export", "--run", run, "--to", "s3://bucket/again", "--once"]
    assert run_json(again, capsys) == [{"export": "s3://bucket/again/t/1"}]
    with hold_numbers(find_place("s3://bucket/again/t"), EXPORT_FILE) as held:
        assert held.withdraw(0) == [1]
    assert run_json(again, capsys) == [{"export": "s3://bucket/again/t/.withdrawn/1"}]


def test_numbers_go_on_from_machine_to_machine(
    store: FakeStore, machine: Machine, model: str, tmp_path: Path
) -> None:
    assert [publish(model), publish(model)] == [1, 2]
    parent = str(find_place(model).parent)
    for place, numbers in ((model, [1, 2]), (f"{model}/2", [2]), (parent, [1, 2])):
        followed = FollowedModels(find_place(place))
        [(name, found)] = followed.list_versions().items()
        assert (name, found) == (find_place(model).name, numbers)
        assert followed.bring(name, 2).name == resolve_export(place).name == "2"
    machine("third")
    assert publish(model) == 3
    assert roll_back(find_place(model), 1) == [2, 3]
    machine("first")
    assert publish(model, keep=1) == 4
    assert [v.number for v in read_versions(find_place(model)) if not v.is_withdrawn] == [4]
    assert [v.number for v in read_versions(find_place(model)) if v.is_withdrawn] == [3]
    assert {key.split("/")[0] for key in store.objects(model.removeprefix("s3://"))} == {
        "4", ".withdrawn", ".lease",
    }  # fmt: skip
    publish(model)
    here = tmp_path / "first" / model.replace("://", "/")
    assert sorted(path.name for path in here.iterdir() if path.name.isdigit()) == ["4", "5"]


def test_a_second_exporter_is_refused(
    world: World, store: FakeStore, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    place = WorkingCopy.at(f"{MODELS}/t").remote
    before = store.objects("bucket/models")
    with hold_lease(place, "another"):
        assert main(["export", "--run", RUN, "--to", MODELS]) == 4
        assert main(["models", "rollback", f"{MODELS}/t", "--to", "1"]) == 4
    with hold_lease(place.child("1").child("index"), "another"):
        assert main(["index", "--export", MODELS]) == 4
    assert "another process is working on this directory" in capsys.readouterr().err
    assert store.objects("bucket/models") - before <= {"t/1/index/.lease"}


def test_a_roll_back_is_seen_and_can_be_gone_on_with(
    store: FakeStore, machine: Machine, model: str
) -> None:
    for _ in range(3):
        publish(model)
    place, folder = find_place(model), model.removeprefix("s3://")
    contents = {key: store.get(f"{folder.removeprefix('bucket/')}/{key}")[0]
                for key in store.objects(folder) if key[0] == "3"}  # fmt: skip
    seen: list[int] = []

    def watch(name: str) -> None:
        if name.startswith(("copy", "delete")):
            keys = store.objects(folder)
            seen.append(max(int(key.split("/")[0]) for key in keys if key.endswith("/export.json")
                            and key[0] != "."))  # fmt: skip
            if len(seen) == 9:
                raise Killed

    store.hook = watch
    with pytest.raises(Killed):
        roll_back(place, 1)
    assert seen == [3] * 9  # Version 2 is away, and 3 answers.
    store.hook = lambda name: None
    assert find_published(place).number == 3
    machine("third")
    assert roll_back(place, 1)[-1] == 3
    assert find_published(place).number == 1
    assert [v.is_withdrawn for v in read_versions(place)] == [False, True, True]
    moved = {key: store.get(f"{folder.removeprefix('bucket/')}/.withdrawn/{key}")[0]
             for key in contents}  # fmt: skip
    assert moved == contents
    assert roll_back(place, 1) == []
    assert publish(model) == 4
    WorkingCopy.at(f"{model}/1").remote.put("variables/variables.data", b"cut")
    with pytest.raises(InputDataError, match=r"variables\.data: 3 bytes of 7"):
        roll_back(place, 1)
    assert list_versions(place) == [1, 4]


def serve(place: ReadablePath) -> ModelStore:
    found = ModelStore(place, 60.0)
    found.load()
    found.start()
    return found


def ask(version: ServedVersion) -> np.ndarray:
    items = {"movie_id": np.array([107]), "genres": np.array([["genre_1"]], object)}
    return version.call("item_embedding", items)["embedding"]


def test_a_server_follows_a_store(
    world: World,
    store: FakeStore,
    machine: Machine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = "s3://bucket/served"
    skipped = shutil.ignore_patterns(".*", "index")

    def export_again() -> None:
        place = find_place(f"{base}/t")
        with hold_numbers(place, EXPORT_FILE) as held, held.next_entry() as (staging, _):
            shutil.copytree(world.version, staging, dirs_exist_ok=True, ignore=skipped)

    with pytest.raises(UpstreamNotReadyError, match="no exported model that can be served"):
        serve(find_place(base))
    export_again()
    machine("server")
    models = serve(find_place(base))
    wanted = ask(ServedVersion(world.version, Loading()))
    np.testing.assert_array_equal(ask(models.get("t")), wanted)
    assert (models.get("t").number, models.get("t").index) == (1, None)
    store.log.clear()
    models.refresh()
    assert all(line.startswith(("list", "folders")) for line in store.log)
    assert main(["index", "--export", f"{base}/t"]) == 0
    models.refresh()
    assert models.get("t").index == 1
    machine("exporter")
    export_again()
    machine("server")

    def refuse(name: str) -> None:
        raise OSError("503 Slow Down")

    store.hook = refuse
    caplog.clear()
    caplog.set_level(logging.ERROR, logger="sluice")
    logging.getLogger("sluice").propagate = True
    models._stopped.wait = lambda seconds: bool(caplog.records)  # type: ignore[method-assign]
    models._watch()
    [record] = caplog.records
    assert "new versions cannot be looked for: s3://bucket/served" in record.getMessage()
    assert record.exc_info is None
    assert models.get("t").number == 1
    store.hook = lambda name: None
    models.refresh()
    assert models.get("t").number == 2
    followed = tmp_path / "server/s3/bucket/served/.followed/t"
    assert [path.name for path in followed.iterdir()] == ["2"]
    roll_back(find_place(f"{base}/t"))
    models.refresh()
    assert models.get("t").number == 1
    np.testing.assert_array_equal(ask(models.get("t")), wanted)
    assert [path.name for path in followed.iterdir()] == ["1"]
    models.stop()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["models", "list", "s3://bucket/none"], 4),
        (["models", "list", "s3://other/models/t"], 2),
        (["models", "rollback", "ftp://node/models/t"], 2),
        (["models", "apply", f"{MODELS}/t", "--delta", "s3://other/d"], 2),
        (["models", "apply", f"{MODELS}/t", "--delta", "s3://bucket/d"], 4),
        (["index", "--export", "s3://other/models"], 2),
        (["index", "--export", "s3:/bucket/models"], 2),
        (["serve", "--export", "s3://other/models", "--port", "0"], 2),
        (["predict", "--export", "s3://other/models", "--to", "x"], 2),
        (["export", "--run", RUN, "--to", "s3://other/models"], 2),
        (["evaluate", "--run", RUN, "--export", "s3://bucket/no"], 4),
    ],
)
def test_what_is_not_there_is_refused(
    store: FakeStore, machine: Machine, command: list[str], code: int
) -> None:
    assert main(command) == code


@pytest.mark.parametrize("scheme", SCHEMES)
def test_real_servers(
    scheme: str,
    server_of: Callable[[str], ObjectServer],
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = f"{server_of(scheme).place('models').uri}/m"
    assert [publish(uri), publish(uri)] == [1, 2]
    machine("third")
    assert publish(uri, keep=2) == 3
    models = FollowedModels(find_place(uri.removesuffix("/m")))
    assert models.list_versions() == {"m": [2, 3]}
    files = read_card(models.bring("m", 3))["files"]
    found = list_files(models.bring("m", 3))
    assert {name: found[name] for name in files} == files
    assert main(["models", "rollback", uri]) == 0
    assert models.list_versions() == {"m": [2]}
    assert main(["models", "list", uri]) == 0
    assert "- 3  /run3  on v1" in capsys.readouterr().out
    assert publish(uri) == 4
    if scheme == "hdfs":  # It has no buckets.
        return
    missing = uri.replace("bucket", "no-such-bucket")
    with pytest.raises(ConfigError, match="there is no such bucket"):
        publish(missing)
    assert main(["models", "list", missing]) == 2
