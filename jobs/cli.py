"""The `sluice` command: one subcommand per job, each imported only when it is called."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer

from conf.errors import (
    ConfigError,
    ExitCode,
    InternalError,
    SluiceError,
    TrainingInterruptedError,
    did_you_mean,
    install_hint,
    read_code_version,
    render_event,
    was_interrupted,
)

# Which extra brings a package that a subcommand may find missing.
EXTRAS = {
    "pyspark": "etl",
    "py4j": "etl",
    "sqlglot": "etl",
    "pandas": "etl",
    "tensorflow": "training",
    "keras": "training",
    "keras_rs": "training",
    "tensorflow_serving": "training",
    "fastapi": "serve",
    "google": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "faiss": "serve",
    "orjson": "serve",
    "grpc": "serve",
    "optuna": "sweep",
    "sqlalchemy": "sweep",
    "obstore": "stores",
    "openlineage": "lineage",
}

NO_JIT_CACHE = "--no-jit-cache"
NO_JIT_CACHE_VARIABLE = "SLUICE_NO_JIT_CACHE"

# What Typer makes of Ctrl-C.
_INTERRUPTED = 130

SUBCOMMANDS = {
    "data": ("jobs.data", "Generate sample logs, fetch a data set, import TFRecord files."),
    "build": ("jobs.build_dataset", "Logs and dictionaries to a published TFRecord dataset."),
    "versions": ("jobs.versions", "List, compare, roll back and remove dataset versions."),
    "train": ("jobs.train", "Train a model on a dataset version."),
    "evaluate": ("jobs.evaluate", "Rank the catalogue and compare with the baselines."),
    "compare": ("jobs.compare", "Compare two runs, with confidence intervals."),
    "export": ("jobs.export", "The next version of a SavedModel, and embeddings."),
    "models": ("jobs.models", "List an exported model's versions, go back, apply a delta."),
    "index": ("jobs.index", "An index of the items of an export, measured; new items."),
    "predict": ("jobs.predict", "Top-k lists for every known user, or scores of rows."),
    "score": ("jobs.score", "Scores, lists and embeddings of rows in Spark, past one machine."),
    "serve": ("jobs.serve", "Answer requests by exported models over HTTP."),
    "inspect": ("jobs.inspection.inspect_dataset", "Show what a dataset, a shard or a run holds."),
    "skew": ("jobs.inspection.skew", "Serving features against those that the build recomputes."),
    "convert": ("jobs.convert", "TFRecord, Parquet and CSV into each other, no Spark."),
    "report": ("jobs.reporting.report", "Write the HTML report of a run."),
    "demo": ("jobs.demo", "The whole chain on generated sample logs."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `sluice` command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == NO_JIT_CACHE:
        os.environ[NO_JIT_CACHE_VARIABLE] = "1"  # before anything compiled is imported
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(render_help())
        return ExitCode.OK
    if arguments[0] == "--version":
        print(f"sluice {read_code_version()}")
        return ExitCode.OK
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        error = ConfigError(
            "no such subcommand",
            received=name,
            allowed=", ".join(SUBCOMMANDS),
            fix=did_you_mean(name, SUBCOMMANDS),
        )
        return _report(error)
    try:
        app = _import(SUBCOMMANDS[name][0]).app
    except SluiceError as error:
        return _report(error)
    return run_app(app, rest, prog_name=f"sluice {name}")


def render_help() -> str:
    """Returns the list of subcommands, in the order of the chain, without importing them."""
    width = max(map(len, SUBCOMMANDS)) + 2
    rows = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in SUBCOMMANDS.items())
    return (
        "Spark logs in, TFRecord shards through, trained recommenders out.\n\n"
        "Usage: sluice [--no-jit-cache] COMMAND [OPTIONS]\n\n"
        f"Commands:\n{rows}\n\n"
        "Options:\n"
        "  --version       Show the version.\n"
        "  --no-jit-cache  Before COMMAND: keep compiled code in memory, touch no cache on disk.\n"
        "  -h, --help      Show this text.\n\n"
        "`sluice COMMAND --help` shows a command's own options.\n\n"
        "Exit codes: 0 done, 2 usage or config, 3 input data refused, 4 upstream not ready,\n"
        "            5 training diverged, 6 a gate failed, 1 anything else; 143 and 130:\n"
        "            training was ended by SIGTERM or Ctrl-C and has saved its state\n"
        "            (`sluice train --resume`)."
    )


def run_app(
    app: typer.Typer, argv: Sequence[str] | None = None, prog_name: str | None = None
) -> int:
    """Runs one job's Typer app and returns its exit code.

    Users' mistakes end in a message and an exit code, not in a stack trace.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def call() -> object:
        command = typer.main.get_command(app)
        command.context_settings.setdefault("help_option_names", ["-h", "--help"])
        with _unwind_at_sigterm():
            result = command.main(args=arguments, prog_name=prog_name, standalone_mode=False)
        if result == _INTERRUPTED:
            raise KeyboardInterrupt
        return result

    return run_reported(call, wants_json(arguments))


def run_reported(call: Callable[[], object], json_lines: bool) -> int:
    """Calls what a job does and returns its exit code; mistakes end in a message.

    Args:
        call: Returns the exit code, or another thing where all went well.
        json_lines: Whether the message is a line of JSON.
    """
    try:
        result = call()
        return int(result) if isinstance(result, int) else ExitCode.OK
    except typer.TyperException as error:
        # A usage error knows how to show itself with the command's usage line.
        show = getattr(error, "show", None)
        if show is None or json_lines:
            return _report(ConfigError(error.format_message()), json_lines)
        show()
        return ExitCode.CONFIG
    except (typer.Abort, KeyboardInterrupt):
        message = "interrupted; what was published before is untouched"
        return _report(InternalError(message), json_lines)
    except SluiceError as error:
        return _report(error, json_lines)
    except ModuleNotFoundError as error:
        known = _missing_package(error)
        if known is None:
            raise
        return _report(known, json_lines)
    except OSError as error:
        return _report(_describe_os_error(error), json_lines)
    except Exception:
        logging.getLogger("sluice").exception(
            "unexpected failure; what was published before is untouched"
        )
        return ExitCode.FAILED


@contextmanager
def _unwind_at_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the block as Ctrl-C does: what it began is cleared up, its end is told.

    Handlers of the process that calls, as Airflow's, stay; training and serving set their own.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except Exception as error:
        # Java may have had the signal too: what clears up fails for want of it.
        if was_interrupted(error) and not isinstance(error, TrainingInterruptedError):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing_package(error) or error from error


def _missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """What to install for a module that was not found, or None where it is not of an extra."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return ConfigError(
        f"this subcommand needs the package {package!r}, which is not installed",
        fix=install_hint(extra),
    )


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command was asked for JSON lines: its last line is its error then."""
    given = [*arguments, ""]
    return "--log-format=json" in given or ("--log-format", "json") in pairwise(given)


def _report(error: SluiceError, json_lines: bool = False) -> int:
    if json_lines:
        parts = {"received": error.received, "allowed": error.allowed, "fix": error.fix}
        fields = {
            "exit_code": int(error.exit_code),
            "message": error.what,
            **{name: str(part) for name, part in parts.items() if part is not None},
        }
        print(render_event("error", fields), file=sys.stderr)
    else:
        print(f"error: {error.render()}", file=sys.stderr)
    return error.exit_code


def _describe_os_error(error: OSError) -> InternalError:
    where = f": {error.filename}" if error.filename else ""
    fix = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = (
            "free some space, or set another output directory; what was published before is "
            "untouched"
        )
    else:
        logging.getLogger("sluice").debug("details", exc_info=error)
    return InternalError(f"{error.strerror or str(error)}{where}", fix=fix)


if __name__ == "__main__":
    raise SystemExit(main())
