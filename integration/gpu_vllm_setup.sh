#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside vLLM, for a GPU host without pip.
#
#   source integration/gpu_vllm_setup.sh SITE [PEERS]      SITE: where vLLM was unpacked; PEERS: LMCache, in front of it
#
# The copy leaves the repository's root off the path: its folder of kernels has a name that vLLM imports. Results name the
# commit by BENCH_COMMIT, which is to be set where this tree is itself a copy without its repository.
site=$1
peers=${2:-}
copy=$(mktemp -d)
python3 -m integration.vendor "$copy/kv_connector" >/dev/null
cp -r integration tests conftest.py "$copy/"
export BENCH_COMMIT=${BENCH_COMMIT:-$(git describe --always --abbrev=40 --exclude='*' --dirty=+ 2>/dev/null || true)}
export PYTHONPATH="${peers:+$peers:}$site:$copy" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
if [ -d "$site/nccl" ]; then
    libraries=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    export LD_LIBRARY_PATH="$site/nccl:$(ls -d "$libraries"/*/lib | tr '\n' ':')" LD_PRELOAD="$site/nccl/libnccl.so.2"
fi
cd "$copy"
