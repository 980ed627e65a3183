"""Processes of tests: free ports of this machine, and forks that have imported TensorFlow."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from conf.errors import SluiceError

# Kept to the end of this process.
_HELD: list[socket.socket] = []


def find_addresses(count: int) -> list[str]:
    """Returns free ports of the loopback device as `host:port`.

    They are bound, so that no other process is given one of them before its own has started, and
    nobody listens on them: who is to have one can bind it too, as servers set `SO_REUSEADDR`.
    """
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    _HELD.extend(held)
    return [f"127.0.0.1:{one.getsockname()[1]}" for one in held]


# What their processes run: all at once, as there is one process to fork from.
MODULES = [f"tests.training.{name}" for name in ("killed_run", "replica_steps", "worker_run")]


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
