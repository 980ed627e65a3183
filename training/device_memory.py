"""How much of the GPUs' memory a run has taken."""

from __future__ import annotations

import tensorflow as tf


def peak_device_memory_bytes(kind: str = "GPU") -> dict[str, int]:
    """Returns the most memory that TensorFlow has held on each device of this process, in bytes.

    Args:
        kind: Kind of device. The memory of GPUs is always counted, that of CPUs (else 0) once
            something such as a profile has asked TensorFlow for it.

    Returns:
        Bytes by device, such as `gpu 0`; empty where there is none.
    """
    names = [
        device.name.removeprefix("/device:") for device in tf.config.list_logical_devices(kind)
    ]
    return {
        name.lower().replace(":", " "): int(tf.config.experimental.get_memory_info(name)["peak"])
        for name in names
    }
