#!/usr/bin/env bash
# The tests and benchmarks of the connector in real vLLM on a GPU: each part a call of at most ten minutes.
#
#   bash integration/gpu_vllm.sh SITE OUT PEERS [PART ...]
#
# SITE: folder with vLLM, or "" where it is installed; OUT: for results; PEERS: folder with LMCache, or "" where it is
# installed or left out; parts, all of them unless some are named: tests ttft_graphs ttft_eager misses, serving_0.5x and
# the like for other sizes of the host, and regimes, which makes one table of all the serving_ results in OUT. GPU=N
# takes another GPU than the first, so that two parts can run beside each other; CONNECTORS are those of the serving_
# parts. A part that fails or takes too long does not stop the others; each leaves a log in OUT.
set -uo pipefail
shopt -s nullglob
out=$(mkdir -p "$2" && cd "$2" && pwd)
site=$1
peers=$3
root=$PWD
parts=("${@:4}")
[ ${#parts[@]} -gt 0 ] || parts=(tests ttft_graphs ttft_eager misses serving_{0.5,0.75,1,2}x regimes)
source integration/gpu_vllm_setup.sh "$site" "$peers"

run() {
    local name=$1 limit=$2
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    printf '%s: exit status %s\n' "$name" "$?"
    tail -n 25 "$out/$name.log"
}
bench() { # MODULE PART OPTIONS
    run "$2" 595 python3 -m "integration.bench.$1" --device "${GPU:-0}" --json "$out/vllm_$2.json" "${@:3}"
}

for part in "${parts[@]}"; do
    case $part in
        tests) (cd "$root" && run tests 595 bash integration/gpu_vllm_tests.sh "$site" 580) ;;
        ttft_graphs) bench vllm_ttft "$part" --host-memory 14GiB ;;
        ttft_eager) bench vllm_ttft "$part" --host-memory 14GiB --eager ;;
        misses)
            bench vllm_serving "$part" --host-memory 12GiB --answers '' --rounds 15 \
                --connectors none,offloading,simple,lmcache,ours
            ;;
        serving_*x)
            bench vllm_serving "$part" --host-memory "${part#serving_}" --limit 570 \
                --connectors "${CONNECTORS:-offloading,simple,lmcache,ours,ours:write_through}"
            ;;
        regimes)
            run regimes 60 python3 -m integration.bench.regimes "$out"/vllm_{serving,misses}*.json \
                --json "$out/vllm_regimes.json" --png "$out/vllm_regimes.png"
            ;;
        *) printf 'there is no part %s\n' "$part" >&2 ;;
    esac
done
