# shellcheck shell=bash disable=SC2154,SC2034
# Redis: what it holds, saves and reads again is the same with and without Pagecrew. Sourced by scripts/test-real.sh.

redis() {
    needs redis-server redis-benchmark python3
    mkdir "$work/without" "$work/with"
    python3 tests/real/redis.py "$work/without" "$work/without.json" redis-server || fail "without Pagecrew"
    with_pagecrew "$1" true
    LD_PRELOAD='' python3 tests/real/redis.py "$work/with" "$work/with.json" \
        env "LD_PRELOAD=$(malloc_library "$1")" "$pagecrew" run -- redis-server || fail "with Pagecrew"
    diff "$work/without.json" "$work/with.json" || fail "the data differs"
}

# The child that saves must not copy what its parent retains; the server must go on while the limit of the address space is far.
beside=yes
add redis 120 redis glibc
beside=no
