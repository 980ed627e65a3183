"""The `sluice` command: one subcommand per job, each imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from conf.errors import (
    ConfigError,
    ExitCode,
    SluiceError,
    did_you_mean,
    read_code_version,
)
from jobs.support.run_app import find_missing_package, report_error, run_app

NO_JIT_CACHE = "--no-jit-cache"
NO_JIT_CACHE_VARIABLE = "SLUICE_NO_JIT_CACHE"


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
    "predict": ("jobs.predict", "Ranked lists, scores and vectors of rows, here or in Spark."),
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
        return report_error(error)
    try:
        app = _import(SUBCOMMANDS[name][0]).app
    except SluiceError as error:
        return report_error(error)
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


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise find_missing_package(error) or error from error


if __name__ == "__main__":
    raise SystemExit(main())
