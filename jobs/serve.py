"""`sluice serve`: exported models over HTTP, on the loopback address by default."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging

if TYPE_CHECKING:
    from training.serving.app import Server

app = typer.Typer(add_completion=False)

HEADER_BYTES = 1 << 16


@app.command()
def main(
    models: Annotated[Path, typer.Option(help="Directory of models: `export --to`.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8501,
    retrieval: Annotated[
        str | None, typer.Option(help="Model that retrieves; needed where there are several.")
    ] = None,
    ranker: Annotated[
        str | None, typer.Option(help="Model that ranks; needed where there are several.")
    ] = None,
    items: Annotated[
        Path | None, typer.Option(help="Titles and columns of items; the first column is the key.")
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
    setup_logging(log_format)
    signal.signal(signal.SIGTERM, _stop)  # While models load; later uvicorn drains first.
    with quiet_tensorflow():
        from training.serving.app import Server, ServerConfig, ServerLimits
        from training.serving.batching import BatchLimits
        from training.serving.recommend import RecommendConfig
    limits = ServerLimits(max_body_mb << 20, timeout, BatchLimits(threads, max_rows))
    recommend = RecommendConfig(retrieval, ranker, items, blocked)
    server = Server(ServerConfig(models, poll, limits, recommend))
    run_server(server, host, port)
    return 0


def _stop(*_: Any) -> None:
    """Ends the process: uvicorn raises the signal again when all requests are answered."""
    raise SystemExit(0)


def run_server(server: Server, host: str, port: int) -> None:
    """Answers requests until SIGTERM or Ctrl-C; those that have begun are answered first."""
    import uvicorn

    from training.serving.app import build_app

    config = uvicorn.Config(
        build_app(server),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=int(2 * server.limits.seconds),
        server_header=False,
    )
    socket = config.bind_socket()
    socket.listen(config.backlog)
    address = f"http://{host}:{socket.getsockname()[1]}"
    print(f"serving {', '.join(server.store.names)} at {address}", flush=True)
    uvicorn.Server(config).run(sockets=[socket])


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))
