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

# The source's case: twice as much in huge pages as the group may have, a fourteenth of it used. Killed at once on the stock kernel.
trim_hold() {
    can_trim
    local mount=/sys/fs/cgroup/memory group
    group=$mount/pagecrew-test-$$
    mkdir "$group" 2>/dev/null || skip "no control group can be made"
    at_exit "kill \$(jobs -p) 2>/dev/null || true; sleep 0.2; rmdir $group || true"
    [ -e "$group/memory.oom_control" ] || skip "the kernel's OOM killer can't be held up here"
    echo 20M >"$group/memory.limit_in_bytes"
    "$pagecrew" trim --watch --cgroup "$group" --interval 1s &
    local watch=$!
    sleep 0.5
    (echo "$BASHPID" >"$group/cgroup.procs" && exec "$programs/sparse" 40 20) || fail "status $?"
    kill "$watch"
    wait "$watch" || fail "the watch ended with status $?"
    grep -q 'oom_kill_disable 0' "$group/memory.oom_control" || fail "the OOM killer is not what it was"
    # Where nothing can be given back, the kernel has its way.
    "$pagecrew" trim --watch --cgroup "$group" --interval 1s 2>/dev/null &
    watch=$!
    sleep 0.5
    local status=0
    (echo "$BASHPID" >"$group/cgroup.procs" && exec "$programs/sparse" 40 1 dense) 2>/dev/null || status=$?
    [ "$status" -eq 137 ] || fail "a program that needs more than it may have ended with status $status"
    # And if the watch is killed, nothing stays held.
    kill -9 "$watch"
    sleep 0.5
    grep -q 'oom_kill_disable 0' "$group/memory.oom_control" || fail "the OOM killer is still off"
}

add trim/redis 120 trim_redis
add trim/numpy 120 trim_numpy
add trim/under-run 120 trim_under_run
add trim/hold 120 trim_hold
