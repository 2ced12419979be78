# shellcheck shell=bash disable=SC2154,SC2034
# Memory on the NUMA node that was asked for, page by page, on machines with several nodes. Sourced by scripts/test-real.sh.

# Sets `memory_nodes` and `cpu_nodes`. Skips the test where there are none.
find_nodes() {
    local file=/sys/devices/system/node/has_memory
    if [ ! -e "$file" ]; then skip "the kernel knows no nodes"; fi
    mapfile -t memory_nodes < <(kernel_list "$file")
    # shellcheck disable=SC2034
    mapfile -t cpu_nodes < <(kernel_list /sys/devices/system/node/has_cpu)
}

# The same, and skips the test on a machine with one node.
several_nodes() {
    find_nodes
    if [ "${#memory_nodes[@]}" -lt 2 ]; then skip "the machine has one node with memory"; fi
}

# Skips the test on a machine that is somebody's: parts of it are to be taken out.
guests_only() {
    if [ -z "${guest:-}" ]; then skip "takes parts of the machine out, so only in a guest (scripts/guests.sh)"; fi
}

# The numbers of a list such as 0-3,8, one a line.
kernel_list() {
    local part
    for part in $(tr ',' ' ' <"$1"); do seq "${part%-*}" "${part#*-}"; done
}

# A node without memory; fails if there is none.
node_without_memory() {
    local node
    for node in $(kernel_list /sys/devices/system/node/online); do
        if [[ " ${memory_nodes[*]} " != *" $node "* ]]; then
            echo "$node"
            return
        fi
    done
    return 1
}

# Spans: also freed and reused on another node, zeroed ahead, moved, in a child, and on CPUs whose node has no memory.
numa_spans() {
    several_nodes
    local options
    for options in "--retain auto" "--huge-pages off" "--helpers 0"; do
        # shellcheck disable=SC2086
        "$pagecrew" run $options -- "$programs/numa" spans || fail "status $? with $options"
    done
}

# Frames of each zone, by a program of the library's.
numa_frames() {
    several_nodes
    local program=$root/target/guest-tests/pagecrew-numa
    if [ ! -x "$program" ]; then skip "$program is not built; scripts/guests.sh does"; fi
    "$program" --nocapture --test-threads 1 || fail "status $?"
}

# What the program says about its memory counts, whether it was said before it began or on the way.
numa_policy() {
    several_nodes
    local first=${memory_nodes[0]} last=${memory_nodes[-1]}
    "$pagecrew" run -- "$programs/numa" policy 2 "$last" || fail "MPOL_BIND to node $last: status $?"
    "$pagecrew" run -- "$programs/numa" policy 1 "$last" || fail "MPOL_PREFERRED of node $last: status $?"
    "$pagecrew" run -- "$programs/numa" policy 3 "$first" "$last" || fail "MPOL_INTERLEAVE: status $?"
    needs numactl
    numactl --membind="$last" "$pagecrew" run -- "$programs/numa" policy 0 "$last" || fail "numactl --membind=$last: status $?"
    numactl --interleave="$first,$last" "$pagecrew" run -- "$programs/numa" policy 0 "$first" "$last" ||
        fail "numactl --interleave: status $?"
}

# What the counters say of memory that is elsewhere: nothing where the node has enough, and how much where it had not.
numa_reported() {
    several_nodes
    needs python3 numactl
    local node cpu='' ballast size=$((256 << 20)) of
    for node in "${memory_nodes[@]}"; do
        [[ " ${cpu_nodes[*]} " == *" $node "* ]] || continue
        cpu=$(kernel_list "/sys/devices/system/node/node$node/cpulist" | head -n 1)
        break
    done
    if [ -z "$cpu" ]; then skip "no node has both memory and CPUs"; fi
    cat >"$work/reported.py" <<EOF
import os, subprocess, sys
os.sched_setaffinity(0, {$cpu})
memory = bytearray($size)
memory[::4096] = b'x' * len(memory[::4096])
if len(sys.argv) > 1:
    print(subprocess.run([sys.argv[1], 'stats', str(os.getpid()), '--json'], capture_output=True, text=True).stdout)
EOF
    # PROGRAM ARGUMENT...: prints how much was elsewhere at the end.
    elsewhere() {
        "$pagecrew" run --stats-json "$work/report" -- "$@" >"$work/out" || fail "status $?"
        python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["counters"]["elsewhere_bytes"])' "$work/report"
    }
    of=$(elsewhere python3 "$work/reported.py" "$pagecrew")
    [ "$of" -eq 0 ] || fail "$of bytes are elsewhere, and node $node has enough"
    python3 -c 'import json, sys
document = json.load(open(sys.argv[1]))
on = {entry["node"]: entry["resident_bytes"] for entry in document["nodes"]}
print("while it runs:", on, "elsewhere", document["elsewhere_bytes"])
sys.exit(not (on[int(sys.argv[2])] >= int(sys.argv[3]) and document["elsewhere_bytes"] == 0))' "$work/out" "$node" "$size" ||
        fail "the counters of the running process are wrong: $(cat "$work/out")"
    at_exit 'rm -f /dev/shm/pagecrew-ballast'
    ballast=$(awk '/MemFree/ { print $4 * 1024 - 128 * 1048576 }' "/sys/devices/system/node/node$node/meminfo")
    numactl --membind="$node" head -c "$ballast" /dev/zero >/dev/shm/pagecrew-ballast || skip "node $node can't be filled"
    of=$(elsewhere python3 "$work/reported.py")
    echo "of $size bytes on a node with 128 MiB free, $of are elsewhere"
    [ "$of" -gt $((64 << 20)) ] && [ "$of" -le $((size + (32 << 20))) ] || fail "$of bytes are said to be elsewhere"
}

# CPUs that go and come back, one of them offline when the program begins.
numa_hotplug() {
    find_nodes
    if [ "${#memory_nodes[@]}" -lt 2 ]; then guests_only; fi
    local late=0 cpu cpus=() online=/sys/devices/system/cpu/cpu
    if [ "$(id -u)" -ne 0 ]; then skip "takes root"; fi
    for cpu in $(kernel_list /sys/devices/system/cpu/online); do
        if [ -w "$online$cpu/online" ]; then cpus+=("$cpu"); fi
    done
    if [ "${#cpus[@]}" -eq 0 ]; then skip "no CPU can be taken out"; fi
    at_exit "for file in ${online}[0-9]*/online; do echo 1 >\$file; done"
    # Where there is one alone, it comes and goes, and none comes only later.
    if [ "${#cpus[@]}" -gt 1 ]; then
        late=${cpus[-1]}
        echo 0 >"$online$late/online"
    fi
    "$pagecrew" run -- "$programs/numa" hotplug "${1:-20}" "$late" || fail "status $?"
}

# Memory that goes and comes back beside a program and a pool, and some of it only after they began.
memory_hotplug() {
    guests_only
    needs python3
    local block blocks=() round size=$((64 << 20))
    blocks_set() {
        local block
        for block in "${blocks[@]}"; do { echo "$1" >"$block/state"; } 2>/dev/null || true; done
    }
    at_exit 'blocks_set online'
    for block in $(printf '%s\n' /sys/devices/system/memory/memory[0-9]* | sort -rV); do
        if [ "${#blocks[@]}" -ge 3 ]; then break; fi
        if { echo offline >"$block/state"; } 2>/dev/null; then blocks+=("$block"); fi
    done
    if [ "${#blocks[@]}" -eq 0 ]; then skip "no memory can be taken out of this machine"; fi
    serve --size "$size" --floor 0 --cpu 4
    wait_for_ready "$size"
    # More than there was when it began can be had once there is more, and is known to the region.
    cat >"$work/later.py" <<'PYTHON'
import ctypes, json, os, subprocess, sys

pagecrew, *blocks = sys.argv[1:]

def memory():
    fields = dict(line.split(":") for line in open("/proc/meminfo"))
    return sum(int(fields[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
before = memory()
size = before + (32 << 20)
libc.free(libc.malloc(64 << 20))
assert not libc.malloc(ctypes.c_size_t(size)), "more than all memory could be had"
for block in blocks:
    open(block + "/state", "w").write("online")
assert memory() >= size, (before, memory())
block = libc.malloc(ctypes.c_size_t(size))
assert block, "memory that was added can't be had"
stats = json.loads(subprocess.run([pagecrew, "stats", str(os.getpid()), "--json"], capture_output=True, text=True, check=True).stdout)
in_use = sum(zone["in_use_bytes"] for zone in stats["zones"])
assert in_use >= size, (in_use, size)
libc.free(block)
print(f"{len(blocks)} blocks came later, {memory() - before >> 20} MiB")
PYTHON
    "$pagecrew" run -- python3 "$work/later.py" "$pagecrew" "${blocks[@]}" || fail "status $?"
    "$pagecrew" run -- "$programs/storm" "$(scaled 200000)" >"$work/storm" &
    local storm=$!
    for round in 1 2 3 4; do
        blocks_set offline
        sleep 1
        blocks_set online
        sleep 0.5
    done
    wait "$storm" || fail "status $? while memory came and went: $(cat "$work/storm")"
    wait_for_ready "$size"
    stop_server
    echo "${#blocks[@]} blocks of memory came later, and went and came back $round times"
}

# A pool whose files are where it says, and that says what isn't.
numa_pool() {
    several_nodes
    needs python3
    local node size=$((64 << 20)) nodes=() path answer without
    for node in "${memory_nodes[@]}"; do nodes+=(--node "$node=$size"); done
    serve "${nodes[@]}" --floor 0 --cpu 4
    wait_for_ready $((size * ${#memory_nodes[@]}))
    "$pagecrew" pool status
    for node in "${memory_nodes[@]}"; do
        [ "$(pool_status "[n['here_bytes'] for n in s['nodes'] if n['node'] == $node]")" = "[$size]" ] ||
            fail "not all of node $node is verified: $("$pagecrew" pool status --json)"
        path=$("$pagecrew" pool take --size 64M --node "$node") || fail "node $node: status $?"
        # Whoever maps it looks for himself.
        python3 -c '
import mmap, re, sys
path, node = sys.argv[1:]
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
    for at in range(0, len(memory), 4096):
        memory[at]
    text = [line for line in open("/proc/self/numa_maps") if path in line][0]
    pages = {place: int(count) for place, count in re.findall(r" N(\d+)=(\d+)", text)}
    print(f"node {node}: pages on {pages}")
    sys.exit(set(pages) != {node})' "$path" "$node" || fail "the file of node $node is elsewhere"
        "$pagecrew" pool release "$path"
    done
    wait_for_ready $((size * ${#memory_nodes[@]}))
    if without=$(node_without_memory); then
        if answer=$("$pagecrew" pool take --size 2M --node "$without" 2>&1); then fail "took memory of node $without"; fi
        echo "$answer"
        [[ $answer == *"node $without"* ]] || fail "not a word about node $without: $answer"
    fi
    # More than the last node has: what it has not is neither taken from others nor forgotten, and the others get theirs.
    needs numactl
    local last=${memory_nodes[-1]} first=${memory_nodes[0]} ballast
    ballast=$(awk '/MemFree/ { print $4 * 1024 - 192 * 1048576 }' "/sys/devices/system/node/node$last/meminfo")
    at_exit 'clear_pool; rm -f /dev/shm/pagecrew-ballast'
    numactl --membind="$last" head -c "$ballast" /dev/zero >/dev/shm/pagecrew-ballast || skip "node $last can't be filled"
    "$pagecrew" pool resize --size 512M --node "$last"
    "$pagecrew" pool resize --size 96M --node "$first"
    wait_for_pool "[n['ready_bytes'] for n in s['nodes'] if n['node'] == $first] == [100663296] and 'node $last has' in s['state']" 200
    "$pagecrew" pool status
    [ "$(pool_status "sum(n['here_bytes'] for n in s['nodes']) == s['ready_bytes']")" = True ] ||
        fail "something is not verified: $("$pagecrew" pool status --json)"
    # The filler was neither killed nor did it take from others for long.
    if grep "filler has ended" "$work/server.log"; then fail "the filler has ended"; fi
    # Whoever takes from there what is not ready gets the rest from elsewhere, and is told how much that is.
    answer=$("$pagecrew" pool take --size 512M --node "$last" --json) || fail "from a node that is full: status $?"
    python3 -c '
import json, mmap, re, sys
taken, node = json.loads(sys.argv[1]), int(sys.argv[2])
with open(taken["path"], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
    for at in range(0, len(memory), 4096):
        memory[at]
    text = [line for line in open("/proc/self/numa_maps") if taken["path"] in line][0]
    size = 4 << 10 if "kernelpagesize_kB=4" in text else 2 << 20
    pages = {int(place): int(count) * size for place, count in re.findall(r" N(\d+)=(\d+)", text)}
elsewhere = sum(count for place, count in pages.items() if place != node)
print("said to be elsewhere:", taken["elsewhere_bytes"], "found:", elsewhere)
sys.exit(not (taken["elsewhere_bytes"] > 0 and abs(taken["elsewhere_bytes"] - elsewhere) <= 32 << 20))' "$answer" "$last" ||
        fail "what is elsewhere is not said: $answer"
    "$pagecrew" pool release "$(python3 -c 'import json, sys; print(json.loads(sys.argv[1])["path"])' "$answer")"
    nothing_taken 100
    stop_server
}

add numa/spans 300 numa_spans
add numa/frames 120 numa_frames
add numa/pool 300 numa_pool
add numa/policy 60 numa_policy
add numa/reported 120 numa_reported
add numa/hotplug 60 numa_hotplug
add numa/memory-hotplug 120 memory_hotplug
long=yes
add numa/hotplug-long 400 numa_hotplug 300
long=no
