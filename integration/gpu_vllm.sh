#!/usr/bin/env bash
# The tests and benchmarks of the connector in real vLLM on a GPU, in one call (20 minutes on one H200).
#
#   bash integration/gpu_vllm.sh SITE OUT      SITE: folder with vLLM, or "" where it is installed; OUT: for results
#
# A part that fails or takes too long does not stop the others; each leaves a log in OUT.
set -uo pipefail
out=$(mkdir -p "$2" && cd "$2" && pwd)
root=$PWD
source integration/gpu_vllm_setup.sh "$1"

run() {
    local name=$1 limit=$2
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    printf '%s: exit status %s\n' "$name" "$?"
    tail -n 15 "$out/$name.log"
}

(cd "$root" && run tests 700 bash integration/gpu_vllm_tests.sh "$1")
for mode in graphs eager; do
    flag=$([ "$mode" = eager ] && echo --eager)
    run "ttft_$mode" 400 python3 -m integration.bench.vllm_ttft $flag --host-memory 14GiB --json "$out/vllm_ttft_$mode.json"
done
run serving 500 python3 -m integration.bench.vllm_serving --host-memory 28GiB --rates 6,16,32 \
    --connectors none,offloading,ours,ours:write_through_selective \
    --json "$out/vllm_serving.json" --png "$out/vllm_serving.png"
