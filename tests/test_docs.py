"""What the documents name exists: files and folders of the repository, modules and commands that are run, targets of
make, extras, metrics; their links lead somewhere, in the repository and in the site that is built from them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
import yaml

from integration import docs_site, overview
from integration.figures import documents, reference
from integration.figures.results import RESULTS
from kv_connector import config
from kv_connector.cli import main
from kv_connector.histograms import HISTOGRAMS
from kv_connector.metrics import DOCUMENTATION, TENANT_DOCUMENTATION

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SCRIPTS = sorted([ROOT / "Makefile", ROOT / ".ci" / "run", *ROOT.glob("integration/*.sh")])
BASES = ("", "docs", "kv_connector", "integration/bench/results")
"""Folders that a path may be relative to: ARCHITECTURE.md writes `scheduler/half.py`, benchmarks.md names results."""
MADE = (".venv", "build/", "dist/", "out.json")
"""What a command that is shown makes."""
TRANSFER_KEYS = {
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
}
"""Of vLLM's `KVTransferConfig`, those that documents give."""
FOREIGN = {
    "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    "lmdeploy/pytorch/kv_connector/base.py",
    "lmdeploy/pytorch/kv_connector/factory.py",
}
"""Paths in the repositories of vLLM and LMDeploy."""
FOREIGN_NAMES = {
    *("build_kv_connector", "prepare_kv_connector_config", "offload_prompt_only"),  # of other connectors
    *("extra_body", "vllm_xargs", "mooncake_client", "credential_process", "conversation_trace"),
    *("histogram_quantile", "rule_files"),  # of Prometheus
    *("num_x", "x_ids"),  # CONTRIBUTING.md: how names are made
}
"""Names in documents that are nobody's here."""

_CODE = re.compile(r"```.*?```|`[^`]+`|\]\([^)]+\)", re.DOTALL)
_FILE = re.compile(r"(?<![\w/.$}{~-])((?:[A-Za-z_.][\w.-]*/)*[\w.-]+\.(?:md|py|sh|json|gz|png|toml))(?![\w/*])")
_PLACE = re.compile(r"(?<![\w/.$}{~:=-])((?:[a-z_.][\w.-]*/)+[\w-]*)(?![\w/*.$<{-])")
_DOCUMENT = re.compile(r"(?<![\w/])((?:docs/)?[\w-]+\.md)\b")
_MODULE = re.compile(r"python3?(?: -P)?\s+-m\s+((?:integration|tests|kv_connector)(?:\.\w+)*)")
_TARGET = re.compile(r"\bmake\s+([a-z][\w-]*)")
_COMMAND = re.compile(r"(?m)(?:^|[`($|&]) *kv-connector((?: +[a-z][a-z-]*(?![\w.=/]))+)")
_EXTRA = re.compile(r"'\.\[([\w,-]+)\]'")
_METRIC = re.compile(r"\b(?:vllm|sglang):kv_tiered_([a-z_]+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAME = re.compile(r"(?<![\w/.-])[a-z]+(?:_[a-z0-9]+)+(?![\w/-])")
_VARIABLE = re.compile(r"(?<![\w/.-])(?!(?:AWS|SSL|VLLM)_)[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?!\w)")
_HEADING = re.compile(r"(?m)^#+ +(.+?) *$")
_FENCED = re.compile(r"(?ms)^ *```.*?^ *```")


def is_there(path: str) -> bool:
    """Whether there is such a file or folder; a module may be named without `.py`."""
    return any((ROOT / base / (path + suffix)).exists() for base in BASES for suffix in ("", ".py"))


def missing(text: str, is_script: bool = False) -> list[str]:
    """What `text` names and is not there: in a script in all of it, else in what is marked as code, and documents."""
    code = text if is_script else "\n".join(_CODE.findall(text))
    # A place is meant to be ours by its first part: `layers/heads` is none.
    ours = {path.name for path in (*ROOT.iterdir(), *(ROOT / "kv_connector").iterdir()) if path.is_dir()}
    places = [place for place in _PLACE.findall(code) if place.split("/")[0] in ours]
    # A script may name files of the folder that it is in by then.
    files = [file for file in _FILE.findall(code) if not is_script or ("/" in file and not file.startswith("."))]
    paths = dict.fromkeys([*files, *places, *_DOCUMENT.findall(text)])
    found = [path for path in paths if path not in FOREIGN and not path.startswith(MADE) and not is_there(path)]
    for module in dict.fromkeys(_MODULE.findall(text)):
        path = module.replace(".", "/")
        if not is_there(f"{path}.py") and not is_there(f"{path}/__main__.py"):
            found.append(f"python -m {module}")
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # Behind `#` are remarks: "make sure" is no target.
    named = _TARGET.findall(re.sub(r"(?m)(?:^|\s)#.*$", "", code))
    return found + [f"make {target}" for target in dict.fromkeys(named) if target not in targets]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(document: Path) -> None:
    assert missing(document.read_text()) == []


@pytest.fixture(scope="module")
def names_of_the_source() -> set[str]:
    """All words of the source, of names of files, and of the results' claims."""
    folders = [ROOT / name for name in ("kv_connector", "triton_kernels", "integration", "tests", "docs")]
    files = [path for folder in folders for path in folder.rglob("*.*")]
    sources = [path for path in files if path.suffix == ".py" and not path.is_relative_to(ROOT / "tests")]
    text = "".join(path.read_text() for path in (*sources, ROOT / "Makefile", ROOT / "pyproject.toml"))
    claims = {name for path in RESULTS.glob("*.json") for name in json.loads(path.read_text()).get("claims", ())}
    begun = {name.partition(".")[0] for name in claims}  # a name in a document ends in front of a point
    return {*re.findall(r"\w+", text), *(path.name.partition(".")[0] for path in files), *claims, *begun}


def unknown_names(text: str, known: set[str]) -> list[str]:
    """Names with `_` that a document marks as code, settings and metrics most of all, and the source has not; and
    variables of the environment, in what is to be run, too."""
    code = re.findall(r"`([^`\n]+)`", _FENCED.sub("", text))
    named = [re.sub(r"^kv_tiered_(tenant_)?", "", name) for name in _NAME.findall("\n".join(code))]
    named += _VARIABLE.findall("\n".join(_CODE.findall(text)))
    names = {name if name in known else re.sub("_(total|bucket)$", "", name) for name in named}
    return sorted(names - known - FOREIGN_NAMES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_a_document_are_in_the_source(document: Path, names_of_the_source: set[str]) -> None:
    assert unknown_names(document.read_text(), names_of_the_source) == []


def test_a_name_that_is_nobodys_is_found(names_of_the_source: set[str]) -> None:
    text = "```\nexport KV_CONECTOR_PEER_SECRET=x KV_CONNECTOR_PEER_SECRET=x\n```\n"
    text += '`expired_transfers`, `vllm:kv_tiered_peer_hit_tokens_total`, `expired_handoffs` and `{"hostt_memory": 0}`'
    assert unknown_names(text, names_of_the_source) == ["KV_CONECTOR_PEER_SECRET", "expired_handoffs", "hostt_memory"]


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    headings = _HEADING.findall(_FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(text: str, document: Path) -> list[str]:
    """Links in the text of a document to files of the repository, or headings in them, that are not there."""
    links = [link for link in _LINK.findall(_FENCED.sub("", text)) if not re.match(r"[a-z]+:", link)]
    parts = [link.partition("#") for link in links]
    targets = [document.parent / path if path else document for path, _, _ in parts]
    return [
        link
        for link, target, (_, _, anchor) in zip(links, targets, parts, strict=True)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    assert dead_links(document.read_text(), document) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    good = "[a](docs/vllm.md) [b](docs/vllm.md#command-line) [c](#more) [d](https://a.b/c)"
    bad = "[e](docs/gone.md) [f](docs/vllm.md#gone) [g](#gone)"
    assert dead_links(f"{good} {bad}", ROOT / "README.md") == ["docs/gone.md", "docs/vllm.md#gone", "#gone"]


def commands(text: str) -> list[tuple[str, ...]]:
    """Each `kv-connector COMMAND ...` that is named, without what is given to it."""
    return list(dict.fromkeys(tuple(words.split()) for words in _COMMAND.findall("\n".join(_CODE.findall(text)))))


def is_command(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the command line knows it, by what it says of its own help."""
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    capsys.readouterr()
    return left.value.code == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_document_exist(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [words for words in commands(document.read_text()) if not is_command(words, capsys)] == []


def test_a_command_that_is_none_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    named = commands("`kv-connector storage stat PATH`, `kv-connector storage sweep /a`, `the kv-connector here`")
    named += commands("```\n$ kv-connector fly\n```")
    assert named == [("storage", "stat"), ("storage", "sweep"), ("fly",)]
    assert [is_command(words, capsys) for words in named] == [True, False, False]


def transfer_configs(text: str) -> list[dict[str, object]]:
    """Each `--kv-transfer-config` that is shown whole."""
    return [json.loads(shown) for shown in re.findall(r"'(\{\s*\"kv_connector\".*?\})'", text, re.DOTALL)]


def test_lines_for_an_engine_are_ones_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KV_CONNECTOR_PEER_SECRET", "KV_CONNECTOR_STORAGE_SECRET"):
        monkeypatch.setenv(variable, "0123456789abcdef")
    shown = [given for document in DOCUMENTS for given in transfer_configs(document.read_text())]
    assert len(shown) >= 8
    for given in shown:
        assert given.keys() <= TRANSFER_KEYS
        assert given["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
        assert given.get("kv_load_failure_policy", "fail") in ("fail", "recompute")
        settings = given["kv_connector_extra_config"]
        assert isinstance(settings, dict)
        config.Config.from_mapping(settings)


def test_extras_and_metrics_that_are_named_exist() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    project = (ROOT / "pyproject.toml").read_text()
    optional = project[project.index("[project.optional-dependencies]") : project.index("[project.scripts]")]
    extras = set(re.findall(r"(?m)^([\w-]+) = \[", optional))
    named = {extra for group in _EXTRA.findall(text) for extra in group.split(",")}
    assert named and named <= extras
    metrics = {re.sub("_(total|bucket)$", "", name) for name in _METRIC.findall(text)}
    assert metrics == {*DOCUMENTATION, *HISTOGRAMS, *(f"tenant_{name}" for name in TENANT_DOCUMENTATION)}


def test_rules_for_sglang_name_its_series_and_labels() -> None:
    """The command of the page makes them."""
    (command,) = re.findall(r"`(sed '[^`]+) alerts.yml`", (ROOT / "docs" / "observability.md").read_text())
    made = subprocess.run([*shlex.split(command), reference.ALERTS], capture_output=True, text=True, check=True)
    (group,) = yaml.safe_load(made.stdout)["groups"]
    rules = [rule["expr"] for rule in group["rules"]]
    assert len(rules) == len(reference.alerts()) - 2
    assert all("sglang:kv_tiered_" in rule and "(instance, dp_rank" in rule for rule in rules)
    assert not any(re.search(r"vllm|\bengine\b", rule) for rule in rules)


def test_every_picture_is_shown_by_a_document() -> None:
    """So there is none that nobody looks at, and none beside the folders that they are in."""
    links = [(path.parent, link) for path in DOCUMENTS for link in _LINK.findall(path.read_text())]
    shown = {(folder / link).resolve() for folder, link in links if link.endswith(".png")}
    pictures = {*(ROOT / "docs").rglob("*.png"), *RESULTS.glob("*.png")}
    assert {picture.parent for picture in pictures} == {ROOT / "docs" / "pictures", RESULTS}
    assert pictures == shown


def lines_of_the_log() -> list[str]:
    """Texts by which docs/operations.md has a user find what to do."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = page[page.index("## Troubleshooting") :].splitlines()
    symptoms = [row.split("|")[1] for row in rows if row.startswith("| ")]
    return [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom) if " " in text]


def test_lines_of_the_log_are_as_the_documents_have_them() -> None:
    """The source has them, with `...` in the places of numbers, wherever it breaks a text in two."""
    source = "".join(path.read_text() for path in (ROOT / "kv_connector").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    source = re.sub(r"\{[^{}]*\}|%[sd]|%\.?\d*f", "...", source)
    texts = lines_of_the_log()
    assert len(texts) > 10
    assert [text for text in texts if text.strip(". ") not in source] == []


def test_results_that_the_code_goes_by_are_there() -> None:
    """A limit that follows from a measurement names it, and whoever doubts the limit finds it."""
    sources = [path for folder in ("kv_connector", "triton_kernels") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"`(\w+_h\d+\.json)`", path.read_text())}
    assert len(named) > 1
    assert named <= {path.name for path in RESULTS.iterdir()}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 135


def settings() -> Iterator[tuple[str, type]]:
    """Every class of settings, and of what a setting chooses among."""
    for name in config.__all__:
        kind = getattr(config, name)
        yield name, kind


def test_every_setting_and_every_choice_is_described() -> None:
    for name, kind in settings():
        if issubclass(kind, Enum):
            assert set(reference.described(kind)) == {one.value for one in kind}, name
        else:
            assert set(reference.described(kind)) == {field.name for field in dataclasses.fields(kind)}, name
    tables = {kind for kind, _ in reference.SETTINGS.values()}
    assert tables == {kind for _, kind in settings() if dataclasses.is_dataclass(kind)}, "docs/settings.md has them all"


def test_a_default_is_shown_as_a_user_would_write_it() -> None:
    cells = [line.split("|") for line in reference.settings_of(config.Config)]
    lines = {key.strip(" `"): default.strip() for _, key, default, *_ in cells}
    assert lines["staging_memory"] == '`"384MiB"`'
    assert lines["write_policy"] == '`"adaptive"`'
    assert (lines["pin_memory"], lines["write_back_lookahead"], lines["storage"]) == ("`true`", "`64`", "none")


def test_the_picture_of_the_readme_is_of_the_results() -> None:
    assert overview.shown_by(overview.PICTURE) == overview.shown(), "run python -m integration.overview --write"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site") / "docs"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ["NO_MKDOCS_2_WARNING"] = "1"
    child = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    return out


def test_the_site_has_a_page_for_each_document(site: Path) -> None:
    pages = {path.with_suffix("").name for path in site.glob("*.html")}
    documents = {path.stem for path in ROOT.glob("docs/*.md")}
    assert documents | {Path(page).stem for page in docs_site.PAGES.values()} <= pages
    assert re.search(r"about \d+ bytes of the scheduler", (site / "choosing.html").read_text())


def test_the_site_takes_nothing_from_other_servers(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
    styles = re.compile(r"""url\(["']?((?:https?:)?//[^)"']+)""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert {link for page in pages for link in loaded.findall(page.read_text())} == set()
    assert {link for sheet in site.rglob("*.css") for link in styles.findall(sheet.read_text())} == set()


def test_pictures_of_results_are_in_the_site(site: Path) -> None:
    for page in site.glob("*.html"):
        pictures = re.findall(r'<img[^>]*? src="([^"]+)"', page.read_text())
        assert all((site / picture).exists() for picture in pictures), page
    assert (site / "results" / "overview.png").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_runs_is_there(script: Path) -> None:
    assert missing(script.read_text(), is_script=True) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("see `kv_connector/base.py` and `scheduler/half.py`", []),
        ("see `kv_connector/handovers.py`", ["kv_connector/handovers.py"]),
        ("see docs/vllm.md", []),
        ("see docs/gone.md", ["docs/gone.md"]),
        ("the result is `index.json`, not `vllm_serving_h200.json`", ["vllm_serving_h200.json"]),
        ("![picture](integration/bench/results/gone.png)", ["integration/bench/results/gone.png"]),
        ("tests lie in `tests/handovers/`, kernels in `triton_kernels/`", ["tests/handovers/"]),
        ("read `index/tree`, `index/forest`, `heads/layers` and `.ci/run`", ["index/forest"]),
        ("python -m integration.bench.index, python -m integration.gone", ["python -m integration.gone"]),
        ("run `make\nsimulate`, not `make gone ARGS=1`; make sure", ["make gone"]),
    ],
)
def test_what_is_not_there_is_named(text: str, named: list[str]) -> None:
    assert missing(text) == named


def test_figures_that_are_written_from_results_are_those_of_the_results() -> None:
    written = "".join(path.read_text() for path in documents.with_figures())
    names = {*documents.WRITERS, *reference.TABLES}
    assert {name for name in names if f"<!-- figures: {name} -->" in written} == names
    for path in documents.with_figures():
        text = path.read_text()
        assert text == documents.renewed(text), "run python -m integration.figures --write"


def test_all_say_the_same_memory_of_a_cached_block() -> None:
    texts = [path.read_text() for path in (*DOCUMENTS, ROOT / "kv_connector" / "index" / "tree.py")]
    said = [int(number) for text in texts for number in re.findall(r"about (\d+) bytes", text)]
    assert len(said) == 4 and len(set(said)) == 1
    measured = json.loads((RESULTS / "index.json").read_text())["claims"]["memory_per_cached_block"]["value"]
    assert abs(said[0] - measured) < 0.01 * measured


def test_a_figure_that_is_not_of_its_result_is_found() -> None:
    text = "a\n  <!-- figures: mutants -->\n  all of them\n  <!-- end of figures -->\nb\n"
    lines = documents.renewed(text).splitlines()
    assert (lines[:2], lines[-2:]) == (["a", "  <!-- figures: mutants -->"], ["  <!-- end of figures -->", "b"])
    assert "all of them" not in documents.renewed(text) and lines[2].startswith("  The last run of all")
    assert documents.renewed(documents.renewed(text)) == documents.renewed(text)


def test_a_benchmark_that_is_none_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    """Here nothing can be: there is no Python."""
    command = ["make", "bench", "BENCH=typo", f"VENV={tmp_path / 'venv'}", "PYTHON=false"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    child = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert child.returncode == 2
    assert child.stderr.splitlines()[0] == "no benchmark typo: see integration/bench"


@pytest.mark.parametrize(("status", "is_well"), [(0, True), (1, False), (5, True)])
@pytest.mark.parametrize("target", ["test-vllm", "test-sglang"])
def test_an_engine_that_has_no_test_of_a_name_does_not_end_make(target: str, status: int, is_well: bool) -> None:
    """`make test ARGS="-k NAME"` gives it to each of them; pytest ends with 5 where it chooses none."""
    old = [f"--old-file={name}" for name in ("model", "vllm", "sglang")]
    tests = [f"{name}=bash -c 'exit {status}'" for name in ("run_vllm_tests", "run_sglang_tests")]
    command = ["make", *old, target, "ARGS=-k nosuch", *tests]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    assert (subprocess.run(command, cwd=ROOT, env=environ, capture_output=True).returncode == 0) is is_well
