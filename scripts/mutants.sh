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

list=no
if [ "${1:-}" = --list ]; then
    list=yes
    shift
fi
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(sed 's/#.*//; /^[[:space:]]*$/d' scripts/mutants.list)
fi
arguments=()
for file in "${files[@]}"; do
    if [ ! -e "$file" ]; then
        echo "mutants: there is no $file" >&2
        exit 1
    fi
    arguments+=(--file "$file")
done
if [ "$list" = yes ]; then
    exec cargo mutants --package pagecrew "${arguments[@]}" --list
fi

output=$PWD/.cache
status=0
cargo mutants --package pagecrew "${arguments[@]}" --output "$output" --timeout 120 -- --lib || status=$?
# 2: some survived; 3: some ran into the time limit, which notices them.
case $status in
0 | 3) exit 0 ;;
2) ;;
*) exit "$status" ;;
esac
unexplained=0
while read -r survivor; do
    # Lines and columns move with every change; the rest says which one it is.
    change=${survivor#*: }
    if ! grep -qF -- "$change" docs/mutants.md; then
        echo "mutants: no test notices: $survivor"
        unexplained=1
    fi
done <"$output/mutants.out/missed.txt"
exit "$unexplained"
