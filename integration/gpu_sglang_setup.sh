#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside SGLang, for a GPU host without pip.
#
#   source integration/gpu_sglang_setup.sh SITE          SITE: where SGLang was unpacked, or "" where it is installed
#
# As gpu_vllm_setup.sh. The tree core is Python's: the one in Rust needs the very torch that SGLang pins.
site=$1
copy=$(mktemp -d)
python3 -m integration.vendor "$copy/kv_connector" >/dev/null
cp -r integration tests conftest.py "$copy/"
export BENCH_COMMIT=${BENCH_COMMIT:-$(git describe --always --abbrev=40 --exclude='*' --dirty=+ 2>/dev/null || true)}
export PYTHONPATH="${site:+$site:}$copy" SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
cd "$copy"
