"""`sluice serve`: exported models over HTTP, on the loopback address by default."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import ConfigError
from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging

if TYPE_CHECKING:
    from training.serving.app import Server

app = typer.Typer(add_completion=False)

HEADER_BYTES, BACKLOG = 1 << 16, 2048


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
    items: Annotated[
        Path | None,
        typer.Option(help="Titles and columns of items; the first column is the key."),
    ] = None,
    blocked: Annotated[
        Path | None, typer.Option(help="Keys of items that are never recommended, one a line.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.1, help="Seconds between looks for versions.")] = 2.0,
    threads: Annotated[int, typer.Option(min=1, help="Calls of models at the same time.")] = 2,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Longest body of a request.")] = 16,
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of a request.")] = 1024,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a body to arrive, and for an answer.")
    ] = 30.0,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Answer TensorFlow Serving's REST API, /v1/recommend, and people who open / in a browser."""
    from training.stored_models import find_place

    setup_logging(log_format)
    signal.signal(signal.SIGTERM, _stop)  # While models load; later uvicorn drains first.
    with quiet_tensorflow():
        from training.serving.app import Server, ServerConfig, ServerLimits
        from training.serving.batching import BatchLimits
        from training.serving.recommend import RecommendConfig
    limits = ServerLimits(max_body_mb << 20, timeout, BatchLimits(threads, max_rows))
    recommend = RecommendConfig(retrieval, ranker, items, blocked)
    with bind_socket(host, port) as listener:  # A port that is taken is said before models load.
        if grpc_port is not None:
            bind_socket(host, grpc_port).close()
        server = Server(ServerConfig(find_place(models), poll, limits, recommend))
        run_server(server, listener, grpc_port)
    return 0


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


def run_server(server: Server, listener: socket.socket, grpc_port: int | None = None) -> None:
    """Answers requests until SIGTERM or Ctrl-C; those that have begun are answered first."""
    import uvicorn

    from training.serving.app import build_app

    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    beside = None
    if grpc_port is not None:
        from training.serving.prediction_service import run_service

        beside = run_service(server, f"{host}:{grpc_port}")
    config = uvicorn.Config(
        build_app(server, beside),
        log_level="warning",
        access_log=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=int(2 * server.limits.seconds),
        server_header=False,
    )
    also = "" if grpc_port is None else f", by gRPC at {host}:{grpc_port}"
    print(f"serving {', '.join(server.store.names)} at http://{host}:{port}{also}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))
