"""What the site needs beside MkDocs: links that leave docs/ work on a forge, but lead nowhere in the site.

Pictures from outside docs/ become files of the site; other such links become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page whose links to files outside docs/ are pictures of the site, or text."""
    repository = Path(config.config_file_path).parent
    folder = posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        mark, text, path, _ = found.groups()
        place = posixpath.normpath(posixpath.join("docs", folder, path))
        if ":" in path or place.startswith("docs/"):
            return found[0]
        if not mark:
            return text
        if not files.get_file_from_path(place):
            files.append(File.generated(config, place, abs_src_path=str(repository / place)))
        return f"![{text}]({posixpath.relpath(place, folder or '.')})"

    return LINK.sub(inside, markdown)
