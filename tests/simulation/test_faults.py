"""The faults that `make mutants` puts back still fit the code, and name tests that exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .faults import MUTANTS
from .faults import mutant as commands
from .faults.mutant import Mutant
from .mutants import ROOT, apply


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_put_back_and_is_looked_for_by_a_test_that_exists(mutant: Mutant, tmp_path: Path) -> None:
    for file in {patch.file for patch in mutant.patches}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    apply(mutant, tmp_path)
    for patch in mutant.patches:
        compile((tmp_path / patch.file).read_text(), patch.file, "exec")
    for name in commands.tests_of(mutant.command):
        if not name.startswith(("tests/", "integration/")):
            continue  # an option of pytest's
        file, _, test = name.partition("::")
        assert (ROOT / file).exists()
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_each_fault_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
