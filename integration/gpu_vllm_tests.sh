#!/usr/bin/env bash
# The tests of the connector in real vLLM on a GPU, six or more at a time: an engine needs little of one, and most of its
# time is its start. Those in which it sleeps come last, one by one: vLLM counts what others allocate meanwhile. Prints a
# line for each test and, of those that failed, what they said was wrong; of those that had no time to end, how far they
# came.
#
#   [TESTS="FILE ..."] [GPU=N] bash integration/gpu_vllm_tests.sh SITE [SECONDS]
#
# SITE: folder with vLLM, or "" where it is installed; SECONDS: for all of it, what is not begun by then is left out. With
# GPU=N they see that GPU alone, and those that need two are skipped.
set -uo pipefail
end=$((SECONDS + ${2:-700}))
site=${1:+$(cd "$1" && pwd)} || exit 2
cd "$(dirname "$0")/.." || exit 2
[ -z "${GPU:-}" ] || export CUDA_VISIBLE_DEVICES=$GPU
source integration/gpu_vllm_setup.sh "$site"
logs=$(mktemp -d) || exit 2
export logs
test_options='-q -s -c /dev/null --import-mode=importlib -p no:cacheprovider --disable-warnings -W ignore'
export test_options

one() {
    local log
    log=$(mktemp -p "$logs")
    printf '%s\n' "$1" >"$log.of"
    # shellcheck disable=SC2086
    if python3 -P -m pytest $test_options --rootdir "$PWD" "$1" >"$log" 2>&1; then
        printf '%-8s %s\n' "$(grep -qE '[0-9]+ passed' "$log" && echo passed || echo skipped)" "$1"
    else
        printf 'FAILED   %s\n' "$1"
        # Of an engine that does not start the reason is in its own log, and pytest's lines say only that it did not.
        {
            grep -E '(Error|Exception): ' "$log" | sort -u | tail -n 8
            grep -A 3 -E '^(E |>)' "$log" | tail -n 30
            tail -n 3 "$log"
        } | cut -c1-300
    fi
    rm "$log.of"
}
export -f one

tests=${TESTS:-integration/tests/test_vllm_gpu.py integration/tests/test_vllm_families.py}
# shellcheck disable=SC2086
python3 -P -m pytest $test_options --rootdir "$PWD" --collect-only $tests >"$logs/collected"
grep '::' "$logs/collected" >"$logs/all" || { echo 'no test was found:' >&2; tail -n 20 "$logs/collected" >&2; exit 2; }
in_turn() { # HOW MANY AT ONCE
    local seconds=$((end - SECONDS))
    [ "$seconds" -gt 0 ] || return
    timeout -k 5 "$seconds" xargs -r -d '\n' -P "$1" -I{} bash -c 'one "$1"' _ {}
}
{
    grep -v sleep "$logs/all" | in_turn "$(($(nproc) > 30 ? $(nproc) / 5 : 6))"
    grep sleep "$logs/all" | tac | in_turn 1
} | tee "$logs/results"
for name in "$logs"/*.of; do
    [ -e "$name" ] || continue
    printf 'CUT OFF  %s\n' "$(cat "$name")"
    tail -n 5 "${name%.of}" | cut -c1-300
done
printf '%s of %s passed, %s skipped\n' "$(grep -c '^passed' "$logs/results")" "$(wc -l <"$logs/all")" \
    "$(grep -c '^skipped' "$logs/results")"
[ "$(grep -cE '^(passed|skipped)' "$logs/results")" = "$(wc -l <"$logs/all")" ]
