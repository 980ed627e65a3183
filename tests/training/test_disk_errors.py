from __future__ import annotations

import pytest
import tensorflow as tf

from conf.errors import ConfigError, InternalError
from training.disk_errors import describe_error, disk_errors


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        tf.errors.ResourceExhaustedError(None, None, "No space left on device\nmore"),
    ],
)
def test_a_failed_write_says_what_and_how_to_go_on(error: Exception) -> None:
    with pytest.raises(InternalError) as caught, disk_errors("cannot write it", "free space"):
        raise error
    assert caught.value.what == "cannot write it"
    assert caught.value.fix == "free space"
    assert "No space left" in str(caught.value.received)
    assert "more" not in str(caught.value.received)


def test_what_tensorflow_writes_around_a_message_is_left_out() -> None:
    text = "{{function_node __wrapped__SaveV2_CPU:0}} a/state; No space left on device [Op:SaveV2]"
    error = tf.errors.ResourceExhaustedError(None, None, text)
    assert describe_error(error) == "a/state; No space left on device"


def test_other_errors_pass() -> None:
    with pytest.raises(ConfigError), disk_errors("cannot write it", "free space"):
        raise ConfigError("wrong")


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    assert describe_error(AssertionError()) == "AssertionError"
