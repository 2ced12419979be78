# shellcheck shell=bash disable=SC2154,SC2034
# The programs of tests/preload, over each malloc and as root and as an ordinary user. Sourced by scripts/test-real.sh.

# with_pagecrew MALLOC COMMAND...: the command under Pagecrew, over this malloc.
with_pagecrew() {
    local below
    below=$(malloc_library "$1") || skip "$1 is not installed"
    export MALLOC_BELOW=$1
    shift
    LD_PRELOAD=$below EXPECT_PAGECREW=1 "$pagecrew" run -- "$@"
}

without_pagecrew() {
    EXPECT_PAGECREW=0 "$@"
}

# as_nobody COMMAND...: as an ordinary user, with the same environment.
as_nobody() {
    if [ "$(id -u)" -ne 0 ]; then
        "$@"
        return
    fi
    needs setpriv
    setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=/nonexistent "$@"
}

program_over() {
    local malloc=$1 program=$2
    shift 2
    with_pagecrew "$malloc" "$programs/$program" "$@"
}

program_as_nobody() {
    local program=$1
    shift
    if [ "$(id -u)" -ne 0 ]; then skip "is run by an ordinary user anyway"; fi
    EXPECT_PAGECREW=1 as_nobody "$pagecrew" run -- "$programs/$program" "$@"
}

# A wrong pointer: SIGABRT, one line, nothing more.
invalid() {
    local mistake status lines
    for mistake in twice twice-later inside inside-odd behind realloc-freed realloc-freed-small realloc-inside size-of-freed; do
        status=0
        # In place of a subshell, whose own word on the abort goes elsewhere.
        (EXPECT_PAGECREW=1 exec "$pagecrew" run -- "$programs/invalid" "$mistake" >"$work/out" 2>"$work/error") || status=$?
        lines=$(wc -l <"$work/error")
        [ "$status" -eq 134 ] || fail "$mistake: status $status instead of 134 (SIGABRT)"
        [ "$lines" -eq 1 ] || fail "$mistake: $lines lines on standard error: $(cat "$work/error")"
        grep -Eq '^pagecrew: (free|realloc|malloc_usable_size)\(\): invalid pointer: 0x' "$work/error" ||
            fail "$mistake: $(cat "$work/error")"
        case $mistake in
        twice | twice-later | inside | inside-odd | behind)
            grep -q '^pagecrew: free(): invalid pointer' "$work/error" || fail "$mistake: $(cat "$work/error")"
            ;;
        esac
    done
}

# The peak of each pattern, with Pagecrew at most a tenth above that without (`more`: in percent).
more=10
peak() {
    local pattern=$1 without with
    shift
    without=$(without_pagecrew "$programs/peak" "$pattern")
    with=$(EXPECT_PAGECREW=1 "$pagecrew" run "$@" -- "$programs/peak" "$pattern")
    echo "$((without / 1024)) MiB without, $((with / 1024)) MiB with Pagecrew ($((with * 100 / without)) %)"
    # Kilobytes; 2 MiB are the library itself, its heap and a helper.
    [ $((with * 100)) -le $((without * (100 + more) + 204800)) ] || fail "more than $more % above the peak"
}

# The worst of ten: the watcher's look falls into the moment between two tables in some of them.
sparse_with_small_pages() {
    local _
    for _ in 1 2 3 4 5 6 7 8 9 10; do peak sparse --huge-pages=off; done
}

# The same beside programs that take every CPU, so that helpers of the idle class get next to none. The watcher has to wait for
# its turn as well, and what a program grows by in one or two time slices comes on top.
peak_beside_others() {
    local others=() more=15 _
    for _ in $(seq $((2 * $(nproc)))); do
        sh -c 'while :; do :; done' &
        others+=($!)
    done
    at_exit "kill ${others[*]}"
    peak "$@"
}

# Open: what huge pages do to a table of which little is touched. Known to users (README), so it is told and not counted.
sparse_with_huge_pages() {
    (peak sparse) || skip "open: huge pages back a sparse table whole; --huge-pages off does not"
}

# The same calls of the mmap family with and without: results, contents, faults and the kernel's mappings are the same.
mappings() {
    local seed=$1 steps=$2 option
    without_pagecrew "$programs/mappings" "$seed" "$steps" >"$work/without"
    for option in --mmap=on --mmap=off --huge-pages=off --trim=on; do
        "$pagecrew" run "$option" -- "$programs/mappings" "$seed" "$steps" >"$work/with" || fail "$option: status $?"
        cmp "$work/without" "$work/with" || fail "$option: $(diff "$work/without" "$work/with" | head -n 20)"
    done
    echo "$(wc -l <"$work/without") lines are the same"
}

# Blocks that are freed and asked for again, over and over: nobody is woken up each time.
pairs_wake_nobody() {
    needs python3
    "$pagecrew" run -- python3 -c '
import ctypes, resource

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
length, pairs = 4 << 20, 2000
blocks = [libc.malloc(length) for _ in range(16)]
switches = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
before = switches()
for pair in range(pairs):
    index = pair * 7919 % 13
    libc.free(blocks[index])
    blocks[index] = libc.malloc(length)
    ctypes.memset(blocks[index], pair & 0xff, length)
print(switches() - before, "voluntary context switches in", pairs, "pairs")
assert switches() - before < pairs // 4
' || fail "status $?"
}

with_plugin() {
    program_over "$1" dlopen "$programs/plugin.so"
}

# The system's setting for huge pages is another one.
huge_pages_are() {
    local setting=/sys/kernel/mm/transparent_hugepage/enabled
    [ -e "$setting" ] || skip "no huge pages here"
    change "$setting" "$1" || skip "may not set $setting"
    mappings 1 300 &
    with_pagecrew glibc "$programs/family"
    with_pagecrew glibc "$programs/storm" "$(scaled 100000)"
    with_pagecrew glibc "$programs/forks" quiet
    wait $! || fail "mappings"
}

# Output to a file that the process ends in the middle of.
output() {
    with_pagecrew glibc "$programs/output" "$1" "$work/file" "$2"
}

control() {
    local program=$1
    shift
    without_pagecrew "$programs/$program" "$@"
}

beside=yes
for malloc in glibc jemalloc mimalloc tcmalloc; do
    add "family/$malloc" 60 program_over "$malloc" family
    if [ "$malloc" = glibc ]; then operations=1000000; else operations=200000; fi
    add "storm/$malloc" 150 program_over "$malloc" storm "$(scaled "$operations")"
    for part in daemon little descriptors protect handlers streams growing quiet storm; do
        case $malloc/$part in
        glibc/* | */quiet) ;;
        *) long=yes ;;
        esac
        add "forks/$part/$malloc" 90 program_over "$malloc" forks "$part"
        long=no
    done
    add "dlopen/$malloc" 60 with_plugin "$malloc"
    if [ "$malloc" != glibc ]; then long=yes; fi
    add "signals/$malloc" 120 program_over "$malloc" signals
    add "advice/$malloc" 60 program_over "$malloc" advice
    long=no
done
for program in family signals advice; do
    add "$program/nobody" 120 program_as_nobody "$program"
done
add stragglers 60 program_over glibc stragglers 10
add stragglers/nobody 60 program_as_nobody stragglers 10
add storm/nobody 60 program_as_nobody storm "$(scaled 100000)"
add forks/nobody 60 program_as_nobody forks quiet
add moves 120 program_over glibc moves
add moves/nobody 120 program_as_nobody moves
for seed in 1 2; do
    add "mappings/$seed" 120 mappings "$seed" 300
done
add mappings/storm 120 program_over glibc mappings storm
beside=no
for malloc in glibc jemalloc mimalloc tcmalloc; do
    if [ "$malloc" != glibc ]; then long=yes; fi
    add "exit/$malloc" 120 program_over "$malloc" exit
    long=no
done
add exit/nobody 120 program_as_nobody exit
add ends 60 program_over glibc ends
add ends/nobody 60 program_as_nobody ends
for setting in always never; do
    add "huge-pages/$setting" 120 huge_pages_are "$setting"
done
add invalid 30 invalid
add pairs 60 pairs_wake_nobody
add output/buffered 60 output buffered 3
add output/writing 90 output writing 12
for pattern in growing growing-by-realloc ping-pong odd-sizes changing two-kinds mixed threads; do
    add "peak/$pattern" 60 peak "$pattern"
done
for pattern in changing mixed; do
    add "peak/$pattern/busy" 120 peak_beside_others "$pattern"
done
add peak/sparse-small-pages 60 sparse_with_small_pages

long=yes
add peak/sparse 60 sparse_with_huge_pages
for seed in 11 12 13 14 15; do
    add "mappings/$seed" 1200 mappings "$seed" 3000
done
add control/mappings 120 control mappings storm
add storm/long 900 program_over glibc storm 10000000
add idle 120 program_over glibc idle 30
add output/writing/long 300 output writing 100
# The programs themselves are right: they pass without Pagecrew as well (advice asks for more than glibc promises).
add control/family 60 control family
add control/storm 60 control storm 300000
add control/forks 180 control forks all
add control/forks/handlers 60 control forks handlers
add control/forks/streams 60 control forks streams
add control/exit 120 control exit
add control/signals 120 control signals
long=no
