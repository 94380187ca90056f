"""Readable documents with names, dates and figures, and questions that they answer; made from templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

_PEOPLE = (
    "Amara Okafor", "Bruno Keller", "Celia Novak", "Daniel Reyes", "Edith Larsen", "Farid Haddad", "Greta Lindqvist",
    "Hiro Tanaka", "Ines Duarte", "Jonas Weber", "Katya Morozova", "Liam Byrne", "Mei Chen", "Noor Rahman",
    "Oskar Nyman", "Priya Menon", "Quentin Moreau", "Rosa Galli", "Samuel Adeyemi", "Tilda Berg",
)  # fmt: skip
_PLACES = (
    "Ashford", "Brightwater", "Calder Bay", "Dunmore", "Eastmere", "Fallbrook", "Glenrock", "Harrow Hill", "Inverlake",
    "Juniper Ridge", "Kingsport", "Lowmoor", "Marlin Point", "Northgate", "Oakhaven",
)  # fmt: skip
_FIRMS = (
    "Alder Freight", "Beacon Instruments", "Copperline Tools", "Driftwood Foods", "Elmwood Paper", "Fjord Textiles",
    "Granite Works", "Harbour Optics", "Ironbridge Pumps", "Juno Ceramics",
)  # fmt: skip
_GOODS = (
    "bearing housings", "ceramic valves", "copper fittings", "drive belts", "filter cartridges", "glass vials",
    "hydraulic hoses", "insulated crates", "lamp sockets", "mounting rails", "packing film", "pressure gauges",
    "steel brackets", "timber pallets", "wool blankets",
)  # fmt: skip
_CAUSES = (
    "a late delivery from the supplier", "a worn coupling on the main line", "two days of heavy frost",
    "an error in the order form", "a shortage of trained staff", "a power cut in the early morning",
    "a change of the packing rules", "a damaged seal in the storage hall",
)  # fmt: skip
_REMEDIES = (
    "keep a reserve of two weeks", "inspect the line every Monday", "train two more operators",
    "move the storage hall to the upper level", "order from a second supplier", "replace the seals before winter",
    "check every order by a second person", "publish the figures each Friday",
)  # fmt: skip
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and questions about its passages, in the order of the passages."""

    title: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Passage:
    heading: str
    sentences: tuple[str, ...]
    question: str


def write_document(rng: Random, number: int, num_tokens: int, count_tokens: Callable[[str], int]) -> Document:
    """A document of about `num_tokens` tokens as `count_tokens` counts: whole sentences, one whole section at least.

    Titles begin with the number, so that two documents differ from their first words on.
    """
    firm, place = rng.choice(_FIRMS), rng.choice(_PLACES)
    title = f"No. {number + 1}: {firm}, works at {place}, collected papers of the year {rng.randint(1987, 2023)}"
    parts, length = [title], count_tokens(title)
    questions: list[str] = []
    for section, passage in enumerate(_passages(rng, firm), start=1):
        paragraph = f"\n\nSection {section}. {passage.heading}.\n"
        for sentence in passage.sentences:
            added = count_tokens(f"{paragraph} {sentence}")
            if questions and length + added - num_tokens > num_tokens - length:
                return Document(title, "".join(parts), tuple(questions))
            parts.append(f"{paragraph}{sentence}" if paragraph else f" {sentence}")
            paragraph, length = "", length + added
        # Only now does the section surely hold the answer.
        questions.append(passage.question)
    raise AssertionError("passages never end")


def _passages(rng: Random, firm: str) -> Iterator[_Passage]:
    """Passages without end; every round tells of each kind once, in a new order."""
    kinds = (_report, _minutes, _inventory, _inspection, _contract, _incident)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            yield kind(rng, firm)


def _day(rng: Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"


def _money(rng: Random) -> str:
    return f"{rng.randint(12, 980)},{rng.randint(0, 999):03d} euros"


def _report(rng: Random, firm: str) -> _Passage:
    month, goods, head = rng.choice(_MONTHS), rng.choice(_GOODS), rng.choice(_PEOPLE)
    units, change = rng.randint(1200, 98000), rng.randint(2, 31)
    direction = rng.choice(("more", "fewer"))
    return _Passage(
        f"Production report for {month}",
        (
            f"In {month} {firm} finished {units} {goods}, {change} percent {direction} than in the month before.",
            f"The report was prepared by {head}, who has led the department for {rng.randint(2, 19)} years.",
            f"Sales of {goods} came to {_money(rng)}, and the cost of material was {_money(rng)}.",
            f"The change is put down to {rng.choice(_CAUSES)}.",
            f"For the coming quarter {head} expects orders from {rng.choice(_PLACES)} and {rng.choice(_PLACES)}.",
        ),
        f"How many {goods} were finished in {month}?",
    )


def _minutes(rng: Random, firm: str) -> _Passage:
    chair, clerk, guest = rng.sample(_PEOPLE, 3)
    day, remedy = _day(rng), rng.choice(_REMEDIES)
    return _Passage(
        f"Minutes of the meeting of {day}",
        (
            f"{chair} took the chair, {clerk} kept the minutes, and {guest} attended as a guest.",
            f"The meeting opened at {rng.randint(8, 16)}:{rng.choice(('00', '15', '30', '45'))} with "
            f"{rng.randint(5, 24)} members of {firm} present.",
            f"{guest} explained that the delay of the spring had been caused by {rng.choice(_CAUSES)}.",
            f"After a short discussion it was agreed to {remedy}, with {rng.randint(4, 12)} votes in favour and "
            f"{rng.randint(0, 3)} against.",
            f"A budget of {_money(rng)} was set aside for this, to be spent before {_day(rng)}.",
        ),
        f"What was agreed at the meeting of {day}?",
    )


def _inventory(rng: Random, firm: str) -> _Passage:
    keeper, place = rng.choice(_PEOPLE), rng.choice(_PLACES)
    first, *others = rng.sample(_GOODS, 4)
    return _Passage(
        f"Inventory of the store in {place}",
        (
            f"The count in {place} was made on {_day(rng)} under the supervision of {keeper}.",
            f"Hall A holds {rng.randint(40, 900)} boxes of {first}, stacked on shelf {rng.randint(1, 48)}.",
            *(
                f"Hall {hall} holds {rng.randint(40, 900)} boxes of {goods}, of which {rng.randint(2, 38)} are damaged."
                for hall, goods in zip("BCD", others, strict=True)
            ),
            f"{firm} has insured the whole store for {_money(rng)}.",
        ),
        f"How many boxes of {first} does hall A in {place} hold?",
    )


def _inspection(rng: Random, firm: str) -> _Passage:
    inspector, place = rng.choice(_PEOPLE), rng.choice(_PLACES)
    remedy = rng.choice(_REMEDIES)
    return _Passage(
        f"Inspection of the {place} line",
        (
            f"{inspector} inspected the {place} line on {_day(rng)} and measured {rng.randint(3, 40)} points.",
            f"The mean temperature was {rng.randint(18, 74)} degrees, the highest {rng.randint(75, 120)} degrees.",
            f"Of {rng.randint(50, 400)} parts examined, {rng.randint(1, 29)} fell outside the tolerance of "
            f"0.{rng.randint(1, 9)} millimetres.",
            f"The inspector advises {firm} to {remedy}.",
            f"The next inspection is due on {_day(rng)}.",
        ),
        f"Who inspected the {place} line?",
    )


def _contract(rng: Random, firm: str) -> _Passage:
    partner = rng.choice([other for other in _FIRMS if other != firm])
    goods, buyer = rng.choice(_GOODS), rng.choice(_PEOPLE)
    return _Passage(
        f"Contract with {partner}",
        (
            f"{firm} and {partner} agree on the delivery of {rng.randint(300, 9000)} {goods} a month.",
            f"The price is {_money(rng)} a year, payable within {rng.choice((14, 30, 45, 60))} days.",
            f"{buyer} signed for {firm}; the signature of {partner} followed on {_day(rng)}.",
            f"Either side may end the contract with {rng.randint(2, 12)} months of notice.",
            f"Goods that arrive damaged are replaced by {partner} within {rng.randint(3, 20)} working days.",
        ),
        f"Who signed the contract with {partner} for {firm}?",
    )


def _incident(rng: Random, firm: str) -> _Passage:
    witness, helper = rng.sample(_PEOPLE, 2)
    place, cause = rng.choice(_PLACES), rng.choice(_CAUSES)
    return _Passage(
        f"Incident in {place}",
        (
            f"On {_day(rng)}, at {rng.randint(1, 11)} in the morning, {firm} had to stop work in {place}.",
            f"{witness} noticed it first and called {helper}, who closed the gates.",
            f"The reason was {cause}, and the loss is estimated at {_money(rng)}.",
            f"Work was taken up again after {rng.randint(3, 71)} hours.",
            f"Nobody was hurt, and {helper} was thanked in writing.",
        ),
        f"What was the reason for the incident in {place}?",
    )
