#!/usr/bin/env bash
# Programs under the real preload library: small ones of our own (tests/preload) that check what every user of malloc relies on, and
# real ones (tests/real) with their own checks, each compared with itself without Pagecrew. And those that trim or use a pool (tests/pool)
# beside them.
#
# Usage: test-real.sh [--long | --long-only] [--list] [--build] [NAME ...]
#   NAME         runs only the test of that name, or those whose names begin with NAME/
#   --long       those that take long as well
#   --long-only  those that take long and no others
#   --list       prints the names
#   --put-back   puts settings of the kernel back that a killed run has left changed, and runs nothing
#   --build      builds the programs of tests/preload and tests/pool, and runs nothing
#
# In a guest (scripts/guests.sh) the tests of tests/guest are there as well, and each has `patience` times its limit.
#
# One line a test: its name, ok, FAILED or skipped with the reason, and seconds. What a failed test has printed last follows at once, and the names of all
# that failed at the end.
# Status 1 if a test failed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=${CARGO_TARGET_DIR:-target}
readonly SKIPPED=77

# What a test calls to end itself.
skip() {
    echo "$*"
    exit "$SKIPPED"
}

fail() {
    echo "FAILED: $*"
    exit 1
}

# Runs a command when the test ends, whatever the way.
at_exit() {
    # shellcheck disable=SC2064
    trap "$1" EXIT
    trap 'exit 143' TERM INT HUP
}

# Removes a control group that a test has made, with whoever is left in it. Nothing happens if it is gone.
remove_group() {
    local pid _
    for _ in $(seq 100); do
        if [ ! -d "$1" ]; then return; fi
        # Nobody who is frozen ends.
        if [ -e "$1/cgroup.freeze" ]; then echo 0 >"$1/cgroup.freeze" || true; fi
        while read -r pid; do kill -KILL "$pid" 2>/dev/null || true; done <"$1/cgroup.procs" || true
        if rmdir "$1" 2>/dev/null; then return; fi
        sleep 0.1
    done
    echo "the control group $1 could not be removed" >&2
}

# change FILE VALUE: writes a setting of the kernel, until the test ends. What it was before is noted outside this process: whoever kills
# a test, or all of them, leaves a note that the next run reads before anything else.
notes=/run/pagecrew-tests
change() {
    local note=$notes/${1//\//+}
    mkdir -p "$notes" 2>/dev/null || return 1
    if [ ! -e "$note" ]; then
        # The one of several words that is chosen, or what there is.
        sed 's/.*\[\(.*\)\].*/\1/' "$1" >"$note" || return 1
    fi
    echo "$2" 2>/dev/null >"$1"
}

# Puts back what tests have changed.
put_back() {
    local note setting
    for note in "$notes"/*; do
        if [ ! -e "$note" ]; then continue; fi
        setting=${note##*/}
        cat "$note" >"${setting//+//}" || true
        rm "$note"
    done
}

needs() {
    local name
    for name in "$@"; do
        if ! command -v "$name" >/dev/null; then skip "$name is not installed"; fi
    done
}

# ran_us PID...: how long the threads that they have now have run, in microseconds. The ticks of `stat` are two numbers, each rounded down,
# so that 1 ms can be 2 ticks.
ran_us() {
    local pid
    for pid in "$@"; do cat "/proc/$pid/task"/*/schedstat; done | awk '{ sum += $1 } END { printf "%d\n", sum / 1000 }'
}

# The shared library of a malloc, empty for glibc's own.
malloc_library() {
    local file
    case $1 in
    glibc) return ;;
    jemalloc) set -- libjemalloc.so.2 ;;
    mimalloc) set -- libmimalloc.so.2.0 libmimalloc.so.2 libmimalloc.so.3 ;;
    tcmalloc) set -- libtcmalloc_minimal.so.4 ;;
    esac
    for file in "$@"; do
        if [ -e "/usr/lib/$(uname -m)-linux-gnu/$file" ]; then
            echo "/usr/lib/$(uname -m)-linux-gnu/$file"
            return
        fi
    done
    return 1
}

# As many rounds as a test has, or fewer where it is given more time for each: an emulated page fault takes ten times as long.
scaled() {
    echo $(($1 / ${patience:-1}))
}

# The tests: names, limits in seconds, commands, whether they take long, and beside whom they may run, none of which may change a setting of the
# machine: `yes`, where nothing depends on the time that something takes, beside another of these; `waits`, where most of the time nothing
# happens and a CPU is left for another one, beside another of those; `no`, alone.
names=() limits=() commands=() lengths=() besides=()
long=no beside=no
# add NAME SECONDS COMMAND...
add() {
    local command
    names+=("$1") limits+=("$2") lengths+=("$long") besides+=("$beside")
    shift 2
    # Without a process: there are hundreds, and each costs an emulated machine much.
    printf -v command '%q ' "$@"
    commands+=("$command")
}
if [ "${1:-}" = --one ]; then add() { :; }; fi

parts=("$root"/tests/real/*.sh)
if [ -n "${guest:-}" ]; then parts+=("$root"/tests/guest/*.sh); fi
for part in "${parts[@]}"; do
    # shellcheck source=/dev/null
    . "$part"
done

# Inside one test.
if [ "${1:-}" = --one ]; then
    eval "$2"
    exit 0
fi

if [ "${1:-}" = --put-back ]; then
    put_back
    exit 0
fi

wanted=() with_long=no with_short=yes list=no build=no
for argument in "$@"; do
    case $argument in
    --long) with_long=yes ;;
    --long-only) with_long=yes with_short=no ;;
    --list) list=yes ;;
    --build) build=yes ;;
    -*)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
    *) wanted+=("$argument") ;;
    esac
done

selected() {
    local name=$1 length=$2 want
    if [ "${#wanted[@]}" -gt 0 ]; then
        for want in "${wanted[@]}"; do
            if [ "$name" = "$want" ]; then return 0; fi
            if [[ $name == "$want"/* ]]; then break; fi
        done
        [[ $name == "$want"/* ]] || return 1
    fi
    if [ "$length" = yes ]; then [ "$with_long" = yes ]; else [ "$with_short" = yes ]; fi
}

for want in ${wanted[@]+"${wanted[@]}"}; do
    known=no
    for name in "${names[@]}"; do
        if [ "$name" = "$want" ] || [[ $name == "$want"/* ]]; then known=yes; fi
    done
    if [ "$known" = no ]; then
        echo "there is no test called $want; --list prints them" >&2
        exit 2
    fi
done

if [ "$list" = yes ]; then
    printf '%s\n' "${names[@]}"
    exit 0
fi

# Builds a program of a test unless that was done since its source changed. A guest has no compiler, and is given what was built.
build_program() {
    local source=$1 built=$2 kind=()
    if [ -n "${guest:-}" ] || { [ "$built" -nt "$source" ] && [ "$built" -nt tests/preload/check.h ]; }; then return; fi
    if [[ $built == *.so ]]; then kind=(-shared -fPIC); fi
    # -fno-builtin: a compiler that knows malloc leaves out what looks useless.
    "${CC:-cc}" -std=gnu11 -D_GNU_SOURCE -O1 -g -fno-builtin -Wall -Wextra -Werror ${kind[@]+"${kind[@]}"} -pthread \
        "$source" -o "$built" -ldl
}

mkdir -p "$target/tests"
programs_built=()
for source in tests/preload/*.c tests/pool/*.c tests/guest/*.c; do
    built=$target/tests/$(basename "$source" .c)
    if [ "$source" = tests/preload/plugin.c ]; then built=$built.so; fi
    build_program "$source" "$built"
    programs_built+=("$built")
done
if [ "$build" = yes ]; then exit 0; fi

for file in pagecrew libpagecrew_preload.so; do
    if [ ! -e "$target/release/$file" ]; then
        echo "$target/release/$file is missing; build it with: cargo build --workspace --release" >&2
        exit 1
    fi
done

put_back

# A copy of everything that runs, so that an ordinary user can read it and a build meanwhile changes nothing.
scratch=$(mktemp -d)
# The tests that run, by the process that runs each.
declare -A running=() begins=()
cleanup() {
    local process
    for process in "${!running[@]}"; do kill -TERM "$process" 2>/dev/null || true; done
    for process in "${!running[@]}"; do wait "$process" || true; done
    put_back
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 1777 "$scratch"
mkdir "$scratch/bin"
cp "$target/release/pagecrew" "$target/release/libpagecrew_preload.so" "${programs_built[@]}" "$scratch/bin/"

export pagecrew=$scratch/bin/pagecrew library=$scratch/bin/libpagecrew_preload.so programs=$scratch/bin
# A setting of the caller's would change what is tested.
while IFS= read -r variable; do unset "$variable"; done < <(compgen -e PAGECREW_ || true)
unset LD_PRELOAD

passed=0 failed=0 skipped=0 failures=()
# Beside whom those that run may run.
company=no

# begin INDEX: starts a test, in a process group of its own, which `timeout` ends as a whole.
begin() {
    local place=$scratch/$1 process
    mkdir -m 755 "$place"
    mkdir -m 1777 "$place/work"
    work=$place/work PAGECREW_STATS_DIR=$place/work/stats timeout -k 10 "$((limits[$1] * ${patience:-1}))" \
        bash scripts/test-real.sh --one "${commands[$1]}" >"$place/output" 2>&1 </dev/null &
    process=$!
    running[$process]=$1
    begins[$process]=${EPOCHREALTIME/[^0-9]/}
}

# Waits until one of those that run has ended, and says how.
end_one() {
    local process='' index name status=0 output took seconds reason
    wait -n -p process "${!running[@]}" || status=$?
    if [ -z "$process" ]; then
        # Some versions of bash don't tell of one that had ended before.
        for process in "${!running[@]}"; do
            if ! kill -0 "$process" 2>/dev/null; then break; fi
        done
        status=0
        wait "$process" || status=$?
    fi
    index=${running[$process]}
    unset "running[$process]"
    name=${names[index]} output=$scratch/$index/output
    # What the test has left behind, if anything, goes too.
    kill -KILL -- "-$process" 2>/dev/null || true
    if [ "${#running[@]}" -eq 0 ]; then put_back; fi
    took=$(((${EPOCHREALTIME/[^0-9]/} - begins[$process]) / 100000))
    seconds="$((took / 10)).$((took % 10)) s"
    case $status in
    0)
        passed=$((passed + 1))
        printf '%-32s ok       %8s  %s\n' "$name" "$seconds" "$(tail -n 1 "$output" | cut -c 1-200)"
        ;;
    "$SKIPPED")
        skipped=$((skipped + 1))
        printf '%-32s skipped  %8s  %s\n' "$name" "$seconds" "$(tail -n 1 "$output")"
        ;;
    *)
        failed=$((failed + 1))
        reason="status $status"
        if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then reason="not done after $((limits[index] * ${patience:-1})) s"; fi
        printf '%-32s FAILED   %8s  %s\n' "$name" "$seconds" "$reason"
        tail -n 40 "$output" | sed 's/^/    /'
        failures+=("$name")
        ;;
    esac
    rm -rf "${scratch:?}/$index"
}

# Two at a time where that is no matter, and on a machine that does not pretend to be one.
for index in "${!names[@]}"; do
    if ! selected "${names[index]}" "${lengths[index]}"; then continue; fi
    room=0
    if [ "${besides[index]}" != no ] && [ "${besides[index]}" = "$company" ] && [ -z "${guest:-}" ]; then room=1; fi
    while [ "${#running[@]}" -gt "$room" ]; do end_one; done
    company=${besides[index]}
    begin "$index"
done
while [ "${#running[@]}" -gt 0 ]; do end_one; done
if [ "$failed" -gt 0 ]; then echo "failed: ${failures[*]}"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
