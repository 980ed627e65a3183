"""How much of the devices' memory a run has taken, and what it says where there is too little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from conf.errors import InternalError
from training.disk_errors import describe_error

# TensorFlow raises one error for memory and for disks.
_FULL_DISK = "No space left on device"


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


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns a lack of memory inside the block into an error that says what takes less.

    Raises:
        InternalError: A device, or the machine, has too little memory.
    """
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        if _FULL_DISK in str(error):
            raise
        raise InternalError(
            "there is too little memory for this model and its batches",
            received=describe_error(error),
            fix="lower input.batch_size, or raise optimizer.accumulate_steps (a batch in parts); "
            "for tables, lower model.embedding_dim or the capacity of dynamic ones, or use "
            "devices.strategy=parameter_server; with more memory, --resume goes on",
        ) from error
