"""Hooks of MkDocs: the pages that are made from the code join those that are written.

`mkdocs.yml` names this file. MkDocs loads it by path, so the checkout is put on the path first.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.docs_site import command_pages, config_reference, messages, preset_pages  # noqa: E402


@cache
def list_generated() -> dict[str, str]:
    """Returns the Markdown of the generated pages by their path in the site's sources."""
    pages = {"reference/commands.md": command_pages.render_page()}
    pages |= {f"reference/{name}": page for name, page in config_reference.render_pages().items()}
    pages |= {f"presets/{name}": page for name, page in preset_pages.render_pages().items()}
    pages |= {f"messages/{name}": page for name, page in messages.render_pages().items()}
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return {**pages, "changes.md": changes}


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    for path, content in list_generated().items():
        files.append(File.generated(config, path, content=content))
    return files
