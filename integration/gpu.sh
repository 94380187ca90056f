#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests marked `gpu`, kernels under the sanitizer, the demo, the benchmarks.
#
#   integration/gpu.sh [OUT_DIR]            results, traces and pictures go to OUT_DIR (default: build/gpu)
#   integration/gpu.sh OUT_DIR tests        the tests alone
#
# It needs a Python with torch, triton, numpy, pytest and hypothesis, and installs nothing: the package is copied to a
# temporary folder, kernels in place. The demo runs where transformers and the model's package are there too. A file of
# tests that imports what is not installed counts as a failure, and the others run all the same.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m integration.vendor "$site/kv_connector" > /dev/null
# The copy comes first, so that kv_connector is the one with its kernels.
export PYTHONPATH="$site:${PYTHONPATH:-}:$PWD" PYTHONUNBUFFERED=1
failed=0
step() { printf '\n==> %s\n' "$*"; "$@" || { failed=1; echo "FAILED: $*" >&2; }; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
step python3 -P -m pytest -q -c /dev/null --rootdir "$PWD" --import-mode=importlib -m gpu -p no:cacheprovider \
  --disable-warnings --continue-on-collection-errors tests integration/tests
if command -v compute-sanitizer > /dev/null; then
  step compute-sanitizer --tool memcheck --error-exitcode 1 python3 -P -m pytest -q -c /dev/null --rootdir "$PWD" \
    --import-mode=importlib -m gpu -p no:cacheprovider --disable-warnings tests/triton_kernels/test_copy_pieces.py \
    tests/triton_kernels/test_code_pieces.py
fi
[ "${2:-all}" = all ] || exit "$failed"
step python3 -P -m integration.bench.copies --json "$out/copies.json"
step python3 -P -m integration.bench.submitting --json "$out/submitting.json"
step python3 -P -m integration.bench.host_pool --json "$out/host_pool.json"
step python3 -P -m integration.bench.copies_many --json "$out/copies_many.json"
step python3 -P -m integration.bench.interference --json "$out/interference.json"
step python3 -P -m integration.bench.lossless --json "$out/lossless.json"
step python3 -P -m integration.bench.pd --json "$out/pd.json"
step python3 -P -m integration.bench.overlap --json "$out/overlap.json" --trace "$out/overlap_trace.json"
if python3 -P -c 'import transformers; from integration.models.smollm2 import find_gguf; find_gguf()' 2> /dev/null; then
  step python3 -P -m integration.mini_engine.demo --json "$out/demo.json" --png "$out/demo.png"
  step python3 -P -m integration.mini_engine.demo --document-tokens 1000 --device-blocks 128 \
    --json "$out/demo_1000.json" --png "$out/demo_1000.png"
else
  echo 'no demo: the model package is not installed here'
fi
exit "$failed"
