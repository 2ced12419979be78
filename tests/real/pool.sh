# shellcheck shell=bash disable=SC2154,SC2034
# Who takes memory from a pool: QEMU with a real guest, programs with their heap in it, tenants that look for others' bytes; and what
# is left when any of them is killed. Each test has a server and a directory of its own. Sourced by scripts/test-real.sh.

kernel=$root/.cache/guest/vmlinuz

# pool_directory: an empty one, of which nothing is left when the test ends. Sets `pool` and where the client commands look.
pool_directory() {
    if [ "$(id -u)" -ne 0 ]; then skip "takes root"; fi
    pool=$(mktemp -d)
    # Others than root have to reach the socket.
    chmod 755 "$pool"
    export PAGECREW_POOL_SOCKET=$pool/socket
    at_exit clear_pool
}

clear_pool() {
    local process
    for process in $(jobs -p); do
        kill "$process" 2>/dev/null || true
        timeout 5 tail --sleep-interval 0.1 --pid "$process" -f /dev/null || kill -KILL "$process" || true
    done
    while mountpoint -q "$pool/mem"; do umount --lazy "$pool/mem"; done
    rm -rf "$pool"
}

# serve OPTION...: a server, that answers. Sets `server`.
serve() {
    pool_directory
    "$pagecrew" pool serve --directory "$pool" "$@" 2>"$work/server.log" &
    server=$!
    wait_for_server 3
}

# wait_for_server STATUS: until it answers. Skips if it ends with this status.
wait_for_server() {
    until "$pagecrew" pool status >/dev/null 2>&1; do
        if ! kill -0 "$server" 2>/dev/null; then
            local status=0
            wait "$server" || status=$?
            if [ "$status" = "$1" ]; then skip "$(tail -n 1 "$work/server.log")"; fi
            fail "the server ended with status $status: $(cat "$work/server.log")"
        fi
        sleep 0.02
    done
}

stop_server() {
    kill "$server"
    wait "$server" || fail "the server ended with status $?: $(cat "$work/server.log")"
    if mountpoint -q "$pool/mem"; then fail "the memory is still mounted"; fi
}

# pool_status EXPRESSION: of the status, which is `s`.
pool_status() {
    local status
    status=$("$pagecrew" pool status --json) && python3 -c "import json, sys; s = json.loads(sys.argv[1]); print($1)" "$status"
}

# Seconds in which a CPU had nothing to do, since the start of the machine.
idle_seconds() {
    awk -v ticks="$(getconf CLK_TCK)" '/^cpu / { printf "%d\n", $5 / ticks }' /proc/stat
}

# wait_for_pool CONDITION SECONDS
wait_for_pool() {
    local end=$((SECONDS + $2))
    until [ "$(pool_status "$1")" = True ]; do
        if [ "$SECONDS" -ge "$end" ]; then fail "not so after $2 s: $1; $("$pagecrew" pool status --json)"; fi
        sleep 0.02
    done
}

# wait_for_ready BYTES: within a minute; within four where others take the CPU, of which the filler has only what nobody else wants.
wait_for_ready() {
    local begin=$SECONDS before waited idle
    before=$(idle_seconds)
    until [ "$(pool_status "s['ready_bytes'] == $1")" = True ]; do
        waited=$((SECONDS - begin)) idle=$(($(idle_seconds) - before))
        if [ "$waited" -ge 240 ] || { [ "$waited" -ge 60 ] && [ "$idle" -ge 15 ]; }; then
            fail "not $1 bytes ready after $waited s, in which $idle s of CPU were free; $("$pagecrew" pool status --json)"
        fi
        sleep 0.02
    done
}

# All memory has come back: no file is left of it, and none without a name.
nothing_taken() {
    wait_for_pool "s['taken_bytes'] == 0" "${1:-10}"
    [ -z "$(ls -A "$pool/mem/taken")" ] || fail "left: $(ls "$pool/mem/taken")"
    local end=$((SECONDS + 10)) blocks size
    size=$(pool_status "s['size_bytes']")
    until blocks=$(stat --file-system --format '(%b - %f) * %S' "$pool/mem") && [ "$((blocks))" -le "$size" ]; do
        if [ "$SECONDS" -ge "$end" ]; then fail "$((blocks)) bytes are in use, and $size are to be ready"; fi
        sleep 0.02
    done
}

# with_huge_pages N COMMAND...: with as many more reserved, until the test ends.
with_huge_pages() {
    local setting=/proc/sys/vm/nr_hugepages wanted
    wanted=$(($(cat "$setting") + $1))
    change "$setting" "$wanted" && [ "$(cat "$setting")" -eq "$wanted" ] || skip "$1 huge pages can't be reserved"
    "${@:2}"
}

# guest OPTIONS-OF-BACKEND OPTION...: a kernel starts in the pool's memory, and ends since it finds no root. Its console is in `console`.
guest() {
    local backend=$1
    shift
    timeout 100 "$pagecrew" pool exec --size 512M -- qemu-system-x86_64 -accel tcg -m 512M -nodefaults -nographic -serial stdio -no-reboot \
        -object "memory-backend-file,id=m,size=512M,mem-path={path}$backend" -machine memory-backend=m "$@" \
        -kernel "$kernel" -append "console=ttyS0 panic=-1" >"$work/console" 2>"$work/errors" ||
        fail "status $?: $(cat "$work/errors") $(tail -n 3 "$work/console")"
    grep -q 'Linux version' "$work/console" || fail "no line of a kernel: $(cat "$work/errors" "$work/console")"
    grep -Eq 'Memory: [0-9]+K/52[0-9]{4}K available' "$work/console" || fail "not 512 MiB: $(grep Memory: "$work/console")"
    nothing_taken
}

pool_guest() {
    needs qemu-system-x86_64
    [ -e "$kernel" ] || skip "there is no guest kernel; scripts/setup.sh gets it"
    serve --size 512M --file 512M --cpu 100
    wait_for_ready "512 << 20"
    guest ,share=on,prealloc=on
    wait_for_ready "512 << 20"
    guest ,share=on -overcommit mem-lock=on
    # And with the memory that a pool had not got ready.
    guest ,prealloc=on
    [ "$(pool_status "s['counters']['handed_out_ready_bytes'] >= 2 * (512 << 20)")" = True ] || fail "it was not ready: $(pool_status s)"
    grep -o 'Linux version [^ ]*' "$work/console"
    stop_server
}

# qemu_maps_huge FIELDS: with nothing said of how to map it, QEMU shares the memory and has all of it in huge pages.
qemu_maps_huge() {
    needs qemu-system-x86_64
    wait_for_ready "256 << 20"
    "$pagecrew" pool exec --size 256M -- qemu-system-x86_64 -accel tcg -m 256M -nodefaults -nographic -S -pidfile "$work/pid" \
        -object 'memory-backend-file,id=m,size=256M,mem-path={path},prealloc=on' -machine memory-backend=m &
    local client=$! end=$((SECONDS + 30)) mapped=
    # It writes its number before it has all of its memory.
    until [ "$mapped" = "rw-s $((256 << 10))" ]; do
        if [ "$SECONDS" -ge "$end" ]; then fail "rights and KiB in huge pages: $mapped"; fi
        sleep 0.02
        if [ ! -s "$work/pid" ]; then continue; fi
        mapped=$(awk -v path="$pool/mem/taken/" -v fields="^($1):$" '
            /^[0-9a-f]+-[0-9a-f]+ / { here = index($0, path); if (here) rights = $2 }
            here && $1 ~ fields { sum += $2 }
            END { print rights, sum }' "/proc/$(cat "$work/pid")/smaps")
    done
    kill "$(cat "$work/pid")"
    wait "$client" || true
    nothing_taken
    stop_server
    echo "$mapped KiB in huge pages"
}

pool_qemu_huge() {
    serve --backing "$1" --size 256M --file 256M --cpu 100
    if [ "$1" = tmpfs ]; then qemu_maps_huge ShmemPmdMapped; else qemu_maps_huge 'Shared_Hugetlb|Private_Hugetlb'; fi
}

# A program whose heap is a file, until it releases it, or until nobody has it open.
pool_heap() {
    needs python3
    local path said
    serve --backing "$1" --size 128M --file 128M --cpu 100 --unused 1s --floor 0
    wait_for_ready "128 << 20"
    path=$("$pagecrew" pool take --size 128M)
    said=$("$programs/heap" "$path" 1000 1) || fail "the heap is not its own"
    [ "$said" = "$((128 << 20)) $((128 << 20))" ] || fail "bytes, and those in huge pages: $said"
    [ "$(pool_status "s['taken_bytes'] == 128 << 20")" = True ] || fail "gone while it was wanted"
    "$pagecrew" pool release "$path" || fail "status $? of release"
    [ ! -e "$path" ] || fail "released, and there"
    nothing_taken 0
    # More than there can be ready.
    path=$("$pagecrew" pool take --size 200M)
    "$programs/heap" "$path" 2500 2 >/dev/null || fail "the heap is not its own, or went while it was open"
    nothing_taken 10
    [ ! -e "$path" ] || fail "unused, and there"
    stop_server
    echo "$said"
}

# What was promised and is mapped, but not touched, is not kept from others twice.
pool_promised() {
    needs python3
    serve --backing hugetlbfs --size 2M --floor 0 --unused 1h
    local path more
    path=$("$pagecrew" pool take --size 40M)
    python3 - "$path" >"$work/mapped" <<'PYTHON' &
import mmap, signal, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 40 << 20)
print("mapped", flush=True)
signal.pause()
PYTHON
    local mapper=$!
    until grep -q mapped "$work/mapped"; do
        kill -0 "$mapper" 2>/dev/null || fail "the file can't be mapped"
        sleep 0.05
    done
    more=$("$pagecrew" pool take --size 80M) || fail "80 MiB of 88 are refused"
    if "$pagecrew" pool take --size 16M 2>/dev/null; then fail "16 MiB of 8 are promised"; fi
    kill "$mapper"
    for path in "$path" "$more"; do "$pagecrew" pool release "$path"; done
    nothing_taken
    stop_server
}

# A file that is handed out while the filler is at it, which then gets nothing: whatever it does about that, it must not do it to what is
# somebody's by now.
pool_filling() {
    needs strace
    # All of it on one node, however many there are.
    local node
    node=$(kernel_list /sys/devices/system/node/has_memory 2>/dev/null | sed -n 1p)
    serve --node "${node:-0}=64M" --file 64M --cpu 100
    wait_for_ready "64 << 20"
    local filler path
    filler=$(pgrep --parent "$server")
    strace --follow-forks --attach "$filler" --output "$work/trace" --trace madvise \
        --inject madvise:error=ENOMEM:delay_enter=1000000:when=2+ 2>"$work/strace" &
    local end=$((SECONDS + 10))
    until grep -q attached "$work/strace"; do
        if [ "$SECONDS" -ge "$end" ] || ! kill -0 $! 2>/dev/null; then skip "strace can't trace here: $(cat "$work/strace")"; fi
        sleep 0.02
    done
    path=$("$pagecrew" pool take --size 64M)
    "$pagecrew" pool release "$path"
    # The next file, of which it fills the first half and is held up at the second.
    wait_for_ready "32 << 20"
    "$pagecrew" pool exec --size 64M -- "$programs/heap" "{path}" 4000 1 || fail "what was somebody's has changed"
    grep -q INJECTED "$work/trace" || fail "the filler was not held up"
    nothing_taken
}

# pool_tenants BACKING HAND-OUTS LARGEST: four at once, two of them root; then one that takes large files.
pool_tenants() {
    needs setpriv
    serve --backing "$1" --size 512M --cpu 100 --unused 1s --socket-mode 666
    local seed all=() each=$(($2 / 4)) nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
    # Where others take the CPU, this may be all that is ever ready.
    wait_for_ready "512 << 20"
    for seed in 1 2; do
        "$programs/tenant" "$pool/socket" "$each" "$3" $((seed + RANDOM)) >"$work/root.$seed" &
        all+=($!)
        "${nobody[@]}" "$programs/tenant" "$pool/socket" "$each" "$3" $((seed + RANDOM)) >"$work/nobody.$seed" &
        all+=($!)
    done
    for each in "${all[@]}"; do wait "$each" || fail "status $? of a tenant"; done
    wait_for_ready "512 << 20"
    "$programs/tenant" "$pool/socket" 20 512 $RANDOM >"$work/large" || fail "status $? of a tenant with much"
    nothing_taken 30
    awk '{ count += $1; bytes += $2; ready += $3 }
        END { print count " hand-outs, " bytes " MiB, " ready " MiB of them ready"; exit !(ready > bytes / 20) }' \
        "$work"/root.* "$work"/nobody.* "$work/large" || fail "next to nothing was ready, so nothing was tried"
    stop_server
}

# pool_kills BACKING ROUNDS
pool_kills() {
    pool_directory
    python3 tests/real/kills.py "$pagecrew" "$programs/heap" "$pool" "$2" "$RANDOM" --backing "$1" --size 256M --cpu 100 ||
        fail "status $?"
}

# pool_shares SECONDS TAKES: one user takes and takes, and two who ask now and then have as much ready as without him, in so many takes at
# least.
pool_shares() {
    needs python3
    serve --size 512M --cpu 100 --socket-mode 666 --quota 1003=256M
    wait_for_ready "512 << 20"
    python3 tests/real/shares.py "$pool/socket" "$1" "$2" || fail "status $?"
    nothing_taken
    stop_server
}

# A pool that is full, and that nobody asks anything, costs next to nothing, also where little stands above the floor: there it is looked often.
pool_idle() {
    local available used near
    # 0.1 % of a CPU.
    at_rest 10000
    used=$spent
    available=$(awk '/^MemAvailable:/ { printf "%.0f", $2 * 1024 }' /proc/meminfo)
    at_rest 15000 --floor $((available - (1536 << 20)))
    near=$spent
    echo "$used us of CPU in 10 s, $near near the floor, $resident KiB"
}

# at_rest MOST OPTION...: $spent is the microseconds of CPU that such a pool takes in 10 s, fewer than MOST, and $resident the KiB that it has.
at_rest() {
    local most=$1
    shift
    serve --size 128M --cpu 100 "$@"
    wait_for_ready "128 << 20"
    local processes=("$server") pid before
    mapfile -t -O 1 processes < <(pgrep --parent "$server")
    before=$("$pagecrew" pool status --json)
    sleep 3
    spent=$(ran_us "${processes[@]}")
    sleep 10
    spent=$(($(ran_us "${processes[@]}") - spent))
    [ "$spent" -lt $((most * ${patience:-1})) ] || fail "$spent us of CPU in 10 s $*
        by thread, ns since the start: $(for pid in "${processes[@]}"; do paste -d ' ' "/proc/$pid/task"/*/comm "/proc/$pid/task"/*/schedstat; done | tr '\n' ';')
        before: $before
        after: $("$pagecrew" pool status --json)
        memory: $(grep -E 'Free|Available' /proc/meminfo | tr -s ' \n' ' ') $(tr '\n' ' ' </proc/pressure/memory 2>/dev/null)"
    resident=0
    for pid in "${processes[@]}"; do resident=$((resident + $(awk '/^VmRSS:/ { print $2 }' "/proc/$pid/status"))); done
    [ "$resident" -lt 16384 ] || fail "$resident KiB resident in ${#processes[@]} processes"
    stop_server
}

# The example of docs/pool.md, as it stands there.
pool_example() {
    serve --size 64M --cpu 100
    awk '/^```/ { inside = $0 == "```python"; next } inside' docs/pool.md >"$work/example.py"
    [ -s "$work/example.py" ] || fail "docs/pool.md has no example"
    sed -i "s|/run/pagecrew/pool/socket|$pool/socket|" "$work/example.py"
    python3 "$work/example.py" || fail "status $?"
    nothing_taken
    stop_server
}

# Scrapers, and those who only look like some: silent, endless, deaf, in their hundreds. Takers and honest scrapers notice nothing, and the
# server has no more open and no more to do than it allows itself.
pool_metrics() {
    local address=$1
    needs python3
    serve --size 64M --cpu 100 --metrics "$address"
    wait_for_ready $((64 << 20))
    case $address in
    0) address=$(sed -n 's|.*metrics at http://\(.*\)/metrics$|\1|p' "$work/server.log") ;;
    *) [ "$(stat --format %a "$address")" = 600 ] || fail "not for its owner alone: $(stat "$address")" ;;
    esac
    python3 tests/real/scrapers.py "$pagecrew" "$server" "$address" || fail "status $?"
    nothing_taken
    stop_server
    if [ -S "$address" ]; then fail "the socket is still there"; fi
}

# Another program grows: what waits goes back to the machine, and comes again when the other one has ended.
pool_pressure() {
    local available other
    available=$(awk '/^MemAvailable:/ { printf "%.0f", $2 * 1024 }' /proc/meminfo)
    if [ "$available" -lt $((6 << 30)) ]; then skip "takes 6 GiB of free memory"; fi
    # When the pool is full, 1 GiB is left over the floor.
    serve --size 512M --cpu 100 --below-floor --floor $((available - (1536 << 20)))
    wait_for_ready "512 << 20"
    python3 -c 'import time; memory = b"x" * (3 << 30); time.sleep(60)' &
    other=$!
    wait_for_pool "s['ready_bytes'] == 0 and s['state'].startswith('waiting: free memory')" 30
    # What somebody needs now he gets all the same.
    "$pagecrew" pool exec --size 64M -- test -s '{path}' || fail "nothing could be taken"
    kill "$other"
    wait "$other" || true
    wait_for_ready "512 << 20"
    pool_status "s['counters']['given_back_bytes']"
    stop_server
}

# Programs that leave no CPU time keep a pool from being filled, and it is said so; what somebody needs he gets all the same.
pool_crowded() {
    local cpu other
    cpu=$(taskset -cp $$ | sed 's/.*[ ,-]//')
    taskset -cp "$cpu" $$ >/dev/null
    taskset -c "$cpu" python3 -c 'while True: pass' &
    other=$!
    serve --size 128M --cpu 100
    wait_for_pool "s['state'] == 'waiting: other programs take all CPU time'" 30
    "$pagecrew" pool exec --size 64M -- test -s '{path}' || fail "nothing could be taken"
    kill "$other"
    wait "$other" || true
    wait_for_ready "128 << 20"
    grep -c 'other programs take all CPU time' "$work/server.log"
    stop_server
}

beside=yes
add pool/guest 600 pool_guest
add pool/metrics 120 pool_metrics 0
add pool/kills 180 pool_kills tmpfs 40
add pool/qemu 300 pool_qemu_huge tmpfs
add pool/heap 300 pool_heap tmpfs
add pool/filling 600 pool_filling
add pool/tenants 600 pool_tenants tmpfs "$(scaled 1000)" 16
add pool/example 60 pool_example
beside=no
add pool/qemu/hugetlbfs 300 with_huge_pages 160 pool_qemu_huge hugetlbfs
add pool/heap/hugetlbfs 300 with_huge_pages 200 pool_heap hugetlbfs
add pool/promised/hugetlbfs 60 with_huge_pages 64 pool_promised
add pool/crowded 120 pool_crowded
add pool/pressure 600 pool_pressure
add pool/shares 400 pool_shares 3 100
add pool/idle 120 pool_idle
long=yes
add pool/metrics/socket 120 pool_metrics "/run/pagecrew-test-$$.metrics"
add pool/tenants/long 1200 pool_tenants tmpfs 10000 64
add pool/tenants/hugetlbfs 300 with_huge_pages 1800 pool_tenants hugetlbfs 1000 16
add pool/shares/long 900 pool_shares 15 10000
add pool/kills/long 3600 pool_kills tmpfs 1000
add pool/kills/hugetlbfs 900 with_huge_pages 1200 pool_kills hugetlbfs 200
long=no
