#!/usr/bin/env bash
# What takes too long for every day: the long tests of test-real.sh, and wrong changes that tests have to notice (mutants.sh).
set -euo pipefail
bash "$(dirname "$0")/test-real.sh" --long-only "$@"
if [ $# -eq 0 ]; then
    bash "$(dirname "$0")/mutants.sh"
fi
