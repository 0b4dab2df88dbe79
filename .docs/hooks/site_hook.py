"""What mkdocs calls while it builds the site: texts from elsewhere come in, regions are generated, links are led on.

Pages are written for a forge: links are relative files of the repository. In the site each of them leads to the page
that stands for the file, or, where none does, is plain text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from repository import PAGE_OF, PICTURE_OF, ROOT, led_on, source_of

sys.path.insert(0, str(ROOT))  # mkdocs has it not; the folder of the recipes is not part of the installed package
from generated import GENERATED, explorer, pictures, tutorial  # noqa: E402

_REGION = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
_BADGES = re.compile(r"^<!-- badges -->$.*?^<!-- /badges -->\n", re.MULTILINE | re.DOTALL)
"""Pictures from another server, which a site that reads offline does not fetch."""
_COMMENT = re.compile(r"^<!-- .* -->\n?", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the texts and pictures of the repository that the site takes in, and what is drawn for it."""
    for source, page in PAGE_OF.items():
        if not source.startswith((".docs/pages/", ".docs/tutorial/")):
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for source, place in PICTURE_OF.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for place, path in pictures.drawn(Path(config.config_file_path).parent / "pictures").items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    files.append(File.generated(config, explorer.PLACE, content=explorer.page()))
    for script in tutorial.SCRIPTS:
        done = tutorial.made(script, Path(config.config_file_path).parent / "pictures" / "tutorial")
        files.append(File.generated(config, done.place, content=done.page))
        files.append(File.generated(config, done.notebook_place, content=done.notebook))
        for place, picture in done.pictures.items():
            files.append(File.generated(config, place, content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page with its regions generated, its links led on and the tests' comments gone."""
    place = page.file.src_uri
    source = source_of(place)
    filled = _REGION.sub(lambda match: GENERATED[match[1]](), led_on(_BADGES.sub("", markdown), source, place))
    return _outside_code(filled)


def _outside_code(markdown: str) -> str:
    """Return `markdown` without comments on lines of their own, those in code kept."""
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else _COMMENT.sub("", block) for block in blocks)
