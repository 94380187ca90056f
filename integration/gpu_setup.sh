#!/usr/bin/env bash
# Make an importable copy of the package and its integration tests beside an engine, for a GPU host without pip: what
# gpu_vllm_setup.sh and gpu_sglang_setup.sh have in common.
#
#   source integration/gpu_setup.sh ENGINE FOLDER...
#
# ENGINE: its module, vllm or sglang; FOLDERs: whole paths, in front of the copy, the engine's last; each may be "".
# To be sourced in the root of the repository: the copy leaves that off the path, as its folder of kernels has a name that
# vLLM imports. Results name the commit by BENCH_COMMIT, which is to be set where this tree is itself a copy without its
# repository; elsewhere the repository says it.
copy=$(mktemp -d) || exit 2
python3 -m integration.vendor "$copy/kv_connector" >/dev/null || exit 2
cp -r integration tests conftest.py "$copy/" || exit 2
described() { [ -e .git ] && git describe --always --abbrev=40 --exclude='*' --dirty=+ 2>/dev/null; }
BENCH_COMMIT=$(described || echo "${BENCH_COMMIT:-}")
export BENCH_COMMIT
[ -n "$BENCH_COMMIT" ] || echo 'results will name no commit: set BENCH_COMMIT' >&2
PYTHONPATH=
for folder in "${@:2}"; do
    PYTHONPATH+=${folder:+$folder:}
done
export PYTHONPATH+=$copy PYTHONUNBUFFERED=1
cd "$copy" || exit 2
python3 -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))' "$1" || {
    printf 'there is no %s in "%s"\n' "$1" "${!#}" >&2
    exit 2
}
