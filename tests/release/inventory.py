"""The packages that Sluice brings: as a CycloneDX SBOM, and their licences against an allow-list.

    python -m tests.release.inventory --out dist/sbom.cdx.json

It looks at the environment that it runs in, which `make install` makes from `requirements.lock`,
and lists what the extras for users need, without those for work on Sluice. PySpark's jars are part
of the package PySpark and are not listed one by one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from license_expression import LicenseExpression, get_spdx_licensing
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RULES = tomllib.loads((ROOT / "tests/release/licences.toml").read_text(encoding="utf-8"))
# For work on Sluice, and CUDA's own packages, which this environment does not hold.
LEFT_OUT = ("dev", "gpu")


def read_environment() -> dict[str, Any]:
    """Returns the SBOM of the whole environment, with Sluice as what it describes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sbom.json"
        subprocess.run(
            [
                sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible",
                "--pyproject", str(ROOT / "pyproject.toml"), "-o", str(out), sys.executable,
            ],
            check=True,
        )  # fmt: skip
        bom: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return bom


def find_needed() -> tuple[set[str], set[str]]:
    """Returns the packages that users get, and those of them that are not installed here.

    A package's own extras count where they are asked for, and not because they happen to be here.
    """
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"]]
    wanted += [line for name, lines in extras.items() if name not in LEFT_OUT for line in lines]
    waiting = [requirement for line in wanted if _applies(requirement := Requirement(line), {""})]
    found: dict[str, set[str]] = {str(canonicalize_name(PROJECT["name"])): set()}
    missing: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name, asked = str(canonicalize_name(requirement.name)), requirement.extras | {""}
        if asked <= found.get(name, set()) or name == canonicalize_name(PROJECT["name"]):
            continue
        found[name] = found.get(name, set()) | asked
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            missing.add(name)
            continue
        waiting += [r for line in lines if _applies(r := Requirement(line), asked)]
    return set(found) - missing - {canonicalize_name(PROJECT["name"])}, missing


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def keep_needed(bom: dict[str, Any], needed: set[str]) -> dict[str, Any]:
    """Returns an SBOM without the packages that users do not get."""
    names = {part["bom-ref"]: canonicalize_name(part["name"]) for part in bom["components"]}
    kept = {ref for ref, name in names.items() if name in needed}
    root = bom["metadata"]["component"]["bom-ref"]
    dependencies = [
        {**edge, "dependsOn": sorted(kept & set(edge.get("dependsOn", [])))}
        for edge in bom["dependencies"]
        if edge["ref"] in kept or edge["ref"] == root
    ]
    components = [part for part in bom["components"] if part["bom-ref"] in kept]
    return {**bom, "components": components, "dependencies": dependencies}


def find_licences(component: dict[str, Any]) -> list[str]:
    """Returns the SPDX expressions of a package's licences, or the names that it uses itself."""
    given = RULES["packages"].get(component["name"])
    if given is not None:
        return [given]
    found = []
    for entry in component.get("licenses", []):
        licence = entry.get("license", {})
        name = entry.get("expression") or licence.get("id") or licence.get("name", "")
        found.append(RULES["aliases"].get(name, name))
    return list(dict.fromkeys(found))


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be met by allowed licences alone."""
    parser = get_spdx_licensing()
    try:
        parsed = parser.parse(expression, validate=True)
    except Exception:  # what is no SPDX expression is on no list
        return False
    return parsed is not None and _meets(parsed)


def _meets(node: LicenseExpression) -> bool:
    if node.__class__.__name__ in ("AND", "OR"):
        parts = [_meets(part) for part in node.args]
        return all(parts) if node.__class__.__name__ == "AND" else any(parts)
    return str(node) in RULES["allowed"]


def find_faults(components: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the packages with no licence, or one that is not on the list."""
    faults = []
    for component in components:
        licences = find_licences(component)
        if not licences:
            faults.append(f"{component['name']}: no licence in its metadata")
        faults += [f"{component['name']}: {text}" for text in licences if not is_allowed(text)]
    return faults


def validate(text: str) -> str | None:
    """Returns what is wrong with an SBOM by CycloneDX's own schema, or None."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return None if fault is None else str(fault)


def main() -> int:
    """Writes the SBOM, prints a line per package, and fails at a licence that is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "sbom.cdx.json")
    out: Path = parser.parse_args().out
    needed, missing = find_needed()
    bom = keep_needed(read_environment(), needed)
    text = json.dumps(bom, indent=1, sort_keys=True) + "\n"
    faults = find_faults(bom["components"])
    separate = RULES["separate"]
    faults += [f"{name}: not installed here" for name in sorted(missing - set(separate))]
    if fault := validate(text):
        faults.append(f"the SBOM does not fit CycloneDX's schema: {fault}")
    for part in sorted(bom["components"], key=lambda part: part["name"].lower()):
        print(f"{part['name']} {part['version']}: {'; '.join(find_licences(part)) or 'none'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    for name, words in separate.items():
        print(f"{name}: {words}")
    print(f"{len(bom['components'])} packages in {out}")
    for fault in faults:
        print(
            f"error: {fault}; correct it, or add it to tests/release/licences.toml", file=sys.stderr
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
