#!/usr/bin/env bash
# The tests of test-real.sh that take too long for every day.
set -euo pipefail
exec bash "$(dirname "$0")/test-real.sh" --long-only "$@"
