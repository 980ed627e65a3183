"""The published versions of a dataset: what they are, how two differ, which may go."""

from etl.versions.diff import diff_manifests
from etl.versions.listing import VersionInfo, list_versions
from etl.versions.retention import collect_garbage, select_garbage
from etl.versions.rollback import roll_back

__all__ = [
    "VersionInfo",
    "collect_garbage",
    "diff_manifests",
    "list_versions",
    "roll_back",
    "select_garbage",
]
