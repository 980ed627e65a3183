"""The pages that are made from the code; as MkDocs' hook, those of the site alone join the others.

`mkdocs.yml` names this file. MkDocs loads it by path, so the checkout is put on the path first.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.docs_site import (  # noqa: E402
    command_pages,
    config_reference,
    messages,
    option_pages,
    preset_pages,
)

# Folders of generated pages that are read in the checkout, too.
KEPT_FOLDERS = ("reference", "presets")


@cache
def list_kept() -> dict[str, str]:
    """Returns the Markdown of the generated pages that are part of the checkout, by path."""
    pages = {"reference/commands.md": command_pages.render_page()}
    pages["reference/tfrecord.md"] = option_pages.render_page()
    pages |= {f"reference/{name}": page for name, page in config_reference.render_pages().items()}
    pages |= {f"presets/{name}": page for name, page in preset_pages.render_pages().items()}
    note = "<!-- Made from the code by `make pages`. -->\n\n"
    return {path: note + page for path, page in pages.items()}


@cache
def list_generated() -> dict[str, str]:
    """Returns the Markdown of the pages that the site alone has, by path."""
    pages = {f"messages/{name}": page for name, page in messages.render_pages().items()}
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return {**pages, "changes.md": changes}


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    for path, content in list_generated().items():
        files.append(File.generated(config, path, content=content))
    return files
