#!/usr/bin/env bash
# Runs a command that has to end by itself. One that takes longer than that hangs: what it has running is shown, thread by thread, with where
# each one waits in the kernel (as far as one may see that), and ended with all of it. Tests' threads have the names of tests.
#
# Usage: within.sh MINUTES COMMAND [ARGUMENT ...]
#
# Status 124 then, otherwise the command's own.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
minutes=$1
shift

# Those that a process has started, and theirs, the youngest first.
descendants() {
    local child
    for child in $(cat "/proc/$1/task/"*/children 2>/dev/null || true); do
        descendants "$child"
        echo "$child"
    done
}

# What the threads of a process are called and wait for.
show() {
    local task
    if [ ! -e "/proc/$1" ]; then return; fi
    echo "process $1: $(tr '\0' ' ' <"/proc/$1/cmdline" | cut -c1-160)"
    for task in "/proc/$1/task/"*; do
        echo "    $(cat "$task/comm"): $(sed 's/.* \(.*\)+.*/\1/' "$task/stack" 2>/dev/null | head -n 5 | tr '\n' ' ')"
    done
}

watch() {
    local self=$BASHPID process hangs
    sleep $((minutes * 60)) &
    trap 'kill $! 2>/dev/null; exit' TERM
    wait
    hangs=$(descendants $$)
    hangs=${hangs/$self/}
    echo "within: this has not ended in $minutes minutes and is ended now: $*"
    for process in $hangs; do
        show "$process" 2>/dev/null || true
    done
    # What tests say of themselves, once and long ago.
    grep 'has been running for over' "$output" || true
    for process in $hangs; do
        kill -KILL "$process" 2>/dev/null || true
    done
}

output=$(mktemp)
trap 'rm -f "$output"' EXIT
watch "$@" >&2 &
watcher=$!
status=0
if [ -t 1 ]; then
    "$@" || status=$?
else
    "$@" | tee "$output" || status=${PIPESTATUS[0]}
fi
if kill "$watcher" 2>/dev/null; then
    wait "$watcher" 2>/dev/null || true
    exit "$status"
fi
exit 124
