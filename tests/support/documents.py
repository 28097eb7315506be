"""What the documentation tells people to type."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of a language in a document, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / document).read_text(), re.MULTILINE | re.DOTALL)
