"""What the site of the documents takes from outside of `docs/`: documents at the top, and pictures of results.

MkDocs calls it (`hooks` in mkdocs.yml). In the repository links go from file to file, as GitHub and an editor follow
them; here those that leave `docs/` are turned to where the file is in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PICTURES = "integration/bench/results"
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
}
"""By the document at the top: its page."""
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """All files of the site."""
    for document, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / document)))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, with its links as they are in the site."""
    is_at_the_top = page.file.src_uri in PAGES.values()
    return _LINK.sub(lambda link: in_site(link["path"], is_at_the_top), markdown)


def in_site(path: str, is_at_the_top: bool) -> str:
    """Where a relative link of a document leads in the site; as it is where that is no file that was moved."""
    if re.match(r"[a-z]+:", path):
        return path
    in_repository = path if is_at_the_top else f"docs/{path}".replace("docs/../", "")
    if in_repository in PAGES:
        return PAGES[in_repository]
    if in_repository.startswith(f"{PICTURES}/"):
        return in_repository.replace(PICTURES, "results", 1)
    return in_repository.removeprefix("docs/")
