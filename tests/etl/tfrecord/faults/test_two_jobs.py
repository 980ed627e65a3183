"""Jobs that write to one directory at the same time, each in a driver of its own or a thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from conf.errors import SluiceError, UpstreamNotReadyError
from etl.tfrecord.commit.output_directory import read_output_manifest
from tests.etl.tfrecord.faults.conftest import Driver, check_output


def wait_at(gate: str):
    """Passes batches on once a file is there, or gives up."""

    def pass_on(batches):
        for batch in batches:
            end = time.monotonic() + 600
            while not Path(gate).exists() and time.monotonic() < end:
                time.sleep(0.02)
            yield batch

    return pass_on


class Job(threading.Thread):
    """A write that waits at a gate inside its tasks."""

    def __init__(self, spark, root: Path, rows: range, mode: str, gate: Path) -> None:
        super().__init__()
        frame = spark.range(rows.start, rows.stop, 1, 1)
        self.frame = frame.mapInArrow(wait_at(str(gate)), frame.schema)
        self.root, self.mode = root, mode
        self.error: SluiceError | None = None

    def run(self) -> None:
        from etl.tfrecord.spark.frames import write_tfrecords

        try:
            write_tfrecords(self.frame, self.root, mode=self.mode)
        except SluiceError as error:
            self.error = error


@pytest.mark.parametrize(
    ("mode", "wins"), [("overwrite", False), ("errorifexists", False), ("append", True)]
)
def test_a_job_meets_one_that_was_faster(spark, tmp_path: Path, mode: str, wins: bool) -> None:
    from etl.tfrecord.spark.frames import write_tfrecords

    out, gate = tmp_path / "out", tmp_path / "gate"
    slow = Job(spark, out, range(100), mode, gate)
    slow.start()
    end = time.monotonic() + 600
    while not list(out.glob("_temporary-*/part-*")) and time.monotonic() < end:
        time.sleep(0.02)
    quick = write_tfrecords(spark.range(100, 110, 1, 1), out, mode="append")
    gate.touch()
    slow.join()
    if wins:
        assert slow.error is None
        check_output(out, 110)
    else:
        assert isinstance(slow.error, UpstreamNotReadyError)
        assert quick.shards[0].job_id in str(slow.error)
        assert read_output_manifest(out) == quick
        check_output(out, 10)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_drivers_append_at_once(start_driver, local_driver: Driver, tmp_path: Path) -> None:
    other = start_driver("local[2]").wait_ready()
    out = tmp_path / "out"
    for k, driver in enumerate((local_driver, other)):
        rows = {"start": k * 5000, "rows": (k + 1) * 5000, "sleep_ms": 300, "sleep_every": 250}
        driver.send(path=str(out), mode="append", **rows)
    end = time.monotonic() + 600
    while len(list(out.glob("_temporary-*"))) < 2:  # Both have begun, and neither has committed.
        assert time.monotonic() < end, "the writes did not meet"
        time.sleep(0.02)
    assert [local_driver.receive(), other.receive()] == [{}, {}]
    check_output(out, 10_000)
