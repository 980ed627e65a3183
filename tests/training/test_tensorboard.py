from __future__ import annotations

import resource
from pathlib import Path

import pytest
import tensorflow as tf

from conf.errors import InternalError
from training.history import EpochRecord
from training.tensorboard import EpochLog

RECORD = EpochRecord(1, 0.5, 2.0, 100, 50.0, 0.25, {"mrr": 0.125})


def test_an_epoch_is_one_point_per_metric(tmp_path: Path) -> None:
    log = EpochLog(tmp_path)
    log.write(RECORD, 7)
    log.close()
    (file,) = tmp_path.glob("events.*")
    points = {
        value.tag: (event.step, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert points == {
        "train/loss": (7, 0.5),
        "train/examples_per_s": (7, 50.0),
        "train/input_wait_share": (7, 0.25),
        "validation/mrr": (7, 0.125),
    }


def test_samples_become_histograms(tmp_path: Path) -> None:
    log = EpochLog(tmp_path)
    log.write(RECORD, 7, {"row_norms/movie_id": tf.constant([0.0, 1.0, 1.0])})
    log.close()
    (file,) = tmp_path.glob("events.*")
    (buckets,) = [
        tf.make_ndarray(value.tensor)  # [buckets, 3]: left, right, count
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag == "row_norms/movie_id"
    ]
    assert buckets[:, 2].sum() == 3
    assert buckets[0, 0] == 0.0
    assert buckets[-1, 1] == 1.0


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = EpochLog(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # every write beyond fails
    try:
        with pytest.raises(InternalError, match="TensorBoard"):
            log.write(RECORD, 7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InternalError, match="TensorBoard"):
        EpochLog(tmp_path / "file" / "logs")
