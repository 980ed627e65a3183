"""Writes the generated pages that are part of the checkout: `python -m tests.docs_site`."""

from __future__ import annotations

import shutil

from tests.docs_site.hooks import KEPT_FOLDERS, ROOT, list_kept

if __name__ == "__main__":
    for folder in KEPT_FOLDERS:
        shutil.rmtree(ROOT / "docs" / folder, ignore_errors=True)
    for path, content in list_kept().items():
        file = ROOT / "docs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
