from __future__ import annotations

import pytest
import tensorflow as tf

from conf.errors import InternalError
from training.device_memory import memory_errors, peak_device_memory_bytes


def test_devices_are_named_and_asked_by_names_that_tensorflow_knows() -> None:
    found = peak_device_memory_bytes("CPU")
    assert set(found) == {
        f"cpu {number}" for number, _ in enumerate(tf.config.list_logical_devices("CPU"))
    }
    # TensorFlow counts the memory of CPUs only once something has asked it to, such as a profile.
    assert all(held >= 0 for held in found.values())


def test_the_peak_is_told_and_not_what_is_held_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(name: str) -> dict[str, int]:
        return {"current": 5, "peak": 7 if name == "CPU:0" else 9}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", get)
    assert peak_device_memory_bytes("CPU")["cpu 0"] == 7


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    assert peak_device_memory_bytes() == {}


@pytest.mark.gpu
def test_what_a_gpu_has_held_is_counted() -> None:
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("there is no GPU")
    tensor = tf.zeros([1 << 20]) + 1.0
    assert peak_device_memory_bytes()["gpu 0"] >= tensor.shape.num_elements() * 4


def test_too_little_memory_is_told_with_what_takes_less() -> None:
    with pytest.raises(InternalError, match="too little memory") as caught, memory_errors():
        tf.zeros([1 << 46])  # 256 TiB: more than a process can address.
    assert "OOM when allocating tensor" in caught.value.render()
    assert "input.batch_size" in caught.value.render()


def test_a_full_disk_is_no_lack_of_memory() -> None:
    full = tf.errors.ResourceExhaustedError(None, None, "a/b; No space left on device")
    with pytest.raises(tf.errors.ResourceExhaustedError), memory_errors():
        raise full
