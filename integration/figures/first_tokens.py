"""A table of times to the first token, by tokens, kind of hit and engine."""

from __future__ import annotations

from integration.figures.markdown import head, line, wrapped
from integration.figures.results import Result, Row, named, rows_of


def first_tokens(result: Result) -> list[str]:
    hits = {(row["tokens"], row["kind"], row["connector"]): row for row in rows_of("hits", result)}
    connectors = list(dict.fromkeys(connector for *_, connector in hits))
    lines = [
        *wrapped(f"{named(result)}: milliseconds to the first token, median and in brackets least and most."),
        "",
        *head(f"| tokens | {line(*connectors)}"),
    ]
    for tokens, kind in dict.fromkeys((tokens, kind) for tokens, kind, _ in hits):
        cells = [_first_token(hits.get((tokens, kind, name))) for name in connectors]
        lines.append(line(f"{tokens:,}", kind.replace("_", " "), *cells))
    return lines


def _first_token(row: Row | None) -> str:
    if row is None or "void" in row:
        return "void" if row else ""
    return f"{row['ms']:.1f} ({min(row['all_ms']):.1f} to {max(row['all_ms']):.1f})"
