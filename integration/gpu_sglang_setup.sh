#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside SGLang, for a GPU host without pip.
#
#   source integration/gpu_sglang_setup.sh SITE          SITE: where SGLang was unpacked, or "" where it is installed
#
# See gpu_setup.sh. The tree core is Python's: the one in Rust needs the very torch that SGLang pins.
source integration/gpu_setup.sh sglang "$1"
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
