# shellcheck shell=bash disable=SC2154
# Programs in a memory cgroup: what survives its limit without Pagecrew survives it with, what doesn't is killed all the same.
# Sourced by scripts/test-real.sh.

# Makes a group and sets `group`, its directory, and the names of its files. Skips the test where that isn't possible.
make_group() {
    local mount
    if [ -d /sys/fs/cgroup/memory ]; then
        group=/sys/fs/cgroup/memory/pagecrew-test-$$ limit_file=memory.limit_in_bytes peak_file=memory.max_usage_in_bytes
    elif [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        mount=/sys/fs/cgroup
        grep -qw memory "$mount/cgroup.controllers" || skip "the memory controller is off"
        grep -qw memory "$mount/cgroup.subtree_control" || skip "the memory controller is not delegated"
        group=$mount/pagecrew-test-$$ limit_file=memory.max peak_file=memory.peak
    else
        skip "no memory cgroups"
    fi
    mkdir "$group" 2>/dev/null || skip "may not make a memory cgroup"
    at_exit "remove_group $group"
}

# A fresh group, so that the peak is that of one program and no page cache of another is in it.
new_group() {
    remove_group "$group"
    mkdir "$group"
}

# Runs a program in the group with a limit in bytes, or `none`.
in_group() {
    local limit=$1
    shift
    if [ "$limit" != none ]; then
        echo "$limit" >"$group/$limit_file"
        # No swap, or the limit would be none.
        if [ -e "$group/memory.swap.max" ]; then echo 0 >"$group/memory.swap.max"; fi
        if [ -e "$group/memory.swappiness" ]; then echo 0 >"$group/memory.swappiness"; fi
    fi
    (
        echo "$BASHPID" >"$group/cgroup.procs"
        exec "$@"
    )
}

# Up to its own peak and no further: with a limit just above what it needs without us, it must live.
test_oom_within_limit() {
    local peak limit room helpers kinds=(auto auto auto 0)
    make_group
    in_group none "$programs/oom" churn 300 3
    peak=$(cat "$group/$peak_file")
    # The tightest first.
    for room in 2 16; do
        limit=$((peak + (room << 20)))
        new_group
        in_group "$limit" "$programs/oom" churn 300 4 || fail "killed without Pagecrew with $((limit >> 20)) MiB"
        # Without helpers, nobody looks at the limit but once at the start.
        for helpers in "${kinds[@]}"; do
            new_group
            in_group "$limit" "$pagecrew" run --helpers "$helpers" -- "$programs/oom" churn 300 4 ||
                fail "status $? with a limit of $((limit >> 20)) MiB, where it lives without Pagecrew (helpers: $helpers)"
            echo "limit $((limit >> 20)) MiB, helpers $helpers: peak $(($(cat "$group/$peak_file") >> 20)) MiB"
        done
        kinds=(auto 0)
    done
}

# Over the limit: killed by SIGKILL, having come about as far as without us.
test_oom_over_limit() {
    local without with status=0
    make_group
    in_group $((512 << 20)) "$programs/oom" exceed 8 0 >"$work/without" || status=$?
    [ "$status" -eq 137 ] || fail "status $status without Pagecrew"
    new_group
    status=0
    in_group $((512 << 20)) "$pagecrew" run -- "$programs/oom" exceed 8 0 >"$work/with" || status=$?
    [ "$status" -eq 137 ] || fail "status $status instead of 137 (SIGKILL)"
    without=$(tail -n 1 "$work/without") with=$(tail -n 1 "$work/with")
    echo "came to $without MiB without, $with MiB with Pagecrew"
    [ "$with" -ge $((without - 16)) ] || fail "killed much earlier than without Pagecrew"
}

# A limit that is far away costs nothing, from the first look of the watcher on: a program that gives back what it asks for again finds it in the caches, however much else it has.
test_oom_far_from_limit() {
    local all cached
    make_group
    for _ in 1 2 3 4 5; do
        new_group
        in_group $((2 << 30)) "$pagecrew" run --stats-json "$work/report" -- \
            "$pagecrew" bench-worker cell 1048576 1048576 two-bytes 0 16 1000000 20000000000 0 1000 0 >"$work/out" || fail "status $?"
        all=$(sed -n 's/.*"allocations": \([0-9]*\).*/\1/p' "$work/report" | head -n 1)
        cached=$(sed -n 's/.*"cached_allocations": \([0-9]*\).*/\1/p' "$work/report")
        echo "${cached:-none} of $all from caches"
        [ "${cached:-0}" -ge $((all * 9 / 10)) ] || fail "few of them came from caches"
    done
}

add oom/far-from-limit 60 test_oom_far_from_limit
beside=yes
add oom/within-limit 90 test_oom_within_limit
add oom/over-limit 60 test_oom_over_limit
beside=no
