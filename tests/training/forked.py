"""Processes forked from one that has imported TensorFlow, which takes longest of all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

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
