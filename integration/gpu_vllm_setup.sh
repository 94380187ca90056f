#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside vLLM, for a GPU host without pip.
#
#   source integration/gpu_vllm_setup.sh SITE [PEERS]      SITE: where vLLM was unpacked; PEERS: LMCache, in front of it
#
# Either may be "". See gpu_setup.sh.
dsl=$1/nvidia_cutlass_dsl/dsl_packages  # which its wheel adds to the path by a file that counts in site-packages alone
[ -d "$dsl" ] || dsl=
source integration/gpu_setup.sh vllm "${2:-}" "$dsl" "$1"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
export VLLM_DEEP_GEMM_WARMUP=skip  # which compiles some 300 kernels for the small DeepSeek-V4, and few are used
if [ -d "$1/nccl" ]; then
    libraries=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    LD_LIBRARY_PATH=$(printf ':%s' "$1/nccl" "$libraries"/*/lib)
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:1} LD_PRELOAD="$1/nccl/libnccl.so.2"
fi
