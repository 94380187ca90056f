#!/usr/bin/env bash
# What needs a GPU and no engine: tests marked `gpu`, kernels under the sanitizer, the benchmarks, the demo.
#
#   bash integration/gpu.sh [OUT [PART ...]]
#
# OUT: for results, traces and pictures (default: build/gpu); parts, all of them unless some are named: tests sanitizer
# copies submitting awaited host_pool copies_many interference lossless pd overlap demo. A part that fails, or takes
# longer than PART_SECONDS (590), does not stop the others; the exit status says whether one did.
#
# It needs a Python with torch, triton, numpy, pytest and hypothesis, and installs nothing: the package is copied to a
# temporary folder, kernels in place. The demo runs where transformers and the model's package are there too, and lossless
# needs build/smollm2_caches.npz, which `python -m integration.models.smollm2_caches` has written there. A file of tests
# that imports what is not installed counts as a failure, and the others run all the same. With GPU=N all of it sees that
# GPU alone; otherwise copies_many takes all that there are, and pd and some tests two.
set -euo pipefail
cd "$(dirname "$0")/.."
known=(tests sanitizer copies submitting awaited host_pool copies_many interference lossless pd overlap demo)
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=("${known[@]}")
for part in "${parts[@]}"; do
  [[ " ${known[*]} " == *" $part "* ]] || { echo "there is no part $part: give some of ${known[*]}" >&2; exit 2; }
done
out=${1:-build/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m integration.vendor "$site/kv_connector" > /dev/null
# The copy comes first, so that kv_connector is the one with its kernels.
export PYTHONPATH="$site:${PYTHONPATH:-}:$PWD" PYTHONUNBUFFERED=1
[ -z "${GPU:-}" ] || export CUDA_VISIBLE_DEVICES=$GPU
failed=0
step() {
  printf '\n==> %s\n' "$*"
  timeout -k 5 "${PART_SECONDS:-590}" "$@" || { echo "FAILED with status $?: $*" >&2; failed=1; }
}
tests=(python3 -P -m pytest -q -c /dev/null --rootdir "$PWD" --import-mode=importlib -m gpu -p no:cacheprovider
  --disable-warnings)

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
for part in "${parts[@]}"; do
  case $part in
    tests) step "${tests[@]}" --continue-on-collection-errors tests integration/tests ;;
    sanitizer)
      if command -v compute-sanitizer > /dev/null; then
        step compute-sanitizer --tool memcheck --error-exitcode 1 "${tests[@]}" tests/triton_kernels/test_copy_pieces.py \
          tests/triton_kernels/test_code_pieces.py
      fi
      ;;
    overlap) step python3 -P -m integration.bench.overlap --json "$out/overlap.json" --trace "$out/overlap_trace.json" ;;
    demo)
      if python3 -P -c 'import transformers; from integration.models.smollm2 import find_gguf; find_gguf()' 2> /dev/null
      then
        step python3 -P -m integration.mini_engine.demo --json "$out/demo.json" --png "$out/demo.png"
        step python3 -P -m integration.mini_engine.demo --document-tokens 1000 --device-blocks 128 \
          --json "$out/demo_1000.json" --png "$out/demo_1000.png"
      else
        echo 'no demo: the model package is not installed here'
      fi
      ;;
    *) step python3 -P -m "integration.bench.$part" --json "$out/$part.json" ;;
  esac
done
exit "$failed"
