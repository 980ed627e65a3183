"""The page about a dataset version: contract, statistics, and how it differs from another one."""

from __future__ import annotations

from pathlib import Path

from conf.dataset import (
    VERSIONS_DIR,
    local_path,
    published_versions,
    read_manifest,
    resolve_version,
    write_text_atomic,
)
from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.pointer import NAME_PATTERN
from jobs.inspection.target import Target
from jobs.reporting.numbers import format_bytes, format_count, format_share
from jobs.reporting.page import PageHead, Tile, build_section, render_html
from jobs.reporting.run_data import RunData
from jobs.reporting.sections.changes import DatasetData, build_changes, count_shifted
from jobs.reporting.sections.contract import build_contract, count_violated
from jobs.reporting.sections.features import build_features
from jobs.reporting.sections.flow import build_flow
from jobs.reporting.sections.shards import build_shards
from jobs.reporting.sections.slices import build_slices
from jobs.reporting.sections.values import build_values
from jobs.reporting.verdict import Standing, Verdict

PREVIOUS = "previous"
_SHIFTED = "Shifted: PSI above 0.2 in the train split. What is only carried along does not count."


def write_dataset_page(target: Target, html: str | None, against: str | None) -> Path:
    """Writes the page about a dataset version: one self-contained file.

    Args:
        target: What `sluice inspect` was given.
        html: File to write; an earlier one is replaced whole or not at all.
        against: Version to compare with: its id, its path, a dataset, or `previous`; or None.

    Returns:
        The file.

    Raises:
        ConfigError: No file is given, or the target is no dataset, or there is no such version.
        InputDataError: A manifest or the statistics are damaged.
    """
    if target.kind != "dataset" or html is None:
        raise ConfigError(
            "--html writes a page about a dataset, and --against goes with it",
            received=f"a {target.kind}: {target.path}",
            allowed="--html FILE with a dataset or one of its versions",
            fix="a run's page is written by `sluice report`",
        )
    other = None if against is None else find_other(target.path, against)
    file = local_path(html)
    write_text_atomic(file, render_dataset(target.path, other))
    return file


def find_other(version: Path, against: str) -> Path:
    """Returns the directory of the version to compare with.

    Raises:
        ConfigError: There is no such version.
    """
    base = version.resolve().parent.parent
    known = published_versions(base)
    if against == PREVIOUS:
        earlier = [name for name in known if name < version.resolve().name]
        if earlier:
            return base / VERSIONS_DIR / earlier[-1]
    elif NAME_PATTERN.fullmatch(against) and against in known:
        return base / VERSIONS_DIR / against
    elif local_path(against).exists():
        return resolve_version(against)
    raise ConfigError(
        "there is no such version to compare with",
        received=against,
        allowed=f"a version's id or path, a dataset's path, or {PREVIOUS}",
        fix=did_you_mean(against, known),
    )


def render_dataset(version: Path, other: Path | None = None) -> str:
    """Returns the page as HTML; the same versions always give the same text."""
    before = None if other is None else (other, read_manifest(other))
    data = DatasetData(version, read_manifest(version), before)
    run = RunData(version, {}, version=version, manifest=data.manifest)
    sections = (
        build_section(build_contract, data),
        build_section(build_changes, data),
        build_section(build_slices, data),
        build_section(build_values, data),
        build_section(build_flow, run),
        build_section(build_features, run),
        build_section(build_shards, run),
    )
    return render_html(_head(data), sections)


def _head(data: DatasetData) -> PageHead:
    manifest = data.manifest
    subtitle = f"dataset version {manifest.dataset_version} · {manifest.created_at}"
    if data.other is not None:
        subtitle += f" · compared with {data.other[1].dataset_version}"
    return PageHead(manifest.dataset_name, subtitle, _verdict(data), _tiles(manifest))


def _verdict(data: DatasetData) -> Verdict:
    violated, rules = count_violated(data.manifest), len(data.manifest.contract)
    kept = f"All {rules} rules of its contract hold." if rules else "It has no contract."
    if violated:
        kept = f"{violated} of {rules} rules of its contract are violated."
    if data.other is None:
        return Verdict("behind" if violated else "ahead" if rules else "unknown", kept, "")
    shifted = count_shifted(data)
    moved = f"{shifted} features have shifted." if shifted != 1 else "1 feature has shifted."
    standing: Standing = "behind" if violated else "level" if shifted else "ahead"
    return Verdict(standing, f"{kept} {moved}", _SHIFTED)


def _tiles(manifest: Manifest) -> tuple[Tile, ...]:
    tiles = [Tile(format_count(split.rows), f"{split.name} records") for split in manifest.splits]
    tiles.append(Tile(format_bytes(sum(s.bytes for s in manifest.splits)), "of TFRecord shards"))
    if "train" in manifest.label_rate:
        tiles.append(Tile(format_share(manifest.label_rate["train"]), "label rate in train"))
    return tuple(tiles)
