"""Optional libraries, each needed for one purpose alone (layer 0)."""

from __future__ import annotations

_LIBRARIES = (
    "rich>=13",
    "shtab>=1.7",
    "nvidia-ml-py>=12.535",
    "isal>=1.7",
    "mooncake-transfer-engine-non-cuda>=0.3.13,<0.4",
    "obstore>=0.11,<0.13",
    "botocore>=1.34",
    "opentelemetry-sdk>=1.25",
    "opentelemetry-exporter-otlp-proto-http>=1.25",
    "nixl-cu12>=1.5,<2",
    "nixl-cu13>=1.5,<2",
)
"""As the extras of pyproject.toml have them."""
_REQUIREMENTS = {library.partition(">=")[0]: library for library in _LIBRARIES}


def pip_line(*names: str) -> str:
    """The command that installs these libraries. It names them and no extra of ours, so it is right in an environment
    into which this package came from a checkout, a wheel or an index. Raises KeyError for a library that no extra has.
    """
    return f"pip install {' '.join(repr(_REQUIREMENTS[name]) for name in names)}"
