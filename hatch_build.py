"""Build hook: the page of the package has links to the project and absolute links in README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, address: str) -> str:
    """Return Markdown whose relative links and pictures are at the project's address.

    An empty address changes nothing.
    """
    if not address:
        return text
    for what, folder in ((r"!\[[^]]*\]", "raw"), (r"(?<!!)\[[^]]*\]", "blob")):
        relative = rf"({what}\()(?![a-z]+:|#)([^)\s]+\))"
        text = re.sub(relative, rf"\g<1>{address}/{folder}/HEAD/\g<2>", text)
    return text


class PackagePage(MetadataHookInterface):
    """Reads `address` of `[tool.hatch.metadata.hooks.custom]`: the repository, "" if none."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme, and the links if there is an address."""
        address = self.config["address"].rstrip("/")
        text = absolute(Path(self.root, "README.md").read_text(), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        pages = {"Source": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}
        metadata["urls"] = {name: address + page for name, page in pages.items() if address}
