from __future__ import annotations

import pytest
import tensorflow as tf

from conf.errors import InternalError
from training.workers import Workers, lost_worker_errors

LOST = tf.errors.UnavailableError(None, None, "Graph\nCollective ops is aborted by: task 1\nmore")


@pytest.fixture
def alone() -> Workers:
    return Workers(tf.distribute.get_strategy())


def test_one_process_agrees_with_itself(alone: Workers) -> None:
    assert alone.is_chief
    assert alone.count == 1
    assert alone.any(True)
    assert not alone.any(False)
    decision = object()  # nothing has to travel, so it may be anything
    assert alone.share(lambda: decision) is decision


def test_a_lost_worker_says_what_to_do(alone: Workers) -> None:
    with pytest.raises(tf.errors.UnavailableError), lost_worker_errors(alone):
        raise LOST
    alone.count = 2
    message = r"aborted by: task 1\n.*--resume"
    with pytest.raises(InternalError, match=message), lost_worker_errors(alone):
        raise LOST


def test_errors_of_training_pass(alone: Workers) -> None:
    alone.count = 2
    with pytest.raises(InternalError, match=r"^full$"), lost_worker_errors(alone):
        raise InternalError("full")
