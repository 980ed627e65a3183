"""The epochs of a run in TensorBoard: scalars, and histograms where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from training.disk_errors import disk_errors
from training.history import EpochRecord


class EpochLog:
    """Writes one point per epoch and metric, and one histogram per epoch and weight.

    Args:
        directory: Directory of the event files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with self._errors():
            self._writer = tf.summary.create_file_writer(str(directory))

    def write(
        self, record: EpochRecord, step: int, samples: Mapping[str, tf.Tensor] | None = None
    ) -> None:
        """Writes an epoch, through to the disk.

        Args:
            record: What the epoch gave.
            step: Updates so far.
            samples: Values by tag, each shown as a histogram; None: no histograms.

        Raises:
            InternalError: The event file cannot be written.
        """
        with self._errors():
            with self._writer.as_default(step=step):
                tf.summary.scalar("train/loss", record.loss)
                tf.summary.scalar("train/examples_per_s", record.examples_per_s)
                tf.summary.scalar("train/input_wait_share", record.input_wait_share)
                for name, value in record.validation.items():
                    tf.summary.scalar(f"validation/{name}", value)
                for tag, values in (samples or {}).items():
                    tf.summary.histogram(tag, values)
            self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        with self._errors():
            self._writer.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with disk_errors(
            f"cannot write the TensorBoard log {self._directory}; the checkpoints are untouched",
            "free some space (or check the permissions), then go on with --resume",
        ):
            yield
