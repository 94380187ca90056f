"""Host blocks in the lossless form: whole copies, host hits, and chats."""

from __future__ import annotations

from statistics import median

from integration.figures.first_tokens import first_tokens
from integration.figures.markdown import head, line, wrapped
from integration.figures.results import Result, held_and_missed, named, rows_of

_FORMS = ("raw", "lossless")


def whole_copies(result: Result) -> list[str]:
    """A table of whole copies in both forms, alone and beside products, and which goals are missed."""
    lost = {(row["direction"], row["form"]): row["lost_ms_per_gb"] for row in rows_of("products", result)}
    text = (
        f"{named(result)}: whole loads and saves of SmolLM2's own caches in pieces of 32 KiB, as multiples of one "
        f"large copy of as many raw bytes, and milliseconds that large products lose for each GB of raw bytes that "
        f"moves beside them."
    )
    lines = [*wrapped(text), "", *head("| | raw | lossless | products lose, raw | lossless |")]
    for way, ms in {row["direction"]: row["ms"] for row in rows_of("whole", result)}.items():
        shares = [f"{median(ms['link'][1:]) / median(ms[form][1:]):.3f}" for form in _FORMS]
        lines.append(line(way, *shares, *(f"{lost[way, form]:.2f}" for form in _FORMS)))
    return [*lines, "", *wrapped(held_and_missed(result["claims"]))]


def host_hits(result: Result) -> list[str]:
    """Times to the first token, how exponents spread, and which goals are missed."""
    told = ", ".join(
        f"{row['entropy_bits']:.2f} bits in {row['of'] if row['of'] == 'SmolLM2' else 'the engine'}"
        for row in rows_of("exponents", result)
    )
    text = f"How far exponents lie below the largest near them, entropy: {told}. {held_and_missed(result['claims'])}"
    return [*first_tokens(result), "", *wrapped(text)]


def chats(result: Result) -> list[str]:
    """A table of turns a second, and throughput where nothing is hit."""
    rows = rows_of("chats", result)
    misses = {row["connector"]: row for row in rows_of("misses", result)}
    answers = list(dict.fromkeys(row["answer"] for row in rows))
    text = (
        f"{named(result)}: chats whose host memory holds {rows[0]['host_share']:g} of them, turns a second "
        f"and share of prompts that is cached, in windows of {rows[0]['seconds']:.1f} s; and tokens a second where "
        f"nothing is hit, as a share of those without a connector."
    )
    titles = [f"answers of {answer}" for answer in answers]
    lines = [*wrapped(text), "", *head(f"| {line(*titles, 'nothing is hit')}")]
    for name in dict.fromkeys(row["connector"] for row in rows):
        own = {row["answer"]: row for row in rows if row["connector"] == name}
        cells = [f"{own[a]['turns_per_second']:.1f}, {own[a]['cached_share']:.0%}" for a in answers]
        miss = f"{misses[name]['over_none']:.3f}" if "over_none" in misses.get(name, {}) else ""
        lines.append(line(name, *cells, miss))
    return [*lines, "", *wrapped(held_and_missed(result["claims"]))]
