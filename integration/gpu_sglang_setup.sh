#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside SGLang, for a GPU host without pip.
#
#   source integration/gpu_sglang_setup.sh SITE          SITE: where SGLang was unpacked, or "" where it is installed
#
# As gpu_vllm_setup.sh. The tree core is Python's: the one in Rust needs the very torch that SGLang pins.
site=$1
copy=$(mktemp -d) || exit 2
python3 -m integration.vendor "$copy/kv_connector" >/dev/null || exit 2
cp -r integration tests conftest.py "$copy/" || exit 2
described() { [ -e .git ] && git describe --always --abbrev=40 --exclude='*' --dirty=+ 2>/dev/null; }
BENCH_COMMIT=$(described || echo "${BENCH_COMMIT:-}")
export BENCH_COMMIT
[ -n "$BENCH_COMMIT" ] || echo 'results will name no commit: set BENCH_COMMIT' >&2
export PYTHONPATH="${site:+$site:}$copy" PYTHONUNBUFFERED=1
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
cd "$copy" || exit 2
python3 -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("sglang"))' || {
    printf 'there is no sglang in "%s"\n' "$site" >&2
    exit 2
}
