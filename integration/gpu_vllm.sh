#!/usr/bin/env bash
# The tests and benchmarks of the connector in real vLLM on a GPU: each part a call of at most ten minutes.
#
#   bash integration/gpu_vllm.sh SITE OUT PEERS [PART ...]
#
# SITE: folder with vLLM, or "" where it is installed; OUT: for results; PEERS: folder with LMCache, or "" where it is
# installed or left out; parts, all of them unless some are named: tests, soak (users, faults and an operator around one
# engine), ranks and families (tests of several GPUs), replicas (a benchmark of two), ttft_graphs, ttft_eager, lossless
# (which needs build/smollm2_caches.npz, see gpu.sh), misses, serving_24_12 and the like (chats of 24 users, then of 12,
# with the same engines, whose host holds those of 12), and regimes, which makes one table of all the serving_ results in
# OUT. GPU=N takes that GPU, or GPU=N,M those for ranks, families and replicas, so that parts can run beside each other
# (see gpu_queue.py); CONNECTORS, such as none,offloading,ours, takes these instead of all, of which a GPU of 80 GB has no
# room for more than three. A part that fails or takes longer than PART_SECONDS (590, less what came before the first)
# does not stop the others; each leaves a log and those of its engines in OUT, and the exit status says whether one
# failed.
set -uo pipefail
shopt -s nullglob
site=${1:+$(cd "$1" && pwd)} || exit 2
out=$(mkdir -p "$2" && cd "$2" && pwd) || exit 2
peers=${3:+$(cd "$3" && pwd)} || exit 2
parts=("${@:4}")
[ ${#parts[@]} -gt 0 ] || parts=(tests soak ranks families replicas ttft_graphs ttft_eager lossless misses serving_{24_12,16_6} regimes)
for part in "${parts[@]}"; do
    [[ $part =~ ^(tests|soak|ranks|families|replicas|ttft_graphs|ttft_eager|lossless|misses|serving_[0-9_]+|regimes)$ ]] || {
        printf 'there is no part %s\n' "$part" >&2
        exit 2
    }
done
cd "$(dirname "$0")/.." || exit 2
root=$PWD
source integration/gpu_vllm_setup.sh "$site" "$peers"
source integration/gpu_parts.sh vllm

for part in "${parts[@]}"; do
    case $part in
        tests) run tests "$limit" bash "$root/integration/gpu_vllm_tests.sh" "$site" "$((limit - 15))" ;;
        soak)
            run soak "$limit" env ${GPU:+CUDA_VISIBLE_DEVICES="$GPU"} python3 -m integration.soak_vllm --seconds 25 \
                --choice auto sync async --pipelined adaptive write_back --json "$out/vllm_soak.json"
            ;;
        ranks)
            TESTS='integration/tests/test_vllm_replicas.py integration/tests/test_vllm_tp_sizes.py
                integration/tests/test_vllm_parallel.py integration/tests/test_vllm_pipeline.py' \
                run ranks "$limit" bash "$root/integration/gpu_vllm_tests.sh" "$site" "$((limit - 15))"
            ;;
        families)
            TESTS=integration/tests/test_vllm_family_ranks.py \
                run families "$limit" bash "$root/integration/gpu_vllm_tests.sh" "$site" "$((limit - 15))"
            ;;
        replicas)
            run replicas "$limit" env ${GPU:+CUDA_VISIBLE_DEVICES="$GPU"} python3 -m integration.bench.vllm_replicas \
                --json "$out/vllm_replicas.json"
            ;;
        ttft_graphs) bench vllm_ttft "$part" --host-memory 14GiB ;;
        ttft_eager) bench vllm_ttft "$part" --host-memory 14GiB --eager ;;
        lossless)
            mkdir -p build && cp "$root/build/smollm2_caches.npz" build/ || failed=1
            bench vllm_lossless "$part" --prompts 5
            ;;
        misses)
            bench vllm_serving "$part" --host-memory 12GiB --limit "$((limit - 25))" --answers '' --rounds 15 \
                --connectors none,offloading,simple,lmcache,ours
            ;;
        serving_*) chats vllm_serving "$part" --connectors offloading,simple,lmcache,ours,ours:write_through ;;
        regimes)
            run regimes 60 python3 -m integration.bench.regimes "$out"/vllm_{serving,misses}*.json \
                --json "$out/vllm_regimes.json" --png "$out/vllm_regimes.png"
            ;;
    esac
done
exit "$failed"
