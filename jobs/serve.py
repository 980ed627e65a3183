"""`sluice serve`: exported models over HTTP, on the loopback address by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conf.errors import ConfigError
from conf.local_paths import local_path
from jobs.support.serving import Serving, read_token, run_server
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from training.serving.limits import CallLimits, RequestLimits, ServerLimits

app = typer.Typer(add_completion=False)

DEFAULTS = ServerLimits()


@app.command()
def main(
    export: Annotated[
        str, typer.Option(help="A version, a model, or a folder of models; also a store's URI.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8501,
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
        typer.Option(
            parser=local_path, help="Titles and columns of items; the first column is the key."
        ),
    ] = None,
    blocked: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="Keys of items that are never recommended, one a line."
        ),
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
        Path | None,
        typer.Option(
            parser=local_path, help="File of a token that requests must bring; default: none."
        ),
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Show pages about the API at /docs.")] = (
        False
    ),
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that answer; weights and vectors are shared.")
    ] = 1,
    threads: Annotated[
        int, typer.Option(min=1, help="Calls of models at the same time, of each process.")
    ] = DEFAULTS.calls.threads,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Longest body of a request.")] = (
        DEFAULTS.body_bytes >> 20
    ),
    max_candidates: Annotated[
        int, typer.Option(min=1, help="Most candidates of a request, of all its rows together.")
    ] = DEFAULTS.request.pairs,
    max_values: Annotated[
        int, typer.Option(min=1, help="Most values of a request: rows x candidates x length.")
    ] = DEFAULTS.request.values,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a body to arrive, and for an answer.")
    ] = DEFAULTS.seconds,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Answer TensorFlow Serving's REST API, /v1/recommend, and people who open / in a browser."""
    from training.export.stored_models import find_place
    from training.serving.access import Access
    from training.serving.server_config import RecommendConfig, ServerConfig

    setup_logging(log_format)
    if no_ranker and ranker is not None:
        raise ConfigError(
            "--ranker names what orders lists, and --no-ranker says that nothing does",
            received=f"--ranker {ranker} --no-ranker",
            fix="leave one of them out",
        )
    token = None if token_file is None else read_token(token_file)
    access = Access(host, tuple(allow_host or ()), token, docs)
    request = RequestLimits(pairs=max_candidates, values=max_values)
    limits = ServerLimits(max_body_mb << 20, timeout, request, CallLimits(threads))
    recommend = RecommendConfig(retrieval, ranker, items, blocked, not no_ranker)
    config = ServerConfig(find_place(export), poll, limits, recommend, verify)
    return run_server(Serving(config, access, log_format), host, port, processes)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
