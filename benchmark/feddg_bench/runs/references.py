"""Papers behind methods: what a citation says, as links and BibTeX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote_plus

_PAPER = re.compile(
    r"(?P<authors>[^:]+): (?P<title>.+?), (?:(?P<venue>[A-Z][^,]*?) )?(?P<year>(?:19|20)\d\d)"
    r"(?:, arXiv (?P<arxiv>\d{4}\.\d{5}))?(?: \(.*\))?"
)

_JOURNALS = ("TKDE", "TMLR")


@dataclass(frozen=True)
class Reference:
    """A paper."""

    authors: tuple[str, ...]  # as the citation has them, with or without first names
    title: str
    year: str
    venue: str = ""  # such as `CVPR`; empty for a preprint
    arxiv: str = ""  # number there; empty if none is given

    @property
    def link(self) -> str:
        """Where to find the paper: on arXiv, or else by its title in dblp."""
        if self.arxiv:
            return f"https://arxiv.org/abs/{self.arxiv}"
        return f"https://dblp.org/search?q={quote_plus(self.title)}"

    def bibtex(self, key: str) -> str:
        """Return the paper as a BibTeX entry."""
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            "journal" if self.venue in _JOURNALS else "booktitle": self.venue,
            "year": self.year,
            "eprint": self.arxiv,
            "archivePrefix": "arXiv" if self.arxiv else "",
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        kind = "inproceedings" if self.venue else "misc"
        kind = "article" if self.venue in _JOURNALS else kind
        return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def references(citation: str) -> Iterator[Reference]:
    """Yield the papers of a citation: ``AUTHORS: TITLE, VENUE YEAR, arXiv NUMBER``, by semicolons.

    Parts of another form are left out: the citation is shown as it is, too.

    >>> [(r.authors, r.venue) for r in references("A. Li and Bo: Of X: Y, ICML 2020; see there")]
    [(('A. Li', 'Bo'), 'ICML')]
    """
    for part in citation.split("; "):
        if match := _PAPER.fullmatch(part.strip()):
            authors = re.split(r", | and ", match["authors"])
            rest = (match[name] or "" for name in ("venue", "arxiv"))
            yield Reference(tuple(authors), match["title"], match["year"], *rest)
