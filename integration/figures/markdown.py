"""Lines of Markdown: paragraphs, tables, and bold for what misses a goal."""

from __future__ import annotations

import textwrap

from integration.figures.results import Row

_WIDTH = 118
"""Of a paragraph: documents have 120, and a block may be indented by two."""


def wrapped(text: str) -> list[str]:
    """The lines of a paragraph."""
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def head(titles: str) -> list[str]:
    """A line of titles, and what a table has below it."""
    return [titles, "|---" * (titles.count("|") - 1) + "|"]


def line(*cells: str) -> str:
    """One of a table."""
    return f"| {' | '.join(cells)} |"


def marked(claim: Row, digits: int = 2) -> str:
    """The value, bold where the goal is missed."""
    return bold_unless(claim["holds"], f"{claim['value']:.{digits}f}")


def marked_beside_goal(claim: Row) -> str:
    """As `marked`, with a third digit where two would show the goal itself, which may be missed all the same."""
    return marked(claim, 3 if f"{claim['value']:.2f}" == f"{claim['goal']:.2f}" else 2)


def bold_unless(holds: bool, text: str) -> str:
    """The text, bold where a goal is missed."""
    return text if holds else f"**{text}**"
