# shellcheck shell=bash disable=SC2154,SC2034
# Limits of the process and of the machine: what works without Pagecrew works with it. Sourced by scripts/test-real.sh.

# both_ways COMMAND...: runs it both ways; the first has to succeed for the second to be worth a look.
both_ways() {
    (without_pagecrew "$@") || skip "fails without Pagecrew as well"
    (EXPECT_PAGECREW=1 "$pagecrew" run -- "$@") || fail "status $? with Pagecrew, and none without"
}

# served COMMAND...: it runs, and has its memory from Pagecrew. One that works because its own malloc serves it shows nothing.
served() {
    (EXPECT_PAGECREW=1 "$pagecrew" run --stats-json "$work/report" -- "$@") || fail "status $? with Pagecrew"
    grep -Eq '"allocations": ?[1-9]' "$work/report" || fail "nothing came from Pagecrew: $(cat "$work/report")"
}

# data_limited MIB ARGUMENT...: as mib_limited, of what is private and can be written to. What is kept for reuse would count against that, so the
# program's own malloc serves it.
data_limited() {
    mib_limited -d "$@"
    "$pagecrew" run --stats-json "$work/report" -- "$programs/limits" "${@:2}" || fail "status $?"
    grep -q '"counters": null' "$work/report" || fail "something came from Pagecrew: $(cat "$work/report")"
}

# A limit that is further away than the end of the machine's memory is none.
data_unlimited() {
    ulimit -d $((2 * $(awk '/^MemTotal/ { print $2 }' /proc/meminfo)))
    served "$programs/limits" use "$1"
}

# mib_limited OPTION MIB ARGUMENT...: with a limit of the shell's, as `ulimit` sets it, in front of everything.
mib_limited() {
    local option=$1 limit=$2
    shift 2
    ulimit "$option" $((limit << 10))
    both_ways "$programs/limits" "$@"
}

# With every CPU taken, helpers come late with what they give back: the program's next request has to get it all the same.
busy_and_limited() {
    for _ in $(seq $((2 * $(nproc)))); do
        timeout 60 sh -c 'while :; do :; done' &
    done
    at_exit "kill \$(jobs -p) 2>/dev/null || true"
    for _ in 1 2 3 4 5; do
        (mib_limited "$@") || exit $?
    done
}

unlimited() {
    both_ways "$programs/limits" "$@"
}

# No helper can be started.
no_processes() {
    if [ "$(id -u)" -eq 0 ]; then
        needs setpriv prlimit
        setpriv --reuid 65534 --regid 65534 --clear-groups prlimit --nproc=0:0 "$pagecrew" run -- "$programs/limits" use-alone 300 ||
            fail "status $?"
    else
        (ulimit -u 0 && "$pagecrew" run -- "$programs/limits" use-alone 300) || fail "status $?"
    fi
}

few_descriptors() {
    both_ways "$programs/limits" few-descriptors 300
    # Enough for the loader and no more.
    ulimit -n 4
    both_ways "$programs/limits" use 300
}

strict_overcommit() {
    local setting=/proc/sys/vm/overcommit_memory before
    if [ "$(id -u)" -ne 0 ]; then skip "only root may set vm.overcommit_memory"; fi
    before=$(cat "$setting")
    change "$setting" 2 || skip "vm.overcommit_memory can't be set here"
    both_ways "$programs/limits" use 1000
    served "$programs/limits" use 1000
    both_ways "$programs/family" &
    both_ways "$programs/storm" "$(scaled 100000)"
    wait $! || exit
    # It was set while the program ran.
    change "$setting" "$before"
    (EXPECT_PAGECREW=1 "$pagecrew" run -- "$programs/storm" 200000) &
    sleep 1
    change "$setting" 2
    wait $! || fail "status $? where it was set while the program ran"
}

# Without /proc, nothing is known of the machine or of the process's own size.
no_proc() {
    if [ "$(id -u)" -ne 0 ]; then skip "only root may unmount /proc"; fi
    needs unshare umount
    # shellcheck disable=SC2016
    unshare --mount bash -c 'mount --make-rprivate / && umount -l /proc && [ ! -e /proc/self ] && exec "$@"' bash \
        env EXPECT_PAGECREW=1 "LD_PRELOAD=$library" "$programs/limits" use 500 || fail "status $?"
    # shellcheck disable=SC2016
    unshare --mount bash -c 'umount -l /proc && exec "$@"' bash \
        env EXPECT_PAGECREW=1 "LD_PRELOAD=$library" "$programs/storm" "$(scaled 100000)" || fail "status $?"
}

beside=yes
for size in 64 128 300 512 1024 2048; do
    add "limits/address-space/$size" 60 mib_limited -v "$size" use $((size * 6 / 10))
done
for size in 300 1024; do
    add "limits/address-space/$size-full" 60 mib_limited -v "$size" use $((size * 85 / 100))
done
add limits/address-space/use-up 60 mib_limited -v 1024 use-up 800
add limits/address-space/map-up 60 mib_limited -v 1024 map-up 850
add limits/address-space/thread-up 60 mib_limited -v 1024 thread-up 850
for size in 128 1024; do
    add "limits/data/$size" 60 data_limited "$size" use $((size * 85 / 100))
done
add limits/data/far 60 data_unlimited 500
add limits/data/128-busy 60 busy_and_limited -d 128 use 108
add limits/data/use-up 60 data_limited 1024 use-up 800
add limits/own-address-space 60 unlimited own-as 512 1024
long=yes
add limits/address-space/8192 120 mib_limited -v 8192 use 4800
add limits/address-space/4096-full 120 mib_limited -v 4096 use 3500
long=no
add limits/own-address-space/wide 60 unlimited own-as 256 4096
add limits/own-data 60 unlimited own-data 512 700
add limits/closed-descriptors 60 unlimited closed 300
add limits/few-descriptors 60 few_descriptors
add limits/lowest-descriptor 60 unlimited lowest-descriptor
add limits/no-mapping-left 60 unlimited no-mapping-left
add limits/too-much 60 unlimited too-much
beside=no
add limits/no-processes 60 no_processes
add limits/strict-overcommit 120 strict_overcommit
add limits/no-proc 60 no_proc
