#!/usr/bin/env bash
# What a guest does once it is the machine that it should be: says what `doctor` finds, and runs the tests that are named. Run by init.
set -uo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo "doctor: $(target/release/pagecrew doctor --json | tr -d '\n')"
exec bash scripts/test-real.sh "$@"
