#!/usr/bin/env bash
# Benchmarks of the linker in real SGLang on a GPU beside its own hierarchical cache: each part a call of at most ten
# minutes.
#
#   bash integration/gpu_sglang.sh SITE OUT [PART ...]
#
# SITE: folder with SGLang, or "" where it is installed; OUT: for results; parts, all of them unless some are named: ttft
# misses serving_0.5x serving_1x serving_2x, and the like for other sizes of the host. GPU=N takes another GPU than the
# first, so that two parts can run beside each other. A part that fails or takes too long does not stop the others; each
# leaves a log in OUT.
set -uo pipefail
out=$(mkdir -p "$2" && cd "$2" && pwd)
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=(ttft misses serving_{0.5,1,2}x)
source integration/gpu_sglang_setup.sh "$1"

bench() { # MODULE PART OPTIONS
    timeout 595 python3 -m "integration.bench.$1" --device "${GPU:-0}" --logs "$out/$2_logs" \
        --json "$out/sglang_$2.json" "${@:3}" >"$out/$2.log" 2>&1
    printf '%s: exit status %s\n' "$2" "$?"
    tail -n 25 "$out/$2.log"
}

for part in "${parts[@]}"; do
    case $part in
        ttft) bench sglang_ttft "$part" ;;
        misses) bench sglang_serving "$part" --answers '' --rounds 15 --connectors none,hicache,ours ;;
        serving_*x)
            bench sglang_serving "$part" --host-memory "${part#serving_}" --limit 570 --answers 8,32 \
                --connectors hicache,ours
            ;;
        *) printf 'there is no part %s\n' "$part" >&2 ;;
    esac
done
