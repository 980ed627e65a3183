"""`sluice convert`: TFRecord, Parquet and CSV into each other, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import TextColumn

from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.storage.locations import Compression
from etl.convert import (
    FORMATS,
    ConvertOptions,
    Format,
    TextOptions,
    convert_files,
    detect_format,
    list_inputs,
    parse_type,
)
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.spark.options import TYPE_OPTIONS, parse_type_options
from etl.tfrecord.types.features import RECORD_TYPES, RecordType
from etl.tfrecord.types.refusals import refuse_unknown
from jobs.support.terminal import ListSeparator, show_progress

app = typer.Typer(help=__doc__, add_completion=False)

_COMPRESSIONS: dict[str, Compression | None] = {
    "none": None, "gzip": "GZIP", "zlib": "ZLIB", ".gz": "GZIP", ".deflate": "ZLIB", ".zlib": "ZLIB"
}  # fmt: skip


@app.command()
def main(
    source: Annotated[
        Path, typer.Argument(parser=local_path, help="File, or directory with files of one format.")
    ],
    output: Annotated[Path, typer.Argument(parser=local_path, help="File to create.")],
    source_format: Annotated[
        Format | None, typer.Option("--from", help=f"{', '.join(FORMATS)}; default: by the name.")
    ] = None,
    target_format: Annotated[Format | None, typer.Option("--to", help="Likewise.")] = None,
    record_type: Annotated[RecordType, typer.Option(help=", ".join(RECORD_TYPES))] = "Example",
    compression: Annotated[
        Literal["none", "gzip", "zlib"] | None,
        typer.Option(help="Of TFRecord: none, gzip, zlib; default: by the name."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What a type becomes, such as dates=iso."),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(help="Of CSV or TFRecord columns: price=float32,tags=list<string>."),
    ] = None,
    separator: Annotated[str | None, typer.Option(help="Of CSV; default: by the name.")] = None,
    null: Annotated[
        list[str] | None,
        typer.Option(help="Text that is a null in CSV, such as NA; an empty field is one anyway."),
    ] = None,
    list_separator: ListSeparator = "|",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
) -> None:
    """Convert files of one format to a file of another, in bounded memory."""
    if output.exists() and (output.is_dir() or not overwrite):
        raise ConfigError("the output exists already", received=output, fix="add --overwrite")
    if not output.parent.is_dir():
        raise ConfigError("the output's directory does not exist", received=output.parent)
    files = list_inputs(source, source_format)
    tab = "\t" if separator == r"\t" else separator  # few shells give a tab easily
    policies = {n.lower(): text for n, text in _parse_pairs("--option", option or ()).items()}
    known = [one.name for one in TYPE_OPTIONS]
    refuse_unknown("unknown --option", [name for name in policies if name not in known], known)
    typed = _parse_pairs("--types", ",".join(types or ()).split(","))
    options = ConvertOptions(
        ShardOptions(record_type, _COMPRESSIONS.get(compression or output.suffix.lower())),
        parse_type_options(policies),
        TextOptions(tab, list_separator, tuple(null or ())),
        {name: parse_type(kind) for name, kind in typed.items()},
        source if source.is_dir() else None,
    )
    target = target_format or detect_format(output)
    read_as = source_format or detect_format(files[0])
    with show_progress(None, TextColumn("{task.completed:,} rows")) as on_rows:
        rows = convert_files(files, read_as, output, target, options, on_rows)
    print(f"wrote {output}: {rows:,} rows, {output.stat().st_size:,} bytes")


def _parse_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts if text.strip()]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        raise ConfigError(f"{option} takes name=value", received=bad[0])
    return {name.strip(): value for name, _, value in pairs}


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
