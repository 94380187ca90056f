"""A model's config.json, wherever it lies, and how its values are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...values import shown

_INNER = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where models of several media keep what their language model is."""
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Of a number of a cache."""
_MOST = 1 << 24
"""Of any number in such a file that counts here."""
_ADVICE = "write a number from {} to {} into a copy of the file, as in the model's documentation"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says of the language model. `path` is the file."""

    path: str
    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The family, as Transformers names it."""
        return str(self.values.get("model_type", ""))

    @property
    def architectures(self) -> Sequence[str]:
        """Classes that serve it."""
        return self.texts("architectures")

    @property
    def num_layers(self) -> int:
        """Of the decoder, those among them that have no cache too."""
        return self.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def hidden_size(self) -> int:
        """Numbers of a token between layers."""
        return self.integer("hidden_size", "n_embd", "d_model")

    @property
    def dtype(self) -> str:
        """Of the weights, and so of the cache where nothing else is asked for."""
        return str(self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16").removeprefix("torch.")

    def get(self, *names: str) -> Any:
        """The first of these that is there and not null; None for none."""
        return next((value for name in names if (value := self.values.get(name)) is not None), None)

    def integer(self, *names: str, least: int = 0) -> int:
        """The first of these that is there. Raises ConfigError where it is no integer of at least `least`, or none is
        there: some files leave out what is as in the model's class, which is not known here."""
        value = self.optional(*names, least=least)
        if value is None:
            raise ConfigError(f"{self.path} has no {' or '.join(names)}: {_ADVICE.format(least, _MOST)}")
        return value

    def optional(self, *names: str, least: int = 0) -> int | None:
        """As `integer`; None where none is there."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            raise ConfigError(
                f"{self.path} has {shown(value)} for {' or '.join(names)}: {_ADVICE.format(least, _MOST)}"
            )
        return value

    def texts(self, name: str) -> Sequence[str]:
        """A list of texts; empty where it is not there. Raises ConfigError for anything else."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ConfigError(
                f"{self.path} has {shown(value)} for {name}: write a list of texts into a copy of the file"
            )
        return value


def read_model(name: str) -> ModelConfig:
    """Of a folder, a config.json, or a model in the local cache of Hugging Face. Raises ConfigError, and OSError."""
    path = _find(name)
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no object: give a model's config.json")
    for inner in _INNER:
        while isinstance(values.get(inner), dict):
            values = values | {inner: None} | values[inner]
    if values.get("is_encoder_decoder"):
        raise ConfigError(f"{path}: the caches of encoders are not kept, so there is nothing to size")
    return ModelConfig(str(path), values)


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        cache = _hub_cache() / f"models--{name.replace('/', '--')}"
        found = sorted((cache / "snapshots").glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
        raise ConfigError(f"{shown(name)} is neither a file nor in {cache}: download its config.json, or give a path")
    raise ConfigError(f"{shown(name)} is no config.json, and no folder with one")


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
