"""Models for SGLang's benchmarks: `SGLANG_EXTERNAL_MODEL_PACKAGE` names this package in the engines' environment."""
