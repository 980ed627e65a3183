"""Three days and more under Airflow's own scheduler: by cron, by asset, by hand, all at once."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import read_versions
from conf.artefacts.run import read_json
from conf.encoders import ENCODERS_DIR
from etl.encoders.pipeline import read_pipeline
from tests.browser import Browser, run_browser, wait_for
from tests.jobs.airflow_server import Airflow, run_airflow, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

DAGS = Path(__file__).parents[2] / "jobs" / "dags"
AIRFLOW = "SLUICE_AIRFLOW"
POOLS = {"BUILD_POOL": "sluice_builds", "TRAIN_POOL": "sluice_training"}
RUN_S = 1500.0  # One run of a chain, on a busy machine.
FINISHED = ("success", "failed")

BUILD = """
name: shop
sources:
  log:
    path: "log/date={{date}}"
    columns:
      - {{name: user_id, type: int64}}
      - {{name: item_id, type: int64}}
      - {{name: ts, type: int64, unit: ms}}
      - {{name: price, type: float64}}
events: {{source: log, user: user_id, item: item_id, time: ts}}
split: {{strategy: leave_one_out, validation: 20}}
features:
  - {{name: user_id, column: user_id, role: user}}
  - {{name: item_id, column: item_id, role: item}}
  - {{name: price, column: price, role: context, encoding: {{kind: normalize}}}}
output: {{root: "{root}/datasets", shards: 1}}
spark: {{master: "local[1]", driver.memory: 1g}}
"""
TRAIN = """
name: shop
root: "{root}/runs"
dataset: "{root}/datasets/shop"
model: {{name: mf, embedding_dim: 8}}
input: {{batch_size: 64}}
optimizer: {{learning_rate: {rate}}}
fit: {{epochs: 20, early_stopping: null}}
"""


GOOD_RATE, BAD_RATE = 0.05, 5.0


def write_training(root: Path, rate: float) -> None:
    """Somebody writes the config of training, with a learning rate."""
    (root / "train.yaml").write_text(TRAIN.format(root=root, rate=rate))


def write_day(log: Path, day: date, liked: int, price: float) -> None:
    """A day's log: users of four groups meet items of the group that is `liked` places on.

    Args:
        log: The folder of all days.
        day: The day.
        liked: Places.
        price: Mean of the prices.
    """
    rng, start = random.Random(day.toordinal()), (day - date(1970, 1, 1)).days * 86_400_000
    lines, away = [], 0.0
    for user in range(80):
        for event in range(8):
            # In pairs about the mean: it is the same on every day.
            away = -away if event % 2 else rng.gauss(0, 2)
            group = user + liked if rng.random() < 0.9 else rng.randrange(4)
            item = rng.randrange(10) * 4 + group % 4
            lines.append(f"{user}\t{item}\t{start + event * 600_000 + user}\t{price + away}")
    arriving = log / f"date={day}.arriving"
    arriving.mkdir(parents=True)
    (arriving / "log.tsv").write_text("\n".join(lines) + "\n")
    arriving.rename(log / f"date={day}")


@dataclass
class Shop:
    """What the scheduler did, in the order of the story.

    Attributes:
        root: Folder of logs, datasets, runs and models.
        airflow: The scheduler's client.
        days: The three days that the schedule makes up for.
        tasks: By name of the run, its tasks by name.
        runs: By the same names, what Airflow says of the run.
        trained: Finished trainings before anything was repeated.
        versions: Published versions before anything was repeated.
        trained_again: Finished trainings after each repetition of a day.
    """

    root: Path
    airflow: Airflow
    days: list[date]
    tasks: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: int = 0
    versions: int = 0
    trained_again: list[int] = field(default_factory=list)

    def find_run(self, dag: str, run: str) -> dict[str, Any]:
        """What Airflow says of a run."""
        return next(found for found in self.airflow.list_runs(dag) if found["dag_run_id"] == run)

    def wait(self, name: str, dag: str, run: str) -> None:
        """Waits for the end of a run, and keeps what became of it."""
        wait_until(lambda: self.find_run(dag, run)["state"] in FINISHED, RUN_S, f"{dag} {run}")
        self.runs[name], self.tasks[name] = (
            self.find_run(dag, run),
            self.airflow.list_tasks(dag, run),
        )

    def states(self, name: str) -> dict[str, str]:
        """States of the tasks of a run, without the one that tells a failure."""
        found = {task: str(found["state"]) for task, found in self.tasks[name].items()}
        assert found.pop("notify_failure", "skipped") == "skipped"
        return found

    def count_trained(self) -> int:
        """Finished trainings."""
        cards = (self.root / "runs" / "shop" / "runs").glob("*/run_card.json")
        return sum(read_json(card)["status"] == "trained" for card in cards)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    if AIRFLOW not in os.environ:
        pytest.skip(f"{AIRFLOW} is not set: the Python of an environment with Airflow 3.3")
    root = tmp_path_factory.mktemp("scheduler")
    today = datetime.now(UTC).date()
    days = [today - timedelta(days=n) for n in (3, 2, 1)]
    (root / "build.yaml").write_text(BUILD.format(root=root))
    write_training(root, GOOD_RATE)
    command = root / "sluice"
    python = f'PYTHONPATH="{DAGS.parents[1]}" exec "{sys.executable}"'
    command.write_text(f'#!/bin/sh\n{python} -m jobs.cli "$@"\n')
    command.chmod(0o755)
    settings = {
        "COMMAND": command, "DIRECTORY": root, "DATA": root, "DATASET": root / "datasets/shop",
        "MODELS": root / "models", "MODEL": "shop", "RETRY_SECONDS": "15",
        "FIRST_DAY": days[0], "DAILY": "0 0 * * *", "HOURLY": "* * * * *",
        "NOTIFY": f'echo "$MESSAGE" >> {root}/messages', **POOLS,
    }  # fmt: skip
    environment = {f"SLUICE_{name}": str(value) for name, value in settings.items()}
    environment["AIRFLOW__CORE__DAGS_FOLDER"] = str(DAGS)
    with run_airflow(os.environ[AIRFLOW], root / "airflow", environment) as airflow:
        for pool in POOLS.values():
            airflow.ask("/pools", {"name": pool, "slots": 1, "description": "one at a time"})
        found = Shop(root, airflow, days)
        tell_the_days(found)
        repeat_by_hand(found)
        tell_the_hours(found)
        yield found


def tell_the_days(shop: Shop) -> None:
    """The schedule makes up for three days: one's log is late, one is trained badly."""
    airflow, log = shop.airflow, shop.root / "log"
    for day, liked, price in ((shop.days[0], 0, 10.0), (shop.days[2], 1, 30.0)):
        write_day(log, day, liked, price)
    wait_until(lambda: len(airflow.ask("/dags")["dags"]) == 5, 300, "the DAGs")
    airflow.unpause("sluice_daily")
    runs: list[str] = []
    for number in range(3):
        found = wait_until(
            lambda number=number: airflow.list_runs("sluice_daily")[number:],
            RUN_S, f"daily run {number}",
        )  # fmt: skip
        runs.append(found[0]["dag_run_id"])
        if number == 1:
            wait_until(lambda: is_waiting(airflow, runs[1]), RUN_S, "the late day's wait")
            write_day(log, shop.days[1], 1, 20.0)
        shop.wait(f"day {number}", "sluice_daily", runs[number])
        write_training(shop.root, BAD_RATE if number == 1 else GOOD_RATE)


def is_waiting(airflow: Airflow, run: str) -> bool:
    """Whether a run's day was not there yet, so that it is looked for once more."""
    return bool(airflow.list_tasks("sluice_daily", run)["wait"]["state"] == "up_for_retry")


def repeat_by_hand(shop: Shop) -> None:
    """The refused day twice more; then two backfills and a day, all at once."""
    airflow, log = shop.airflow, shop.root / "log"
    shop.trained, shop.versions = (
        shop.count_trained(),
        len(read_versions(shop.root / "models/shop")),
    )
    again = shop.runs["day 2"]["dag_run_id"]
    for name in ("day 2 mended", "day 2 again"):
        airflow.clear("sluice_daily", again)
        shop.wait(name, "sluice_daily", again)
        shop.trained_again.append(shop.count_trained())
    early = shop.days[0] - timedelta(days=1)
    write_day(log, early, 0, 10.0)
    airflow.unpause("sluice_backfill")
    first, second, third = map(str, shop.days)
    one = airflow.trigger("sluice_backfill", {"first": first, "last": second, "refit": True})
    two = airflow.trigger("sluice_backfill", {"first": second, "last": third})
    beside = airflow.trigger("sluice_daily", {"date": str(early)})
    shop.wait("beside", "sluice_daily", beside)
    shop.wait("backfill 1", "sluice_backfill", one)
    shop.wait("backfill 2", "sluice_backfill", two)


def tell_the_hours(shop: Shop) -> None:
    """Minutes instead of hours: the day has no log at first; then it has one."""
    airflow = shop.airflow
    airflow.unpause("sluice_update")
    airflow.unpause("sluice_hourly")
    [early, *_] = wait_until(lambda: airflow.list_runs("sluice_hourly"), RUN_S, "the first hour")
    shop.wait("no log", "sluice_hourly", early["dag_run_id"])
    today = datetime.now(UTC).date()
    for day in (today, today + timedelta(days=1)):  # Midnight may be near.
        write_day(shop.root / "log", day, 2, 20.0)
    built = wait_until(lambda: [r for r in airflow.list_runs("sluice_hourly")
                                if airflow.list_tasks("sluice_hourly", r["dag_run_id"])
                                ["build"]["state"] == "success"],
                       RUN_S, "the first build of the day")  # fmt: skip
    airflow.unpause("sluice_hourly", is_paused=True)
    shop.wait("hour", "sluice_hourly", built[0]["dag_run_id"])
    [update, *_] = wait_until(lambda: airflow.list_runs("sluice_update"), RUN_S, "the update")
    shop.wait("update", "sluice_update", update["dag_run_id"])


def read_days(shop: Shop, version: str) -> tuple[str | None, str | None]:
    """First and last day of a dataset version."""
    run = read_manifest(shop.root / "datasets/shop/versions" / version).run
    assert run is not None
    return run.first_day, run.last_day


def test_the_schedule_makes_up_for_each_day_in_turn(shop: Shop) -> None:
    names = [f"day {number}" for number in range(3)]
    runs = [shop.runs[name] for name in names]
    assert [run["run_type"] for run in runs] == ["scheduled"] * 3
    assert [run["state"] for run in runs] == ["success"] * 3
    assert [run["data_interval_start"][:10] for run in runs] == list(map(str, shop.days))
    for earlier, later in pairwise(runs):
        assert earlier["end_date"] <= later["start_date"]
    assert set(shop.states("day 0").values()) | set(shop.states("day 1").values()) == {"success"}
    exported = [v.dataset_version for v in read_versions(shop.root / "models/shop")[:2]]
    assert [read_days(shop, version) for version in exported] == [
        (str(day), str(day)) for day in shop.days[:2]
    ]


def test_a_late_day_is_waited_for(shop: Shop) -> None:
    tries = {task: found["try_number"] for task, found in shop.tasks["day 1"].items()}
    assert tries.pop("wait") > 1
    assert set(tries.values()) <= {0, 1}  # 0: skipped


def test_the_gate_keeps_back_a_worse_model(shop: Shop) -> None:
    states = shop.states("day 2")
    assert {task for task, state in states.items() if state == "skipped"} == {"gate", "export"}
    assert shop.versions == 2  # of the first two days
    assert "kept by sluice_daily" in (shop.root / "messages").read_text()


def test_a_refused_day_is_repeated_when_its_config_is_mended(shop: Shop) -> None:
    # The config was mended: a model is trained and published. Once more, there is nothing to do.
    for name in ("day 2 mended", "day 2 again"):
        assert shop.runs[name]["state"] == "success"
        assert set(shop.states(name).values()) == {"success"}
    assert shop.trained == 3
    assert shop.trained_again == [4, 4]


def test_numbers_stay_until_a_backfill_fits_them_anew(shop: Shop) -> None:
    found: dict[Any, list[float]] = {}
    for folder in (shop.root / "datasets/shop/versions").iterdir():
        days = read_days(shop, folder.name)
        pipeline = read_pipeline(folder / ENCODERS_DIR, ("price",))
        rows = pa.RecordBatch.from_pydict({"price": pa.array([10.0, 20.0])})
        found[days] = pipeline.apply(rows)["price"].to_pylist()
    first, second, third = map(str, shop.days)
    assert found[first, first] == found[second, second] == found[third, third]
    assert found[first, first][0] == pytest.approx(
        0.0, abs=0.1
    )  # Prices of the first day are near 10.
    refitted = found[first, second]
    assert refitted != found[first, first]
    assert refitted[0] < -0.5 < 0.5 < refitted[1]  # Between those of both days.
    assert found[second, third] == refitted


def test_a_day_and_backfills_that_are_asked_for_together_all_end_well(shop: Shop) -> None:
    for name in ("beside", "backfill 1", "backfill 2"):
        assert shop.runs[name]["state"] == "success"
        states = shop.states(name)
        # A model that is worse than the published one is kept back, by the task that compares.
        assert {states.pop("gate"), states.pop("export")} <= {"success", "skipped"}
        assert set(states.values()) == {"success"}


def test_one_run_of_a_dag_and_one_task_of_a_pool_at_a_time(shop: Shop) -> None:
    runs = [shop.runs["backfill 1"], shop.runs["backfill 2"]]
    assert runs[0]["end_date"] <= runs[1]["start_date"]
    spans: dict[str, set[tuple[str, str]]] = {}
    for dag in ("sluice_daily", "sluice_backfill", "sluice_hourly", "sluice_update"):
        for run in shop.airflow.list_runs(dag):
            for task in shop.airflow.list_tasks(dag, run["dag_run_id"]):
                for found in shop.airflow.list_tries(dag, run["dag_run_id"], task):
                    if found["try_number"] and found["start_date"] and found["end_date"]:
                        span = (found["start_date"], found["end_date"])
                        spans.setdefault(found["pool"], set()).add(span)
    assert set(spans) == set(POOLS.values())
    for pool, taken in spans.items():
        for earlier, later in pairwise(sorted(taken)):
            assert earlier[1] <= later[0], (pool, earlier, later)
    # A day and a backfill were there at once: their tasks had to take turns.
    beside, backfill = shop.runs["beside"], runs[0]
    assert max(beside["start_date"], backfill["start_date"]) < min(
        beside["end_date"], backfill["end_date"]
    )


def test_an_hour_without_a_log_is_skipped_and_a_build_starts_the_update(shop: Shop) -> None:
    assert shop.runs["no log"]["run_type"] == shop.runs["hour"]["run_type"] == "scheduled"
    assert set(shop.states("no log").values()) == {"skipped"}
    assert set(shop.states("hour").values()) == {"success"}
    assert shop.runs["update"]["run_type"] == "asset_triggered"
    assert shop.runs["update"]["state"] == "success"
    assert set(shop.states("update").values()) == {"success"}  # A new taste: the model is better.
    assert "published by sluice_update" in (shop.root / "messages").read_text()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with run_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def test_a_browser_shows_the_graph_and_what_a_task_said(shop: Shop, browser: Browser) -> None:
    run = shop.runs["day 1"]["dag_run_id"]
    page = f"{shop.airflow.url}/dags/sluice_daily/runs/{run}"
    browser.open(page)
    browser.run('localStorage.setItem("default_dag_view", JSON.stringify("graph"))')
    browser.open(page)
    nodes = (
        "return [...document.querySelectorAll('.react-flow__node')].map(node => node.dataset.id)"
    )
    wait_for(lambda: set(shop.tasks["day 1"]) <= set(browser.run(nodes)))
    browser.open(f"{page}/tasks/wait?try_number=1")
    wait_for(lambda: "return code 4" in "\n".join(browser.read("body")))
