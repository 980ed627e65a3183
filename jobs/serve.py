"""`sluice serve`: exported models over HTTP, on the loopback address by default."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import ConfigError
from jobs.support.processes import Supervisor
from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging
from training.serving.limits import CallLimits, ConnectionLimits, RequestLimits, ServerLimits

if TYPE_CHECKING:
    from uvicorn import Config

    from training.serving.access import Access, Application
    from training.serving.server_config import ServerConfig

app = typer.Typer(add_completion=False)

DEFAULTS = ServerLimits()
BACKLOG = 256
"""Connections that are taken in one go."""
OTHER_FILES = 256
"""Open files beside those of connections."""
PAGES_DIR = "pages"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - folders of an unknown name are made in it
SHARED_COUNTS = "PROMETHEUS_MULTIPROC_DIR"
"""Where Prometheus keeps the counts of all processes; read when it is imported."""
KINDS = 1000
"""Kinds of messages that are counted."""


_REQUEST, _CONNECTIONS = DEFAULTS.request, DEFAULTS.connections


@app.command()
def main(
    models: Annotated[
        str, typer.Option(help="Directory of models: `export --to`, also in s3://, gs:// or az://.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8501,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of gRPC calls too; default: none.")
    ] = None,
    retrieval: Annotated[
        str | None, typer.Option(help="Model that retrieves; needed where there are several.")
    ] = None,
    ranker: Annotated[
        str | None, typer.Option(help="Model that ranks; needed where there are several.")
    ] = None,
    no_ranker: Annotated[
        bool, typer.Option("--no-ranker", help="Lists of the retrieval model alone.")
    ] = False,
    items: Annotated[
        Path | None,
        typer.Option(help="Titles and columns of items; the first column is the key."),
    ] = None,
    blocked: Annotated[
        Path | None, typer.Option(help="Keys of items that are never recommended, one a line.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.1, help="Seconds between looks for versions.")] = 2.0,
    verify: Annotated[
        bool, typer.Option(help="Compare the SHA-256 of each file of a version with its export.")
    ] = True,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Further name that it may be asked by; *: any; repeat for several."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of a token that requests must bring; default: none.")
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Show pages about the API at /docs.")] = (
        False
    ),
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that answer; weights and vectors are shared.")
    ] = 1,
    threads: Annotated[
        int, typer.Option(min=1, help="Calls of models at the same time, of each process.")
    ] = 2,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Longest body of a request.")] = (
        DEFAULTS.body_bytes >> 20
    ),
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of a request.")] = _REQUEST.rows,
    max_candidates: Annotated[
        int, typer.Option(min=1, help="Most candidates of a request, of all its rows together.")
    ] = _REQUEST.pairs,
    max_values: Annotated[
        int, typer.Option(min=1, help="Most values of a request: rows x candidates x length.")
    ] = _REQUEST.values,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Most connections at a time, of each process.")
    ] = _CONNECTIONS.count,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a body to arrive, and for an answer.")
    ] = DEFAULTS.seconds,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Answer TensorFlow Serving's REST API, /v1/recommend, and people who open / in a browser."""
    from training.export.stored_models import find_place
    from training.serving.access import Access, read_token
    from training.serving.server_config import RecommendConfig, ServerConfig

    setup_logging(log_format)
    if no_ranker and ranker is not None:
        raise ConfigError(
            "--ranker names what orders lists, and --no-ranker says that nothing does",
            received=f"--ranker {ranker} --no-ranker",
            fix="leave one of them out",
        )
    if grpc_port is not None and grpc_port == port:
        raise ConfigError(
            "HTTP and gRPC cannot have one port",
            received=f"--port {port} --grpc-port {grpc_port}",
            fix="choose another --grpc-port",
        )
    limit_log()
    signal.signal(signal.SIGTERM, _stop)  # While models load; later uvicorn drains first.
    access = Access(
        host, tuple(allow_host or ()), None if token_file is None else read_token(token_file), docs
    )
    limits = ServerLimits(
        max_body_mb << 20,
        timeout,
        RequestLimits(max_rows, max_candidates, max_values),
        CallLimits(threads),
        ConnectionLimits(max_connections),
    )
    recommend = RecommendConfig(retrieval, ranker, items, blocked, not no_ranker)
    config = ServerConfig(find_place(models), poll, limits, recommend, verify)
    serving = Serving(config, access, grpc_port, log_format)
    with bind_socket(host, port) as listener:  # A port that is taken is said before models load.
        if grpc_port is not None:
            bind_socket(host, grpc_port).close()
        allow_files(max_connections)
        if processes == 1:
            return serve(serving, listener, partial(print, flush=True))
        with share_folder() as folder:
            serving = replace(serving, config=replace(config, pages=folder / PAGES_DIR))
            work = partial(serve_process, serving, listener)
            supervisor = Supervisor(work, processes, forget_counts)
            return supervisor.run(lambda text: print(f"{text}, {processes} processes", flush=True))


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


class LogLimit(logging.Filter):
    """Lets some messages of each kind pass in a while, and counts the others.

    A kind is a message without its arguments. The first message after a while says how many of
    its kind were left out.

    Args:
        most: Messages of a kind that pass in a while.
        seconds: How long a while is.
    """

    def __init__(self, most: int = 10, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message passes."""
        kind = (record.name, str(record.msg)[:200])
        start, count = self._kinds.get(kind, (record.created, 0))
        left_out = 0
        if record.created - start >= self._seconds:
            start, left_out, count = record.created, max(0, count - self._most), 0
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self._kinds.clear()
        self._kinds[kind] = (start, count + 1)
        if count >= self._most:
            return False
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more of this kind, left out)"
        return True


def limit_log() -> None:
    """Limits how much of what clients cause is logged."""
    for name in ("sluice.training.serving", "uvicorn.error", "asyncio", "grpc._cython.cygrpc"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, LogLimit) for one in logger.filters):
            logger.addFilter(LogLimit())


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, not listening yet.

    Raises:
        ConfigError: The address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends each answer at once (TCP_NODELAY).
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(
            "cannot listen at this address",
            received=f"{host}:{port}: {error.strerror or error}",
            fix="choose another by --host and --port; --port 0 takes any free one",
        ) from error
    return found


def _stop(*_: Any) -> None:
    """Ends the process: uvicorn raises the signal again when all requests are answered."""
    raise SystemExit(0)


@dataclass(frozen=True)
class Serving:
    """What a process of the server does.

    Attributes:
        config: What it serves.
        access: Who may ask.
        grpc_port: Port of gRPC; None: none.
        log_format: How progress is written.
    """

    config: ServerConfig
    access: Access
    grpc_port: int | None = None
    log_format: LogFormat = LogFormat.TEXT


@contextmanager
def share_folder() -> Iterator[Path]:
    """Gives processes a folder of what they share, removed at the end; in `TMPDIR`, as all such."""
    # Files of counts are sparse: a full disk would end a process that writes to them.
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="sluice-serve-", ignore_cleanup_errors=True) as name,
        tempfile.TemporaryDirectory(
            prefix="sluice-counts-", dir=memory, ignore_cleanup_errors=True
        ) as counts,
    ):
        os.environ[SHARED_COUNTS] = counts
        yield Path(name)


def forget_counts(process: int) -> None:
    """Takes a process that has ended out of the gauges of all."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(process)


def serve_process(serving: Serving, listener: socket.socket, tell: Callable[[str], None]) -> int:
    """Serves in a process of its own; mistakes end in a message and an exit code."""
    from jobs.support.run_app import run_reported

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

        from training.serving.app import Server, build_app

    server = Server(serving.config)
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    beside, also = None, ""
    if serving.grpc_port is not None:
        from training.serving.prediction_service import run_service

        beside = run_service(
            server,
            f"{host}:{serving.grpc_port}",
            serving.access,
            shares_port=serving.config.pages is not None,
        )
        also = f", by gRPC at {host}:{serving.grpc_port}"
    # What is loaded stays: a collection of what requests leave need not look at it, and the second
    # one tells Python how little else there is, so that it collects that soon.
    gc.collect()
    gc.freeze()
    gc.collect()
    config = build_config(build_app(server, serving.access, beside), server.limits)
    tell(f"serving {', '.join(server.store.names)} at http://{host}:{port}{also}")
    uvicorn.Server(config).run(sockets=[listener])
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
        log_level="warning",
        access_log=False,
        timeout_keep_alive=round(limits.connections.idle_seconds),
        timeout_graceful_shutdown=int(2 * limits.seconds),
        server_header=False,
    )


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
