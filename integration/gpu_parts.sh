#!/usr/bin/env bash
# Parts of a measurement, each within a time limit and with a log in a folder: what gpu_vllm.sh and gpu_sglang.sh have in
# common.
#
#   source integration/gpu_parts.sh ENGINE          ENGINE: vllm or sglang; `out` is the folder
#
# `limit`: seconds of a part, PART_SECONDS (590) less what came before this; `failed`: whether one failed, 0 or 1. Who
# takes longer is killed with all that it has started: an engine that lived on would be in the way of the next part.
engine=$1
limit=$((${PART_SECONDS:-590} - SECONDS))
failed=0

run() { # NAME SECONDS COMMAND
    local name=$1 seconds=$2 status=0
    shift 2
    timeout -s KILL "$seconds" "$@" >"$out/${engine}_$name.log" 2>&1 || status=$? failed=1
    printf '%s: exit status %s\n' "$name" "$status"
    tail -n 25 "$out/${engine}_$name.log"
}
bench() { # MODULE PART OPTIONS
    local logs
    logs=$(mktemp -d)
    run "$2" "$limit" python3 -m "integration.bench.$1" --device "${GPU:-0}" --logs "$logs" \
        --json "$out/${engine}_$2.json" "${@:3}" ${CONNECTORS:+--connectors "$CONNECTORS"}
    tar -C "$logs" -czf "$out/${engine}_$2_logs.tar.gz" .
}
chats() { # MODULE PART OPTIONS; the part names numbers of users, and the host holds what 12 of them do on average
    local users=${2#serving_}
    bench "$1" "$2" --users "${users//_/,}" --at-once 6 --host-memory 15200MiB --limit "$((limit - 25))" "${@:3}"
}
