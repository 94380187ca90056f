"""What the simulation has found in its last long run, and which mutants are caught."""

from __future__ import annotations

from collections import Counter

from integration.figures.markdown import wrapped
from integration.figures.results import Result, origin


def long_run(result: Result) -> list[str]:
    """What the long run has found, and which floors it has missed."""
    met = {name: claim for name, claim in result["claims"].items() if name.startswith("met: ")}
    missed = [
        f"`{name[5:]}` ({claim['value']} of {claim['goal']})" for name, claim in met.items() if not claim["holds"]
    ]
    floors = f"all {len(met)} floors are met" if not missed else f"of {len(met)} floors missed: {', '.join(missed)}"
    where = f"`integration/bench/results/simulation.json`, {origin(result)}"
    return wrapped(f"The last long run ({where}): {_found(result)}; {floors}.")


def in_a_sentence(result: Result) -> list[str]:
    """The same in a sentence, without floors."""
    return wrapped(f"{_found(result)} (`simulation.json`, {origin(result)}).")


def mutants(result: Result) -> list[str]:
    """How many are caught, and each that is not."""
    verdicts = Counter(row["verdict"] for row in result["rows"])
    others = [
        f"`{row['name']}` ({row['verdict']}: {row['title']})" for row in result["rows"] if row["verdict"] != "caught"
    ]
    rest = f"not: {'; '.join(others)}" if others else "none survived, none is unsound, none was skipped"
    where = f"`integration/bench/results/mutants.json`, {origin(result)}"
    return wrapped(f"The last run of all ({where}): {verdicts['caught']} of {len(result['rows'])} caught; {rest}.")


def _found(result: Result) -> str:
    ran = next(row for row in result["rows"] if "seeds" in row)
    claims = result["claims"]
    names = {
        "wrong_tokens": "wrong token",
        "leaks": "leak",
        "stuck_requests": "request that stands still",
        "broken_invariants": "broken invariant",
    }
    none = [what for name, what in names.items() if not claims[name]["value"]]
    violations = [row for row in result["rows"] if "violation" in row]
    seeds = [f"{row['seed']} ({row['violation'].split(':')[0]})" for row in violations]
    failed = [f"{len(seeds)} worlds failed, of seeds {', '.join(seeds)}"] if seeds else []
    worlds = f"{ran['steps']:,} engine steps of {ran['seeds']:,} worlds, {ran['requests']:,} requests"
    return f"{worlds}: " + "; ".join([", ".join(f"no {what}" for what in none), *failed])
