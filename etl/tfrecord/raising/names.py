"""Which features columns are read from, where names differ in case or were changed by the write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from etl.tfrecord.committed import Committed
from etl.tfrecord.lowering.description import read_description, read_renames
from etl.tfrecord.lowering.types import UnfitError


def find_name(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Finds what a name stands for where upper and lower case do not matter, as in Spark.

    Args:
        name: As someone wrote it.
        known: What there is.

    Returns:
        The name itself if it is known, else those that differ from it in case alone, sorted.
    """
    same = {other for other in known if other.lower() == name.lower()}
    return (name,) if name in same else tuple(sorted(same))


@dataclass(frozen=True)
class FeatureNames:
    """What the features of the files are called.

    Attributes:
        known: All features and slots; empty where no manifest lists them.
        renames: By column, the names that its features got, see `Lowering.renames`.
        separator: Between a struct's name and its field's.
    """

    known: tuple[str, ...] = ()
    renames: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    separator: str = "."

    @cached_property
    def _paths(self) -> dict[str, set[str]]:
        """All features and the structs around them, by their names in lower case."""
        wanted = [name for renamed in self.renames.values() for name in renamed]
        paths: dict[str, set[str]] = {}
        for name in (*self.known, *wanted):
            parts = name.split(self.separator)
            for count in range(1, len(parts) + 1):
                path = self.separator.join(parts[:count])
                paths.setdefault(path.lower(), set()).add(path)
        return paths

    def find(self, path: str) -> str:
        """Finds the column or field that a path stands for; the path itself where there is none.

        Raises:
            UnfitError: Several differ from it in case alone.
        """
        found = find_name(path, self._paths.get(path.lower(), ()))
        if len(found) > 1:
            raise UnfitError(f"which of {', '.join(found)} is meant? Spell it as it was written")
        return found[0] if found else path

    def resolve(self, column: str, path: str) -> str:
        """Name of the feature that a path within a column ended up under."""
        return self.renames.get(column, {}).get(path, path)


def read_names(committed: Committed | None) -> FeatureNames:
    """What a manifest calls its features; nothing is known without one.

    Raises:
        InputDataError: Its account of the columns is damaged.
    """
    if committed is None:
        return FeatureNames()
    options, slots = read_description(committed.lowering)
    names = [feature.name for feature in committed.features if feature.name not in slots]
    names += [slot.name for group in slots.values() for slot in group]
    return FeatureNames(tuple(names), read_renames(committed.lowering), options.struct_separator)
