#!/usr/bin/env bash
# Benchmarks of the linker in real SGLang on a GPU beside its own hierarchical cache: each part a call of at most ten
# minutes.
#
#   bash integration/gpu_sglang.sh SITE OUT [PART ...]
#
# SITE: folder with SGLang, or "" where it is installed; OUT: for results; parts, all of them unless some are named: ttft
# misses serving_24_12_6, and the like for chats of other numbers of users in turn, with the same engines, whose host
# holds those of 12. GPU=N takes that GPU, so that two parts can run beside each other; CONNECTORS, such as none,ours,
# takes these instead of all. A part that fails or takes longer than PART_SECONDS (590, less what came before the first)
# does not stop the others; each leaves a log and those of its engines in OUT, and the exit status says whether one
# failed.
set -uo pipefail
site=${1:+$(cd "$1" && pwd)} || exit 2
out=$(mkdir -p "$2" && cd "$2" && pwd) || exit 2
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=(ttft misses serving_24_12_6)
for part in "${parts[@]}"; do
    [[ $part =~ ^(ttft|misses|serving_[0-9_]+)$ ]] || { printf 'there is no part %s\n' "$part" >&2; exit 2; }
done
cd "$(dirname "$0")/.." || exit 2
source integration/gpu_sglang_setup.sh "$site"
source integration/gpu_parts.sh sglang

for part in "${parts[@]}"; do
    case $part in
        ttft) bench sglang_ttft "$part" --prompts 4 ;; # 3 s each: to clear the device is to fill it
        misses)
            bench sglang_serving "$part" --limit "$((limit - 25))" --answers '' --rounds 15 --connectors none,hicache,ours
            ;;
        serving_*) chats sglang_serving "$part" --answers 8,32 --connectors hicache,ours ;;
    esac
done
exit "$failed"
