# shellcheck shell=bash disable=SC2154,SC2034
# Whether each thing is on this machine as `doctor` says it is: what is called ok works, and where something is off or missing, the
# program does without, in the way that is said. The last line of each is what docs/platforms.md shows. Sourced by
# scripts/test-real.sh in guests.

# doctor_of NAME: state and finding of a check.
doctor_of() {
    "$pagecrew" doctor --json >"$work/doctor.json" || true
    awk -v name="$1" '
        function value(line) { sub(/^[^:]*: "/, "", line); sub(/",?$/, "", line); return line }
        /"found":/ { found = value($0) }
        /"name":/ { this = value($0) }
        /"state":/ && this == name { print value($0) ": " found; known = 1 }
        END { exit !known }' "$work/doctor.json" || fail "doctor has no check called $1"
}

# says_ok NAME: whether doctor says so. Sets `finding` to what it says.
says_ok() {
    finding=$(doctor_of "$1") || fail "$finding"
    [[ $finding == ok:* ]]
}

refused_page_size() {
    [ "$(getconf PAGESIZE)" -ne 4096 ]
}

# Where pages have another size than the code was built for, everything says so in one line, with status 3, and harms nobody.
feature_page_size() {
    local command status
    if ! refused_page_size; then
        echo "works: $(getconf PAGESIZE) bytes"
        return
    fi
    for command in "run -- true" "trim --all --dry-run" "trim --pid $$" "trim --all --watch" "pool serve --size 64M --directory $work/pool" \
        "pool take --size 64M" "pool exec --size 64M -- true" reclaim serve; do
        status=0
        # shellcheck disable=SC2086
        "$pagecrew" $command >"$work/out" 2>"$work/error" || status=$?
        [ "$status" -eq 3 ] || fail "pagecrew $command: status $status: $(cat "$work/error")"
        [ "$(wc -l <"$work/error")" -eq 1 ] || fail "pagecrew $command: $(cat "$work/error")"
        grep -q "pages of $(getconf PAGESIZE)" "$work/error" || fail "pagecrew $command: $(cat "$work/error")"
    done
    # Under the library itself, programs have their own malloc.
    LD_PRELOAD=$library "$programs/forks" quiet || fail "status $? under the library"
    LD_PRELOAD=$library "$programs/storm" "$(scaled 100000)" || fail "status $? under the library"
    LD_PRELOAD=$library bash -c 'exit 5' || [ $? -eq 5 ] || fail "a shell under the library"
    # What only looks, looks.
    "$pagecrew" top --once >"$work/out" || fail "top: status $?"
    "$pagecrew" stats >"$work/out" || fail "stats: status $?"
    status=0
    "$pagecrew" doctor >"$work/out" 2>&1 || status=$?
    [ "$status" -eq 3 ] || fail "doctor: status $status"
    grep -q "pages of $(getconf PAGESIZE)" "$work/out" || fail "doctor does not say why"
    echo "refused with status 3: pages of $(getconf PAGESIZE) bytes"
}

# What came to Linux with a version is not ok before that, and not missing from then on.
kernel_has_what_is_ok() {
    local version name oldest
    while read -r version name; do
        oldest=$(printf '%s\n' "$version" "$(uname -r)" | sort -V | head -n 1)
        if says_ok "$name"; then
            [ "$oldest" = "$version" ] || fail "$name is said to be ok, and came with Linux $version"
        elif [ "$oldest" = "$version" ] && [[ $finding == missing:* ]]; then
            fail "$name is said to be missing, and came with Linux $version: $finding"
        fi
    done <<'END'
5.7 MREMAP_DONTUNMAP
5.14 MADV_POPULATE_WRITE
5.18 MADV_DONTNEED_LOCKED
6.7 PAGEMAP_SCAN
6.12 zero part of huge pages
6.13 MADV_GUARD_INSTALL
6.17 UFFDIO_MOVE
END
}

feature_doctor() {
    local status=0 word=ready
    "$pagecrew" doctor --json >"$work/doctor.json" || status=$?
    [ "$status" -eq 0 ] || word="not ready, status $status"
    [ "$status" -eq 0 ] || refused_page_size || fail "status $status: $("$pagecrew" doctor)"
    refused_page_size || kernel_has_what_is_ok
    echo "$word: $(grep -c '"state": "ok"' "$work/doctor.json") ok, $(grep -c '"state": "off"' "$work/doctor.json") off, $(grep -c '"state": "missing"' "$work/doctor.json") missing"
}

feature_huge_pages() {
    local kib
    kib=$(EXPECT_PAGECREW=1 "$pagecrew" run -- "$programs/probe" huge) || fail "status $?"
    if says_ok "transparent huge pages"; then
        [ "$kib" -ge $((48 << 10)) ] || fail "ok, and $kib KiB of 65536 in huge pages"
        echo "works: $((kib >> 10)) of 64 MiB"
    else
        [ "$kib" -eq 0 ] || fail "not ok, and $kib KiB in huge pages"
        echo "degrades to small pages: $finding"
    fi
}

feature_guards() {
    local said
    said=$(EXPECT_PAGECREW=1 "$pagecrew" run --guards on -- "$programs/probe" guard) || fail "status $?"
    if says_ok MADV_GUARD_INSTALL; then
        [ "$said" = guarded ] || fail "ok, and $said"
        echo "works"
    else
        [ "$said" = open ] || fail "not ok, and $said"
        echo "degrades to none: $finding"
    fi
}

# Nobody waits for a helper that was stopped in the middle of zeroing.
feature_stragglers() {
    EXPECT_PAGECREW=1 "$pagecrew" run --stats-json "$work/stats" -- "$programs/stragglers" 3 >"$work/out" 2>&1 || {
        if grep -q 'ptrace' "$work/out"; then
            echo "not tried: no process may be traced here"
            return
        fi
        fail "status $?: $(cat "$work/out")"
    }
    if says_ok "restartable sequences" && says_ok "membarrier for sequences"; then
        echo "works"
    else
        echo "degrades to waiting for one chunk: $finding"
    fi
}

# A program's sparse huge pages, from outside.
feature_trim() {
    local status=0 process
    "$programs/probe" sparse-mapping 60 >"$work/probe" &
    process=$!
    at_exit "kill $process 2>/dev/null || true"
    until grep -q . "$work/probe"; do sleep 0.1; done
    if grep -q 'no huge pages' "$work/probe"; then
        says_ok "zero part of huge pages" && fail "ok, and there is no huge page"
        echo "degrades to none: $finding"
        return
    fi
    # Where the kernel makes huge pages only later, there is nothing to trim at first.
    "$pagecrew" trim --pid "$process" >"$work/out" 2>&1 || status=$?
    if says_ok "zero part of huge pages" && says_ok "advice to other processes"; then
        [ "$status" -eq 0 ] || fail "ok, and status $status: $(cat "$work/out")"
        wait "$process" || fail "status $? of the program"
        [ "$(sed -n 's/ after//p' "$work/probe")" -le 64 ] || fail "ok, and nothing went: $(cat "$work/probe" "$work/out")"
        echo "works: $(tr '\n' ' ' <"$work/probe")MiB"
    else
        [ "$status" -eq 3 ] || fail "not ok, and status $status: $(cat "$work/out")"
        [ "$(wc -l <"$work/out")" -eq 1 ] || fail "not one line: $(cat "$work/out")"
        echo "refused: $(head -n 1 "$work/out" | sed 's/^pagecrew: //')"
    fi
}

# The same by the program's own watcher, which takes no right.
feature_trim_own() {
    local seconds=2
    if says_ok "zero part of huge pages"; then seconds=60; fi
    EXPECT_PAGECREW=1 "$pagecrew" run --trim on -- "$programs/probe" sparse-block "$seconds" >"$work/probe" || fail "status $?: $(cat "$work/probe")"
    if says_ok "zero part of huge pages"; then
        [ "$(sed -n 's/ after//p' "$work/probe")" -le 24 ] || fail "ok, and nothing went: $(cat "$work/probe")"
        echo "works: $(tr '\n' ' ' <"$work/probe")MiB"
    else
        echo "degrades to none: $finding"
    fi
}

feature_pool() {
    local status=0
    mkdir "$work/pool"
    "$pagecrew" pool serve --directory "$work/pool" --size 64M --file 64M --cpu 100 2>"$work/log" &
    local server=$!
    at_exit "kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; umount --lazy $work/pool/mem 2>/dev/null || true"
    export PAGECREW_POOL_SOCKET=$work/pool/socket
    until "$pagecrew" pool status >/dev/null 2>&1; do
        if ! kill -0 "$server" 2>/dev/null; then
            wait "$server" || status=$?
            break
        fi
        sleep 0.1
    done
    if says_ok "pool of ready memory"; then
        [ "$status" -eq 0 ] || fail "ok, and the server ended with status $status: $(cat "$work/log")"
        local path
        path=$("$pagecrew" pool take --size 64M) || fail "nothing to be had: $(cat "$work/log")"
        [ "$(stat --format %s "$path")" -eq $((64 << 20)) ] || fail "another size"
        "$pagecrew" pool release "$path"
        echo "works ${finding#ok: }"
    else
        [ "$status" -eq 3 ] || fail "not ok, and status $status: $(cat "$work/log")"
        echo "refused: $(tail -n 1 "$work/log" | sed 's/^pagecrew: //')"
    fi
}

feature_reclaim() {
    local status=0
    # SIGTERM ends it, and then all is well.
    timeout 2 "$pagecrew" reclaim >"$work/out" 2>&1 || status=$?
    if says_ok "reclaim ahead of demand"; then
        [ "$status" -eq 124 ] || fail "ok, and status $status: $(cat "$work/out")"
        echo "works: ${finding#ok: }"
    else
        [ "$status" -eq 3 ] || fail "not ok, and status $status: $(cat "$work/out")"
        [ "$(wc -l <"$work/out")" -eq 1 ] || fail "not one line: $(cat "$work/out")"
        echo "refused: $(sed 's/^pagecrew: //' "$work/out")"
    fi
}

# What is kept goes back when the program's group comes near its limit, and is not written to swap first.
feature_group_limit() {
    local group=/sys/fs/cgroup/pagecrew-test-$$
    mkdir "$group" 2>/dev/null || skip "no control group can be made"
    at_exit "kill \$(jobs -p) 2>/dev/null || true; remove_group $group"
    [ -e "$group/memory.max" ] || skip "the memory controller of version 2 is not there"
    [ "$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)" -gt 800000 ] || skip "takes 800 MB of free memory"
    echo 512M >"$group/memory.max"
    (echo "$BASHPID" >"$group/cgroup.procs" && EXPECT_PAGECREW=1 exec "$pagecrew" run --decay 1h -- "$programs/probe" kept 60) >"$work/probe" &
    local program=$!
    until grep -q before "$work/probe"; do
        kill -0 "$program" 2>/dev/null || fail "ended: $(cat "$work/probe")"
        sleep 0.1
    done
    sleep 1
    # Another one of the group wants what is left, and some.
    (echo "$BASHPID" >"$group/cgroup.procs" && exec "$programs/sparse" 420 1 dense) || fail "status $? of the other program: it was not made room for"
    wait "$program" || fail "status $?"
    grep -q 'oom_kill 0' "$group/memory.events" || fail "somebody was killed: $(cat "$group/memory.events")"
    [ "$(sed -n 's/ before//p' "$work/probe")" -ge 100 ] || fail "nothing was kept, so nothing was tried: $(cat "$work/probe")"
    local swapped=0
    if [ -s "$group/memory.swap.peak" ]; then swapped=$(cat "$group/memory.swap.peak"); fi
    [ "$swapped" -le $((48 << 20)) ] || fail "$swapped bytes were swapped out"
    echo "works: $(tr '\n' ' ' <"$work/probe")MiB kept, $((swapped >> 20)) MiB swapped"
}

add feature/page-size 60 feature_page_size
add feature/doctor 60 feature_doctor
if ! refused_page_size; then
    add feature/huge-pages 60 feature_huge_pages
    add feature/guards 60 feature_guards
    add feature/stragglers 60 feature_stragglers
    add feature/trim 120 feature_trim
    add feature/trim-own 120 feature_trim_own
    add feature/reclaim 60 feature_reclaim
    add feature/pool 60 feature_pool
    add feature/group-limit 120 feature_group_limit
fi
