# shellcheck shell=bash disable=SC2154,SC2034
# Trimming real programs while they work: their data is the same before and after. Sourced by scripts/test-real.sh.

# Skips unless other processes' huge pages can be trimmed here.
can_trim() {
    if [ "$(id -u)" -ne 0 ]; then skip "takes root"; fi
    local status=0
    "$pagecrew" trim --pid $$ --dry-run >/dev/null 2>&1 || status=$?
    if [ "$status" -eq 3 ]; then skip "this kernel can't give the zero part of huge pages back"; fi
}

# Bytes that went, of the JSON on standard input.
gone() {
    python3 -c 'import json, sys; print(json.load(sys.stdin)["totals"]["gone_bytes"])'
}

trim_redis() {
    needs redis-server redis-cli
    can_trim
    at_exit "kill \$(jobs -p) 2>/dev/null || true"
    local port=$((20000 + $$ % 20000)) digest after went=0 pid
    # Its malloc asks for huge pages where it is told to; Redis itself would turn them off.
    MALLOC_CONF=thp:always redis-server --port "$port" --save '' --appendonly no --disable-thp no --daemonize no >/dev/null &
    pid=$!
    for _ in $(seq 100); do
        if redis-cli -p "$port" ping >/dev/null 2>&1; then break; fi
        sleep 0.1
    done
    redis-cli -p "$port" debug populate 200000 key 200 >/dev/null
    # What is left of most of them is sparse.
    redis-cli -p "$port" eval 'for i = 0, 199999 do if i % 7 > 0 then redis.call("del", "key:" .. i) end end' 0 >/dev/null
    digest=$(redis-cli -p "$port" debug digest)
    for _ in 1 2 3; do
        went=$((went + $("$pagecrew" trim --pid "$pid" --max-zero 100 --json | gone)))
        after=$(redis-cli -p "$port" debug digest)
        [ "$digest" = "$after" ] || fail "the data is not what it was: $digest, $after"
    done
    # And while it is written to.
    "$pagecrew" trim --watch --pid "$pid" --interval 100ms --cpu 50 --max-zero 100 >/dev/null &
    for round in 1 2 3; do
        redis-cli -p "$port" debug populate 100000 "round$round" 300 >/dev/null
        redis-cli -p "$port" eval "for i = 0, 99999 do redis.call('set', 'round$round:' .. i, 'value ' .. i) end" 0 >/dev/null
    done
    local wrong
    wrong=$(redis-cli -p "$port" eval "local n = 0; for r = 1, 3 do for i = 0, 99999 do
        if redis.call('get', 'round' .. r .. ':' .. i) ~= 'value ' .. i then n = n + 1 end end end return n" 0)
    [ "$wrong" = 0 ] || fail "$wrong values are not what was written"
    redis-cli -p "$port" shutdown nosave 2>/dev/null || true
    wait "$pid" || fail "redis ended with status $?"
    [ "$went" -gt 0 ] || fail "nothing was trimmed"
    echo "$((went >> 20)) MiB gone"
}

trim_numpy() {
    [ -x "$python" ] || skip "there is no Python environment"
    can_trim
    # NumPy asks for huge pages by itself.
    "$python" - "$pagecrew" <<'PYTHON' || fail "status $?"
import hashlib, json, subprocess, sys, os
import numpy as np

rng = np.random.default_rng(1)
sparse = np.zeros(64 << 20, dtype=np.uint8)
sparse[:: 50 << 10] = 7
counts = np.zeros((4000, 4000), dtype=np.int64)
counts[rng.integers(0, 4000, 300), rng.integers(0, 4000, 300)] = 1
dense = rng.random(4 << 20)
digests = lambda: [hashlib.sha256(array.tobytes()).hexdigest() for array in (sparse, counts, dense)]
before = digests()
trim = lambda: json.loads(subprocess.check_output([sys.argv[1], "trim", "--pid", str(os.getpid()), "--json"]))["totals"]
first = trim()
assert digests() == before
assert first["gone_bytes"] > 40 << 20, first
for step in range(20):
    sparse[step :: 50 << 10] += 1
    counts[step] += step
    expected = digests()
    trim()
    assert digests() == expected, step
print(first["gone_bytes"] >> 20, "MiB gone")
PYTHON
}

# A program under `run --trim on` trims itself, as an ordinary user, too.
trim_under_run() {
    [ -x "$python" ] || skip "there is no Python environment"
    can_trim
    local file
    file=$(mktemp)
    at_exit "rm -f $file"
    "$pagecrew" run --trim on --stats-json "$file" -- "$python" -c '
import numpy as np, time
array = np.zeros(256 << 20, dtype=np.uint8)
array[:: 50 << 10] = 7
end = time.monotonic() + 60
resident = lambda: int([line for line in open("/proc/self/status") if line.startswith("VmRSS")][0].split()[1]) >> 10
while resident() > 128 and time.monotonic() < end:
    time.sleep(0.2)
expected = np.zeros(256 << 20, dtype=np.uint8)
expected[:: 50 << 10] = 7
assert (array == expected).all()
' || fail "status $?"
    python3 - "$file" <<'PYTHON' || fail "nothing was trimmed"
import json, sys
counters = json.load(open(sys.argv[1]))["counters"]
print(counters["trimmed_bytes"] >> 20, "MiB gone of", counters["trimmed_huge_pages"], "huge pages")
assert counters["trimmed_bytes"] > 100 << 20
PYTHON
}

limited_groups=()
# limited_group [SUFFIX]: a memory control group with a limit of 64 MiB and no swap, of the version that this machine has, as $group; $control is
# the file that a watch changes. The group is removed at the end.
limited_group() {
    can_trim
    local mount=/sys/fs/cgroup/memory
    if [ ! -e $mount/memory.limit_in_bytes ]; then
        for mount in /sys/fs/cgroup /sys/fs/cgroup/unified; do
            if grep -qw memory "$mount/cgroup.controllers" 2>/dev/null; then break; fi
        done
        echo +memory >"$mount/cgroup.subtree_control" 2>/dev/null || skip "no memory controller can be had here"
    fi
    group=$mount/pagecrew-test-$$${1:-}
    mkdir "$group" 2>/dev/null || skip "no control group can be made"
    limited_groups+=("$group")
    # shellcheck disable=SC2016
    at_exit 'kill $(jobs -p) 2>/dev/null || true; for group in "${limited_groups[@]}"; do remove_group "$group"; done'
    if [ -e "$group/memory.high" ]; then
        control=memory.high
    else
        control=memory.oom_control
        [ -e "$group/$control" ] || skip "the kernel's OOM killer can't be held up here"
    fi
    limit_group
}

limit_group() {
    if [ "$control" = memory.high ]; then
        echo 64M >"$group/memory.max"
        [ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
    else
        echo 64M >"$group/memory.limit_in_bytes"
    fi
}

# What that file has: memory.high, or whether the OOM killer is off.
control_text() {
    sed 's/oom_kill_disable //; q' "$group/$control"
}

control_is() {
    [ "$(control_text)" = "$1" ]
}

control_is_not() {
    ! control_is "$1"
}

# Whether a command succeeds within 20 seconds: a busy machine takes its time.
eventually() {
    local _
    for _ in $(seq 200); do
        if "$@"; then return; fi
        sleep 0.1
    done
    return 1
}

# start_watch [INTERVAL [OPTION...]]: starts a watch over the group as $watch, and waits until it holds it. What it says goes to $work/log.
start_watch() {
    local before
    before=$(control_text)
    "$pagecrew" trim --watch --cgroup "$group" --interval "${1:-1s}" "${@:2}" >/dev/null 2>"$work/log" &
    watch=$!
    eventually control_is_not "$before" || fail "the group is not held"
}

# in_limited_group COMMAND...: runs it in the group.
in_limited_group() {
    (echo "$BASHPID" >"$group/cgroup.procs" && exec "$@") 2>/dev/null
}

# Ends the watch, which may not take longer than a tenth of a second, whatever it is at.
end_watch() {
    local begin status=0
    begin=$(date +%s%N)
    kill "$watch"
    wait "$watch" || status=$?
    took=$((($(date +%s%N) - begin) / 1000000))
    [ "$status" -eq 0 ] || fail "the watch ended with status $status"
    [ "$took" -le "$((100 * ${patience:-1}))" ] || fail "the watch took $took ms to end"
}

in_vain() {
    grep -c 'nothing to give back' "$work/log" || true
}

# The source's case: twice as much in huge pages as the group may have, a fourteenth of it used. Killed on the stock kernel.
sparse() {
    in_limited_group "$programs/sparse" 128 "$1"
}

trim_hold() {
    limited_group
    local before status=0
    before=$(control_text)
    sparse 1 || status=$?
    [ "$status" -eq 137 ] || skip "this kernel doesn't kill what is to be saved (status $status)"
    start_watch
    sparse 4 || fail "status $?"
    end_watch
    control_is "$before" || fail "the group's control is $(control_text), and was $before"
    # Where nothing can be given back, the kernel has its way.
    start_watch
    status=0
    in_limited_group "$programs/sparse" 128 1 dense || status=$?
    [ "$status" -eq 137 ] || fail "a program that needs more than it may have ended with status $status"
    [ "$(in_vain)" -eq 1 ] || fail "the watch has said $(in_vain) times that there is nothing to give back"
    # That was this once.
    sleep 3
    sparse 1 || fail "status $? after a program that could not be saved"
    echo "$control"
}

# Ticks of CPU time that the watch has used.
ticks() {
    local fields
    read -ra fields <"/proc/$watch/stat"
    echo $((fields[13] + fields[14]))
}

# watched SECONDS: watches the watch for so long. $used is the ticks that it has used; it may not change the group.
watched() {
    local was _
    was=$(control_text)
    used=-$(ticks)
    for _ in $(seq "$1"); do
        sleep 1
        control_is "$was" || fail "the group's control goes from $was to $(control_text)"
    done
    used=$((used + $(ticks)))
}

# Page cache of the group, in MiB.
cached() {
    awk '/^(total_)?(in)?active_file / {sum[$1 ~ /^total/] += $2} END {print int((sum[1] ? sum[1] : sum[0]) / 1048576)}' \
        "$group/memory.stat"
}

is_cached() {
    [ "$(cached)" -ge "$1" ]
}

# Reads what is larger than the group's limit, again and again, in the group: a disk, or a file in the checkout.
fill_with_cache() {
    local source file=$root/target/tests/cache
    mkdir -p "$root/target/tests"
    for source in /dev/[svx]d[a-z] /dev/nvme*n1 "$file"; do
        # Page cache belongs to the group that reads or writes first.
        if [ "$source" = "$file" ]; then in_limited_group head -c 192M /dev/zero >"$file"; fi
        # Root may be told that he can, and still not be let.
        head -c 1 "$source" >/dev/null 2>&1 || continue
        # A disk that nobody has open has no page cache.
        in_limited_group bash -c "exec 3<$source; while dd if=$source of=/dev/null bs=1M count=192; do :; done" &
        if eventually is_cached 48; then return; fi
        kill $! 2>/dev/null || true
    done
    skip "nothing that can be read here fills a group's page cache"
}

# A group that is full of page cache is not at its limit, and what is in need beside the cache is saved as well.
trim_hold_cache() {
    limited_group
    needs awk
    at_exit "kill \$(jobs -p) 2>/dev/null || true; rm -f $root/target/tests/cache; remove_group $group"
    fill_with_cache
    local before used _
    before=$(control_text)
    start_watch 10s
    sleep 3
    # On an emulated machine that is busy with other things, a tick is more than a tick; then once more.
    for _ in 1 2 3; do
        watched 10
        # 1 % of 10 s, what was saved up before, and half as much again for the clock.
        if [ "$((used * 100 / $(getconf CLK_TCK)))" -le 30 ]; then break; fi
    done
    [ "$((used * 100 / $(getconf CLK_TCK)))" -le 30 ] || fail "the watch used $used ticks in 10 s"
    is_cached 40 || fail "only $(cached) MiB of page cache are left"
    sparse 2 || fail "status $?"
    [ "$(in_vain)" -eq 0 ] || fail "the watch has said $(in_vain) times that there is nothing to give back"
    end_watch
    control_is "$before" || fail "the group's control is $(control_text), and was $before"
    echo "$control, $used ticks of CPU in 10 s, ended after $took ms"
}

# Two hundred processes that take long to search, again and again, beside a group in need, and beside one that is frozen.
trim_many() {
    limited_group -second
    local before used pid first second=$group _
    limited_group
    needs python3
    before=$(control_text)
    cat >"$work/many.py" <<'EOF'
import ctypes, mmap, os, signal
open('/proc/self/comm', 'w').write('many')
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# A list of mappings as long as that of a large program: a millisecond for each search.
at = libc.mmap(None, 8 << 20, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
for page in range(0, 8 << 20, 8192):
    assert libc.mprotect(at + page, 4096, mmap.PROT_READ) == 0
memory = bytearray(4 << 20)
memory[::4096] = b'x' * len(memory[::4096])
for _ in range(200):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        signal.pause()
print('ready', flush=True)
signal.pause()
EOF
    python3 "$work/many.py" >"$work/many" &
    eventually grep -q ready "$work/many" || fail "no two hundred processes"
    start_watch 100ms --name many --cgroup "$second"
    sleep 1
    sparse 3 || fail "status $?"
    [ "$(in_vain)" -eq 0 ] || fail "the watch has said $(in_vain) times that there is nothing to give back"
    # What a rush has taken is paid off after a while.
    sleep 5
    watched 10
    [ "$((used * 100 / $(getconf CLK_TCK)))" -le "$((15 * ${patience:-1}))" ] || fail "the watch used $used ticks in 10 s"
    # Whoever is frozen in the group can't be helped, and holds nobody up.
    in_limited_group "$programs/sparse" 128 1000 &
    sleep 0.3
    if [ -e "$group/cgroup.freeze" ]; then
        echo 1 >"$group/cgroup.freeze"
    else
        while read -r pid; do kill -STOP "$pid"; done <"$group/cgroup.procs"
    fi
    sleep 1
    # Another group is helped as before.
    first=$group group=$second
    eventually control_is_not "$before" || fail "the second group is not held"
    sparse 3 || fail "status $? in a group beside one that is frozen"
    group=$first
    end_watch
    control_is "$before" || fail "the group's control is $(control_text), and was $before"
    echo "$control, $used ticks of CPU in 10 s, ended after $took ms"
}

# A watch that is killed leaves the group as it was, or as somebody else has set it up meanwhile.
trim_hold_killed() {
    limited_group
    local before signal
    before=$(control_text)
    start_watch
    kill -9 "$watch"
    wait "$watch" 2>/dev/null || true
    eventually control_is "$before" || fail "the group's control is $(control_text), and was $before"
    if [ "$control" != memory.high ]; then
        echo "$control"
        return
    fi
    # At once, which leaves it to the guard, and when the watch has seen it.
    for signal in KILL TERM; do
        echo max >"$group/memory.high"
        start_watch
        echo 40M >"$group/memory.high"
        if [ "$signal" = TERM ]; then
            eventually grep -q 'somebody else' "$work/log" || fail "the watch has not said that the group is not held any more"
        fi
        kill -"$signal" "$watch"
        wait "$watch" 2>/dev/null || true
        sleep 0.5
        control_is 41943040 || fail "memory.high is $(control_text) after SIG$signal, and somebody else had set 40 MiB"
    done
    echo "$control"
}

# A watch whose output nobody reads is not held up by that.
trim_hold_unread() {
    limited_group
    local before
    before=$(control_text)
    mkfifo "$work/pipe"
    exec 9<>"$work/pipe"
    # Not a byte more fits in.
    head -c 65536 /dev/zero >&9
    "$pagecrew" trim --watch --json --cgroup "$group" --interval 100ms >&9 2>"$work/log" 9>&- &
    watch=$!
    eventually control_is_not "$before" || fail "the group is not held"
    sleep 2
    sparse 3 || fail "status $?"
    end_watch
    control_is "$before" || fail "the group's control is $(control_text), and was $before"
    # What is not written is said, once somebody reads.
    "$pagecrew" trim --watch --json --cgroup "$group" --interval 100ms >&9 2>"$work/log" 9>&- &
    watch=$!
    sleep 9
    timeout 3 cat <&9 >"$work/read" || true
    eventually grep -q 'lines of output are missing' "$work/log" || fail "nothing is said of what was lost"
    end_watch
    exec 9>&-
    echo "ended after $took ms"
}

# has_another_guard PROCESS: a guard of the watch, which is not that process.
has_another_guard() {
    local guard
    guard=$(pgrep -P "$watch" pagecrew/guard) && [ "$guard" != "$1" ]
}

# A group that is made anew is held at once, whatever the interval, and one that anybody has locked is held all the same.
trim_hold_anew() {
    limited_group
    needs flock
    local before
    before=$(control_text)
    flock "$group/$control" sleep 60 &
    sleep 0.2
    start_watch 1h
    kill %1
    wait %1 2>/dev/null || true
    rmdir "$group"
    # As long as a service takes to start again: the watch sees that the group is gone.
    sleep 1
    mkdir "$group"
    limit_group
    eventually control_is_not "$before" || fail "the new group is not held"
    sparse 3 || fail "status $?"
    # Without its guard, the group would stay held if the watch were killed: there is another one at once.
    end_watch
    start_watch 1h
    local guard begin
    guard=$(pgrep -P "$watch" pagecrew/guard) || fail "there is no guard"
    begin=$(date +%s%N)
    kill -9 "$guard"
    eventually has_another_guard "$guard" || fail "there is no new guard"
    [ "$((($(date +%s%N) - begin) / 1000000))" -le "$((1000 * ${patience:-1}))" ] || fail "the new guard was late"
    eventually control_is_not "$before" || fail "the group is not held any more"
    kill -9 "$watch"
    wait "$watch" 2>/dev/null || true
    eventually control_is "$before" || fail "the group's control is $(control_text), and was $before"
}

# Settings that can't be read now (a server that knows users does not answer; here, nobody writes to a pipe) keep nobody from what he does, and
# count once they can be.
trim_hold_unsettled() {
    limited_group
    local before
    before=$(control_text)
    mkfifo "$work/settings"
    printf '[trim]\ninterval = "1s"\n' >"$work/settings" &
    start_watch 1s --config "$work/settings"
    kill -HUP "$watch"
    sleep 1
    sparse 3 || fail "status $? while settings are read"
    grep -q 'settings' "$work/log" && fail "said too early: $(cat "$work/log")"
    # Whoever asks once more meanwhile gets what there is then.
    kill -HUP "$watch"
    sleep 0.2
    printf '[trim]\nmax-zero = 512\n' >"$work/settings"
    # A pipe has no end while somebody writes.
    sleep 0.5
    printf '[trim]\ncpu = 2\n' >"$work/settings"
    eventually grep -q 'the settings were read again' "$work/log" || fail "they were not read: $(cat "$work/log")"
    kill -HUP "$watch"
    printf '[trim]\nmax-zero = 512\n' >"$work/settings"
    eventually grep -q "the settings stay as they are: .*'512'" "$work/log" || fail "nonsense was taken: $(cat "$work/log")"
    [ "$(grep -c 'the settings' "$work/log")" -eq 2 ] || fail "$(cat "$work/log")"
    # Nor do they hold up its end.
    kill -HUP "$watch"
    sleep 0.2
    end_watch
    control_is "$before" || fail "the group's control is $(control_text), and was $before"
    echo "ended after $took ms"
}

beside=waits
add trim/hold 200 trim_hold
add trim/hold/cache 300 trim_hold_cache
add trim/hold/killed 60 trim_hold_killed
add trim/hold/many 120 trim_many
add trim/hold/unread 60 trim_hold_unread
add trim/hold/unsettled 60 trim_hold_unsettled
add trim/hold/anew 60 trim_hold_anew
beside=yes
add trim/redis 120 trim_redis
add trim/numpy 120 trim_numpy
add trim/under-run 120 trim_under_run
beside=no
