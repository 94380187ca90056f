#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside vLLM, for a GPU host without pip.
#
#   source integration/gpu_vllm_setup.sh SITE [PEERS]      SITE: where vLLM was unpacked; PEERS: LMCache, in front of it
#
# Either may be "", and both are whole paths. To be sourced in the root of the repository: the copy leaves that off the
# path, as its folder of kernels has a name that vLLM imports. Results name the commit by BENCH_COMMIT, which is to be set
# where this tree is itself a copy without its repository; elsewhere the repository says it.
site=$1
peers=${2:-}
copy=$(mktemp -d) || exit 2
python3 -m integration.vendor "$copy/kv_connector" >/dev/null || exit 2
cp -r integration tests conftest.py "$copy/" || exit 2
described() { [ -e .git ] && git describe --always --abbrev=40 --exclude='*' --dirty=+ 2>/dev/null; }
BENCH_COMMIT=$(described || echo "${BENCH_COMMIT:-}")
export BENCH_COMMIT
[ -n "$BENCH_COMMIT" ] || echo 'results will name no commit: set BENCH_COMMIT' >&2
export PYTHONPATH="${peers:+$peers:}${site:+$site:}$copy" PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
if [ -d "$site/nccl" ]; then
    libraries=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    LD_LIBRARY_PATH=$(printf ':%s' "$site/nccl" "$libraries"/*/lib)
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:1} LD_PRELOAD="$site/nccl/libnccl.so.2"
fi
cd "$copy" || exit 2
python3 -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))' || {
    printf 'there is no vllm in "%s"\n' "$site" >&2
    exit 2
}
