#!/usr/bin/env bash
# Wrong changes that no test notices: cargo-mutants over the state machines and the policies. Takes hours on a small machine.
#
# Usage: mutants.sh [--list] [FILE ...]
#   FILE    only these files; otherwise those of scripts/mutants.list
#   --list  prints the changes that would be tried
#
# cargo-mutants is installed into .cache if it is missing. Without network the check is left out. What survives and why that is right:
# docs/mutants.md. Status 1 if a change survives that isn't listed there.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly ROOT=$PWD/.cache/cargo-mutants
PATH=$ROOT/bin:$PATH

if ! command -v cargo-mutants >/dev/null; then
    if ! cargo install --quiet --locked --root "$ROOT" cargo-mutants; then
        echo "mutants: cargo-mutants can't be installed; wrong changes are not tried" >&2
        exit 0
    fi
fi

# What helps tests is not tried.
readonly OUTSIDE="--exclude-re=(tests|model)::"

list=no
if [ "${1:-}" = --list ]; then
    list=yes
    shift
fi
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(sed 's/#.*//; /^[[:space:]]*$/d' scripts/mutants.list)
fi
for file in "${files[@]}"; do
    if [ ! -e "$file" ]; then
        echo "mutants: there is no $file" >&2
        exit 1
    fi
done
if [ "$list" = yes ]; then
    exec cargo mutants --package pagecrew "${files[@]/#/--file=}" "$OUTSIDE" --list
fi

# Tries the changes of a file with the tests whose names begin so, with more options of cargo-mutants.
try() {
    local file=$1 tests=$2 status=0
    shift 2
    cargo mutants --package pagecrew --file "$file" "$OUTSIDE" --output "$output" --timeout-multiplier 4 --minimum-test-timeout 10 --colors never \
        --no-times --cargo-arg=--lib "$@" -- "$tests" || status=$?
    # 2: some survived; 3: some ran into the time limit, which notices them.
    case $status in
    0 | 2 | 3) ;;
    *) exit "$status" ;;
    esac
}

# Without them a change is built three times as fast. The shortest sequence that shows it is of no use here.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0 PROPTEST_MAX_SHRINK_ITERS=0
unexplained=0
for file in "${files[@]}"; do
    module=${file#*/src/}
    module=${module%.rs}
    module=${module%/mod}
    output=$PWD/.cache/mutants/${module//\//-}
    mkdir -p "$output"
    # Most are noticed by the file's own tests, in a second. The rest has to pass those of its whole layer, which depend on time: one by one.
    try "$file" "${module//\//::}::" --jobs "$(nproc)"
    if [ -s "$output/mutants.out/missed.txt" ]; then
        try "$file" "${module%%/*}::" --iterate
    fi
    while read -r survivor; do
        # Lines and columns move with every change; the rest says which one it is.
        change=${survivor#*: }
        if ! grep -qF -- "\`$module\`: $change" docs/mutants.md; then
            echo "mutants: no test notices: $survivor"
            unexplained=1
        fi
    done <"$output/mutants.out/missed.txt"
done
exit "$unexplained"
