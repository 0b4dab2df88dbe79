"""What hatchling calls while it builds the package: the README as PyPI shows it, without links into the repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from repository import ROOT, address, led_out  # noqa: E402


class ReadmeHook(MetadataHookInterface):
    """Sets the package's long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` of the table `project`."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": led_out(text, "README.md", address())}
