"""What a mutant is: a fault, put back by a small textual patch, and the command that must notice."""

from __future__ import annotations

from dataclasses import dataclass

_PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Patch:
    """`old` occurs exactly once in `file` and becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """`command` fails with the fault and passes without it: arguments of Python. `environment` is the folder of the
    virtual environment whose Python that is; empty where any that runs the tests will do."""

    name: str
    title: str
    patches: tuple[Patch, ...]
    command: tuple[str, ...]
    environment: str = ""


def simulated(worlds: int, seed: int = 1) -> tuple[str, ...]:
    """Worlds of which one must fail, up to the first that does; what fails is not shortened."""
    steps = ("--steps", str(1 << 40))
    return ("-m", "tests.simulation", "--seed", str(seed), "--worlds", str(worlds), *steps, "--shrink-seconds", "0")


def tested(*names: str) -> tuple[str, ...]:
    """Tests of which one must fail."""
    return (*_PYTEST, *names)


def tests_of(command: tuple[str, ...]) -> tuple[str, ...]:
    """The names that `tested` was given; none of another command."""
    return command[len(_PYTEST) :] if command[: len(_PYTEST)] == _PYTEST else ()
