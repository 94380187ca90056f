"""Names in documents that `test_docs.py` does not look at: options of commands, keys of settings with the object that
they are in, attributes of classes, and calls of the admin endpoint."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_connector import config
from kv_connector.admin.routes import Routes
from kv_connector.cli import make_parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]) if path.name != "CHANGELOG.md"]
FOREIGN_OPTIONS = {
    *("--calculate-kv-scales", "--cp-kv-cache-interleave-size", "--decode-context-parallel-size"),  # vLLM's
    *("--kv-events-config", "--mm-processor-kwargs", "--prefill-context-parallel-size", "--prefix-match-unit"),
    *("--prefix-cache-retention-interval", "--quantization"),
    *("--disable-radix-cache", "--enable-hierarchical-cache", "--enable-metrics-for-all-schedulers"),  # SGLang's
    *("--extra-metric-labels", "--lora-paths", "--model-path", "--schedule-policy"),
    "--unified-cache-external-linker-backend",
    *("--backend", "--extra_llm_api_options"),  # TensorRT-LLM's
    *("--bucket", "--lifecycle-configuration", "--unix-socket"),  # of aws and curl
}
"""Options of other programs that nothing here passes."""
OBJECTS = {
    "storage": config.StorageConfig,
    "storage.s3": config.S3Config,
    "peer": config.PeerConfig,
    "admin": config.AdminConfig,
    "tenants.NAME": config.TenantConfig,
}
"""Of settings that are objects, what has their keys."""

_CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+")
_COMMAND = re.compile(r"kv-connector((?: +[a-z][a-z-]*(?![\w.=/]))+)([^\n`;|&]*)")
_ATTRIBUTE = re.compile(r"\b([A-Z][A-Za-z]+)\.([a-z_]\w*)\b")
_KEY = re.compile(r"(?<![\w./-])(storage\.s3|storage|peer|admin|tenants\.NAME)\.([a-z]\w*)(?![\w./(])")


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Those of the commands right below it, by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: below for action in found for name, below in action.choices.items()}


def unknown_options(text: str) -> list[str]:
    """Each `kv-connector COMMAND ... --option` in code whose command does not have that option."""
    found = []
    for words, rest in _COMMAND.findall("\n".join(_CODE.findall(text))):
        parser, named = make_parser(), ["kv-connector"]
        for word in words.split():
            if word not in parsers_of(parser):
                break
            parser = parsers_of(parser)[word]
            named.append(word)
        options = {option for action in parser._actions for option in action.option_strings}
        found += [f"{' '.join(named)} {option}" for option in _OPTION.findall(words + rest) if option not in options]
    return found


def unknown_keys(text: str) -> list[str]:
    """Each `object.key` in code that is no setting."""
    pairs = _KEY.findall("\n".join(_CODE.findall(text)))
    return [
        f"{name}.{key}"
        for name, key in dict.fromkeys(pairs)
        if key not in {field.name for field in dataclasses.fields(OBJECTS[name])} and (name, key) != ("storage", "json")
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_and_keys_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    assert (unknown_options(text), unknown_keys(text)) == ([], [])


def test_options_and_keys_that_do_not_exist_are_found() -> None:
    text = "`kv-connector storage gc --capacity 1GiB --capasity 2GiB /a`, `kv-connector admin pin --ttl 3 --ttls 4`, "
    text += "`storage.path`, `storage.s3.bucket` and `{storage.s3.buckets, peer.portt}`"
    assert unknown_options(text) == ["kv-connector storage gc --capasity", "kv-connector admin pin --ttls"]
    assert unknown_keys(text) == ["storage.s3.buckets", "peer.portt"]


def test_other_options_are_of_a_script_here_or_of_an_engine() -> None:
    """What scripts, tests and tools of the repository pass to engines, they name as well."""
    paths = [path for folder in ("kv_connector", "integration", "tests") for path in (ROOT / folder).rglob("*.*")]
    sources = [path for path in paths if path.suffix in (".py", ".sh", ".yaml") and path != Path(__file__)]
    known = set(_OPTION.findall("\n".join(path.read_text() for path in (*sources, ROOT / "Makefile"))))
    code = [shown for path in DOCUMENTS for shown in _CODE.findall(path.read_text())]
    assert set(_OPTION.findall("\n".join(code))) - known == FOREIGN_OPTIONS


def classes(*folders: str) -> dict[str, set[str]]:
    """Of each class that is defined there what it and the classes that it names as its bases have, by name."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(names_of(node))
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))

    def with_bases(name: str) -> set[str]:
        return own.get(name, set()).union(*(with_bases(base) for base in bases.get(name, set()) - {name}))

    return {name: with_bases(name) for name in own}


def names_of(owner: ast.ClassDef) -> Iterator[str]:
    """Methods, fields, and what methods set of `self`."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_attributes_of_classes_that_documents_name_exist() -> None:
    """`Class.name`: of classes that are defined here, but for what is vLLM's, names of files and of placeholders."""
    ours = classes("kv_connector", "integration")
    named = {
        pair for path in DOCUMENTS for code in _CODE.findall(path.read_text()) for pair in _ATTRIBUTE.findall(code)
    }
    others = {("ModelConfig", "compute_hash"), ("ARCHITECTURE", "md"), ("NAME", "quota"), ("NAME", "weight")}
    assert len(named) > 20
    assert {(owner, name) for owner, name in named if name not in ours.get(owner, ())} == others


def test_calls_of_the_admin_endpoint_are_those_that_it_answers() -> None:
    page = (ROOT / "docs" / "admin.md").read_text()
    named = set(re.findall(r"(?m)^\| `([A-Z]+) (/v1/\S+)` \|", page))
    routes = Routes(lambda command, seconds: {}, prefixes=None)._handlers  # type: ignore[arg-type]
    answered = {(method, path) for path, handlers in routes.items() for method in handlers}
    assert {(method, re.sub("/(ID|NAME)", "/*", path)) for method, path in named} == answered
