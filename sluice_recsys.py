"""Entry of the `sluice` command, in a module whose name hardly any project shares.

Sluice's packages have everyday names. A user's own package of such a name hides ours where its
folder comes first on the path, and what follows is an import error that names neither.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("conf", "etl", "jobs", "training")
MODULES = ("pyspark_sluice", "pyspark_tfrecord", "pyspark_tfrecords", "sluice_recsys")
_CONFIG_ERROR = 2


class HiddenPackageError(ImportError):
    """A package of the user's own has the name of one of Sluice's, and comes first on the path."""


def refuse_hidden_packages() -> None:
    """Checks that Sluice's packages are those beside this file.

    Raises:
        HiddenPackageError: Another package or folder of such a name comes first.
    """
    here = Path(__file__).parent
    for name in PACKAGES:
        ours = PathFinder.find_spec(name, [str(here)])
        found = importlib.util.find_spec(name)
        # Packages that were shipped one by one do not lie beside this file: nothing is known then.
        if ours is None or found is None or _is_same(found.origin, ours.origin):
            continue
        place = found.origin or next(iter(found.submodule_search_locations or ()), "unknown")
        raise HiddenPackageError(
            f"a package {name!r} that is not Sluice's comes first on Python's path\n"
            f"  received: {place}\n"
            f"  allowed:  {ours.origin}\n"
            "  fix:      rename that package, or keep its folder off the path: see PYTHONPATH, "
            "the folder of the script, and the current folder"
        )


def _is_same(found: str | None, ours: str | None) -> bool:
    # Spark's executors find an archive as `./sluice.zip`, which one of these keeps.
    return None not in (found, ours) and Path(str(found)).absolute() == Path(str(ours)).absolute()


def main() -> int:
    """Runs the `sluice` command and returns its exit code."""
    try:
        refuse_hidden_packages()
    except HiddenPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CONFIG_ERROR
    from jobs.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    raise SystemExit(main())
