from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from conf.errors import InternalError
from training.distribution.workers import (
    disk_errors,
    memory_errors,
    peak_device_memory_bytes,
)


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


@pytest.mark.gpu
def test_what_a_gpu_has_held_is_counted() -> None:
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("there is no GPU")
    tensor = tf.zeros([1 << 20]) + 1.0
    assert peak_device_memory_bytes()["gpu 0"] >= tensor.shape.num_elements() * 4


@pytest.mark.exhaustive
def test_too_little_memory_is_told_with_what_takes_less() -> None:
    with pytest.raises(InternalError, match="too little memory") as caught, memory_errors():
        tf.zeros([1 << 46])  # 256 TiB: more than a process can address.
    assert "OOM when allocating tensor" in caught.value.render()
    assert "input.batch_size" in caught.value.render()


def test_a_full_disk_is_no_lack_of_memory() -> None:
    full = tf.errors.ResourceExhaustedError(None, None, "a/b; No space left on device")
    with pytest.raises(tf.errors.ResourceExhaustedError), memory_errors():
        raise full


ENDS_WITHIN_S = 600


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["shards", "keys"])
def test_a_script_may_end_with_a_half_read_iterator(kind: str, tiny_version: Path) -> None:
    script = [sys.executable, "-m", "tests.training.open_iterator", kind, str(tiny_version)]
    ended = subprocess.run(
        script, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-2000:]
