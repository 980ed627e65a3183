"""What runs a job's command: mistakes end in a message and an exit code, not in a stack trace."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import typer

from conf.errors import (
    ConfigError,
    ExitCode,
    InternalError,
    SluiceError,
    TrainingInterruptedError,
    install_hint,
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
    "optuna": "sweep",
    "hdfs_native": "stores",
    "obstore": "stores",
    "mlflow": "mlflow",
    "openlineage": "lineage",
}


# What Typer makes of Ctrl-C.
_INTERRUPTED = 130


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
            return report_error(ConfigError(error.format_message()), json_lines)
        show()
        return ExitCode.CONFIG
    except (typer.Abort, KeyboardInterrupt):
        message = "interrupted; what was published before is untouched"
        return report_error(InternalError(message), json_lines)
    except SluiceError as error:
        return report_error(error, json_lines)
    except ModuleNotFoundError as error:
        known = find_missing_package(error)
        if known is None:
            raise
        return report_error(known, json_lines)
    except OSError as error:
        return report_error(_describe_os_error(error), json_lines)
    except Exception as error:
        own = _explain_own_code(error)
        if own is not None:
            return report_error(own, json_lines)
        logging.getLogger("sluice").exception(
            "unexpected failure; what was published before is untouched"
        )
        return ExitCode.FAILED


def _explain_own_code(error: Exception) -> SluiceError | None:
    """Returns what a network, tower, loss or metric of the user did; None: none did it."""
    if "training.networks.user_code" not in sys.modules:
        return None
    from training.networks.user_code import explain_error

    return explain_error(error)


@contextmanager
def _unwind_at_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the block as Ctrl-C does: what it began is cleared up, its end is logged.

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


def find_missing_package(error: ModuleNotFoundError) -> ConfigError | None:
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


def report_error(error: SluiceError, json_lines: bool = False) -> int:
    """Says what went wrong, on stderr, and returns the exit code.

    Args:
        error: What went wrong.
        json_lines: Whether as a line of JSON.
    """
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
