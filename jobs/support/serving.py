"""A server's processes: what they listen at, what they share, and how each answers."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError
from conf.storage.locks import hold_folder
from jobs.support.processes import Supervisor
from jobs.support.run_app import run_reported
from jobs.support.terminal import LogFormat, quiet_tensorflow, setup_logging
from training.serving.log_limit import limit_log
from training.serving.models.server_config import SHARED_COUNTS
from training.serving.requests.limits import ServerLimits

if TYPE_CHECKING:
    from uvicorn import Config

    from training.serving.access import Access, Application
    from training.serving.models.server_config import ServerConfig

BACKLOG = 256
"""Connections that are taken in one go."""
OTHER_FILES = 256
"""Open files beside those of connections."""
PAGES_DIR = "pages"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders of an unknown name are made in it


@dataclass(frozen=True)
class Serving:
    """What a process of the server does.

    Attributes:
        config: What it serves.
        access: Who may ask.
        log_format: How progress is written.
    """

    config: ServerConfig
    access: Access
    log_format: LogFormat = LogFormat.TEXT


def run_server(serving: Serving, host: str, port: int, processes: int) -> int:
    """Answers requests, by one process or several, until SIGTERM or Ctrl-C; returns the exit code.

    Raises:
        ConfigError: A port is taken, or the machine cannot have as many connections.
    """
    tell = build_teller(serving.log_format)
    signal.signal(signal.SIGTERM, _stop)  # While models load; later the server ends by itself.
    with bind_socket(host, port) as listener:  # A port that is taken is said before models load.
        allow_files(serving.config.limits.connections.count)
        if processes == 1:
            return serve(serving, listener, tell)
        with share_folder() as folder:
            shared = replace(serving, config=replace(serving.config, pages=folder / PAGES_DIR))
            work = partial(serve_process, shared, listener)
            # Whoever has the socket is sent connections: none when the processes have ended.
            supervisor = Supervisor(work, processes, forget_counts, listener.close)
            return supervisor.run(lambda text: tell(f"{text}, {processes} processes"))


def allow_files(connections: int) -> None:
    """Raises the number of files that the process may open, for its connections.

    Raises:
        ConfigError: It may not have as many.
    """
    wanted = 2 * connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            "the process may not open as many files as its connections need",
            received=f"--max-connections {connections}, which takes {wanted} files",
            allowed=f"{hard} files (ulimit -Hn)",
            fix=f"--max-connections {max(1, (hard - OTHER_FILES) // 2)}, or raise the limit",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, not listening yet.

    Args:
        host: The address.
        port: Its port.

    Raises:
        ConfigError: The address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends each answer at once (TCP_NODELAY).
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            "cannot listen at this address",
            received=f"{host}:{port}: {error.strerror or error}",
            fix="choose another by --host or --port",
        ) from error
    return bound


def build_teller(log_format: LogFormat) -> Callable[[str], None]:
    """Returns what says where the server answers: standard output, or a log of JSON."""
    if log_format is LogFormat.JSON:
        return logging.getLogger("sluice.jobs").info
    return partial(print, flush=True)


def _stop(*_: Any) -> None:
    """Ends the process."""
    raise SystemExit(0)


@contextmanager
def share_folder() -> Iterator[Path]:
    """Gives processes a folder of what they share, in `TMPDIR`."""
    # Files of counts are sparse: a full disk would end a process that writes to them.
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with hold_folder("sluice-serve-") as folder, hold_folder("sluice-counts-", memory) as counts:
        os.environ[SHARED_COUNTS] = str(counts)
        yield folder


def forget_counts(process: int) -> None:
    """Takes a process that has ended out of the gauges of all."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(process)


def serve_process(serving: Serving, listener: socket.socket, tell: Callable[[str], None]) -> int:
    """Serves in a process of its own; mistakes end in a message and an exit code."""
    setup_logging(serving.log_format)
    limit_log()
    signal.signal(signal.SIGTERM, _stop)
    return run_reported(
        partial(serve, serving, listener, tell), serving.log_format is LogFormat.JSON
    )


def serve(serving: Serving, listener: socket.socket, tell: Callable[[str], None]) -> int:
    """Answers requests until SIGTERM or Ctrl-C; those that have begun are answered first.

    Args:
        serving: What is served.
        listener: Where connections come in.
        tell: Given what answers where, as soon as it does.
    """
    with quiet_tensorflow():
        import uvicorn

        from training.serving.app import build_app
        from training.serving.server import Server

    server = Server(serving.config)
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    # What is loaded stays: a collection of what requests leave need not look at it, and the second
    # one tells Python how little else there is, so that it collects that soon.
    gc.collect()
    gc.freeze()
    gc.collect()
    config = build_config(build_app(server, serving.access), server.limits)
    runner = uvicorn.Server(config)

    def stop(*_: Any) -> None:
        """Ends the server, also where uvicorn raises a signal again."""
        runner.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    tell(f"serving {', '.join(server.store.names)} at http://{host}:{port}")
    runner.run(sockets=[listener])
    return 0


def build_config(app: Application, limits: ServerLimits) -> Config:
    """Builds the configuration of uvicorn, with limits of connections."""
    from uvicorn import Config

    from training.serving.connections import build_protocol

    return Config(
        app,
        http=build_protocol(limits.connections),
        loop="uvloop",
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=round(limits.connections.idle_seconds),
        timeout_graceful_shutdown=int(2 * limits.seconds),
        server_header=False,
    )
