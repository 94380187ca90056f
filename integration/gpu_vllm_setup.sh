#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside vLLM, for a GPU host without pip.
#
#   source integration/gpu_vllm_setup.sh SITE      SITE: where vLLM was unpacked
#
# The copy leaves the repository's root off the path: its folder of kernels has a name that vLLM imports.
site=$1
copy=$(mktemp -d)
python3 -m integration.vendor "$copy/kv_connector" >/dev/null
cp -r integration conftest.py "$copy/"
export PYTHONPATH="$site:$copy" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
if [ -d "$site/nccl" ]; then
    libraries=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    export LD_LIBRARY_PATH="$site/nccl:$(ls -d "$libraries"/*/lib | tr '\n' ':')" LD_PRELOAD="$site/nccl/libnccl.so.2"
fi
cd "$copy"
