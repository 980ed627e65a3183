"""Processes forked from one that has imported TensorFlow, which takes longest of all."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from conf.errors import SluiceError

# What their processes run: all at once, as there is one process to fork from.
MODULES = [
    f"tests.training.{name}" for name in ("killed_run", "replica_steps", "server_run", "worker_run")
]


def start_forked(target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Starts a process in which TensorFlow is imported, but has not started yet.

    Args:
        target: A function of one of the modules above.
        arguments: What it is called with.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


@dataclass(frozen=True)
class ClusterTask:
    """What one process of a cluster does.

    Attributes:
        config: File of the config.
        tf_config: `TF_CONFIG`.
        errors: Where its standard error goes.
        resume: Whether to go on with the run.
    """

    config: Path
    tf_config: str
    errors: Path
    resume: bool

    @contextmanager
    def in_cluster(self) -> Iterator[None]:
        """Makes this process that one; what Sluice refuses ends it as it ends a command."""
        os.environ["TF_CONFIG"] = self.tf_config
        os.dup2(os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            yield
        except SluiceError as error:
            print(error.render(), file=sys.stderr)
            sys.exit(error.exit_code)
