# shellcheck shell=bash disable=SC2154,SC2034
# The services as contrib/*.service limits them: capabilities, system calls, mounts. Nothing that they need is refused, and what they don't
# need is. No systemd runs here, so limits_of_unit.py does with the unit files what systemd would. Sourced by scripts/test-real.sh.

pool_unit=$root/contrib/pagecrew-pool.service
trim_unit=$root/contrib/pagecrew-trim.service
reclaim_unit=$root/contrib/pagecrew-reclaim.service
serve_unit=$root/contrib/pagecrew.service
limits_of_unit=$root/tests/real/limits_of_unit.py

# can_limit UNIT: skips unless its limits can be set here. Sets `interpreter`, a python3 that is no script.
can_limit() {
    needs python3 setpriv
    if [ "$(id -u)" -ne 0 ]; then skip "takes root"; fi
    local status=0
    python3 "$limits_of_unit" "$1" --instead -- true >"$work/limits" 2>&1 || status=$?
    if [ "$status" -eq 77 ]; then skip "$(tail -n 1 "$work/limits")"; fi
    [ "$status" -eq 0 ] || fail "the limits of $1: $(cat "$work/limits")"
    interpreter=$(python3 -c 'import sys; print(sys.executable)')
}

# In front of a command: as an ordinary user.
somebody=(setpriv --reuid 65534 --regid 65534 --clear-groups)

# has_limits UNIT PROCESS [CAPABILITY]: that process has the capabilities that the unit leaves and no others, and filters. The one with that
# number it has given up, in all threads.
has_limits() {
    local bounding has status=/proc/$2/status
    bounding=$(python3 "$limits_of_unit" "$1" --bounding)
    [ "$(awk '/^CapBnd:/ { print $2 }' "$status")" = "$bounding" ] || fail "not $bounding: $(grep Cap "$status")"
    has=$bounding
    if [ -n "${3:-}" ]; then has=$(printf '%016x' $((0x$bounding & ~(1 << $3)))); fi
    [ "$(awk '/^Cap(Prm|Eff):/ { print $2 }' "/proc/$2/task"/*/status | sort -u)" = "$has" ] || fail "not $has: $(grep -h Cap "/proc/$2/task"/*/status)"
    [ "$(awk '/^(NoNewPrivs|Seccomp):/ { print $2 }' "$status" | tr '\n' ' ')" = "1 2 " ] || fail "no filters: $(cat "$status")"
}

# nothing_refused LOG
nothing_refused() {
    if grep -Ei 'permitted|denied|refuse' "$1"; then fail "something was refused"; fi
}

# What the service manager would hear goes to $work/notified.
listen_as_manager() {
    export NOTIFY_SOCKET=$work/notify
    "$interpreter" - >"$work/notified" <<'PYTHON' &
import os, socket
receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
receiver.bind(os.environ["NOTIFY_SOCKET"])
while True:
    print(receiver.recv(4096).decode(), flush=True)
PYTHON
    eventually [ -S "$NOTIFY_SOCKET" ] || fail "nobody listens"
}

# taken_and_back COMMAND...: takes by either command and gives back, as the user that COMMAND changes to.
taken_and_back() {
    local path
    "$@" "$pagecrew" pool exec --size 32M -- test -s '{path}' || fail "exec: status $?"
    path=$("$@" "$pagecrew" pool take --size 32M) || fail "take: status $?"
    "$@" "$pagecrew" pool release "$path" >/dev/null || fail "release: status $?"
    # And what its owner has made larger, and leaves.
    path=$("$@" "$pagecrew" pool take --size 8M) || fail "take: status $?"
    "$@" truncate --size 16M "$path" 2>/dev/null || [ "$backing" = hugetlbfs ] || fail "truncate: status $?"
    "$@" test -s "$path" || fail "the file is not there"
}

units_pool() {
    can_limit "$pool_unit"
    local backing=$1 filler top
    # What can't be done without limits is no matter here; what can't be done with them is a failure.
    serve --backing "$backing" --size 2M
    stop_server
    # In directories that the server makes: others have to find the way.
    top=$pool pool=$pool/run/pool
    export PAGECREW_POOL_SOCKET=$pool/socket
    at_exit "clear_pool; rm -rf $top"
    listen_as_manager
    python3 "$limits_of_unit" "$pool_unit" --kill -- "$pagecrew" --directory "$pool" --backing "$backing" --size 64M --file 32M \
        --cpu 100 --floor 0 --unused 1s --quota 1G --socket-mode 666 --metrics 127.0.0.1:0 2>"$work/server.log" &
    server=$!
    wait_for_server none
    wait_for_ready "64 << 20"
    has_limits "$pool_unit" "$server"
    filler=$(pgrep -P "$server") || fail "there is no filler"
    has_limits "$pool_unit" "$filler"
    [ "$(cat "/proc/$filler/oom_score_adj")" = 1000 ] || fail "the filler is not the first choice of the kernel"
    taken_and_back "${somebody[@]}"
    taken_and_back env
    nothing_taken 30
    scrape "$work/server.log" pagecrew_pool_ready_bytes
    "$pagecrew" pool resize --size 96M >/dev/null || fail "resize: status $?"
    wait_for_ready "96 << 20"
    # What the manager shows is how the pool stands, and not what was said last. Looked at before the reload, which makes it 64 MiB again: what
    # does not last until the next look is not said.
    eventually grep -q '^STATUS=full, 96 MiB of 96 MiB ready, 0 B taken$' "$work/notified" || fail "the manager has heard: $(cat "$work/notified")"
    kill -HUP "$server"
    eventually grep -q 'settings were read again' "$work/server.log" || fail "no reload: $(cat "$work/server.log")"
    wait_for_ready "64 << 20"
    stop_server
    nothing_refused "$work/server.log"
    [ "$(grep -Ec '^(READY|STOPPING)=1' "$work/notified")" -ge 2 ] || fail "the manager has heard: $(cat "$work/notified")"
    pool=$top
    echo "$backing"
}

# scrape LOG NAME: asks a service for its metrics at the address that it has said, and finds one.
scrape() {
    local address
    address=$(grep -o '127.0.0.1:[0-9]*' "$1" | head -n 1)
    python3 -c '
import sys, urllib.request
text = urllib.request.urlopen(f"http://{sys.argv[1]}/metrics", timeout=20).read().decode()
sys.exit(sys.argv[2] not in text)' "$address" "$2" || fail "no $2 at $address"
}

# watch_as_unit OPTION...: a watch with the unit's limits. Sets `watch`.
watch_as_unit() {
    python3 "$limits_of_unit" "$trim_unit" --kill -- "$pagecrew" "$@" >"$work/out" 2>"$work/log" &
    watch=$!
}

end_unit_watch() {
    kill "$watch"
    wait "$watch" || fail "the watch ended with status $?: $(cat "$work/log")"
    nothing_refused "$work/log"
}

# kib_huge PROCESS
kib_huge() {
    awk '/^AnonHugePages:/ { print $2 }' "/proc/$1/smaps_rollup"
}

# has_trimmed PROCESS: of its 64 MiB, at least 56 MiB have gone. The watch takes that from the page map; that there are fewer huge pages is
# the kernel's word. Not that there are none: khugepaged may have come by in between, and makes up to 8 of them huge again.
has_trimmed() {
    [ "$(kib_huge "$1")" -lt 65536 ] && awk '/ in all$/ { mib = $(NF - 3) } END { exit !(mib >= 56) }' "$work/log"
}

# Another user's process is trimmed, and one that he wants left alone is not. He has said so where only he can look.
units_trim() {
    can_trim
    can_limit "$trim_unit"
    local trimmed protected directory=/dev/shm/pagecrew-65534 name
    at_exit "kill \$(jobs -p) 2>/dev/null || true"
    for name in trimmed protected; do
        "${somebody[@]}" "$programs/sparse" 64 1 stay >"$work/$name" &
        printf -v "$name" %s $!
        eventually grep -q there "$work/$name" || fail "no process to trim"
    done
    [ "$(kib_huge "$trimmed")" -ge 65536 ] || skip "there are no huge pages to be had"
    [ -d "$directory" ] || at_exit "kill \$(jobs -p) 2>/dev/null || true; rm -rf $directory"
    "${somebody[@]}" mkdir -p -m 700 "$directory" "$directory/no-trim"
    "${somebody[@]}" touch "$directory/no-trim/$protected"
    watch_as_unit --user nobody --interval 200ms --cpu 50 --metrics 127.0.0.1:0
    eventually has_trimmed "$trimmed" || fail "$(kib_huge "$trimmed") KiB in huge pages: $(cat "$work/log")"
    sleep 1
    [ "$(kib_huge "$protected")" -ge 65536 ] || fail "what was to be left alone was trimmed"
    has_limits "$trim_unit" "$watch"
    scrape "$work/log" pagecrew_trim_gone_bytes
    end_unit_watch
    rm -f "$directory/no-trim/$protected"
    for name in "$trimmed" "$protected"; do
        kill -USR1 "$name"
        wait "$name" || fail "the data is not what it was: status $?"
    done
    grep -m 1 -o '[0-9.]* [MK]iB gone' "$work/log"
}

# A group is held, and let go at the end of the watch, whatever that is.
units_hold() {
    limited_group
    can_limit "$trim_unit"
    local before signal guard
    before=$(control_text)
    for signal in TERM KILL; do
        watch_as_unit --cgroup "$group" --interval 1s
        eventually control_is_not "$before" || fail "the group is not held: $(cat "$work/log")"
        guard=$(pgrep -P "$watch") || fail "there is no guard"
        has_limits "$trim_unit" "$guard"
        if grep -q '^Max locked memory *unlimited' "/proc/$guard/limits"; then
            grep -q '^VmLck:.* 0 kB' "/proc/$guard/status" && fail "the guard's memory is not locked"
        fi
        sparse 2 || fail "status $?"
        if [ "$signal" = TERM ]; then
            # systemd sends it to the guard as well, and the guard takes no notice.
            kill "$guard"
            end_unit_watch
        else
            kill -KILL "$watch"
            wait "$watch" 2>/dev/null || true
        fi
        eventually control_is "$before" || fail "the group's control is $(control_text) after SIG$signal, and was $before"
        nothing_refused "$work/log"
    done
    echo "$control"
}

# The limits are there: what is tried under them fails as it should, and what may be done goes.
units_refused() {
    can_limit "$pool_unit"
    can_limit "$trim_unit"
    local unit
    for unit in "$pool_unit" "$trim_unit"; do
        mkdir -p "$work/mount"
        python3 "$limits_of_unit" "$unit" --instead -- "$interpreter" - "$(basename "$unit" .service)" "$work/mount" <<'PYTHON' || fail "$unit"
import ctypes, errno, os, resource, sys

unit, directory = sys.argv[1].removeprefix("pagecrew-"), sys.argv[2].encode()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_long
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
word = ctypes.create_string_buffer(8)


def result(call, *arguments):
    ctypes.set_errno(0)
    return 0 if call(*arguments) >= 0 else ctypes.get_errno()


def refused(call, *arguments, error=errno.EPERM):
    got = result(call, *arguments)
    assert got == error, (unit, call.__name__, arguments, errno.errorcode.get(got, got))


# Calls that are in neither list, or in one of them.
refused(libc.ptrace, 0, 0, None, None)
refused(libc.process_vm_writev, os.getpid(), None, 0, None, 0, 0)
refused(libc.chroot, b"/")
refused(libc.setuid, 0)
refused(libc.memfd_create, b"x", 0)
refused(libc.swapoff, b"/nowhere")
refused(libc.init_module, None, 0, b"")
mounted = result(libc.mount, b"x", directory, b"tmpfs", 0, None)
assert mounted == (0 if unit == "pool" else errno.EPERM), mounted
refused(libc.umount2, directory, 2) if unit == "trim" else libc.umount2(directory, 2)
lists = {"mlockall": (libc.mlockall, 0), "process_vm_readv": (libc.process_vm_readv, os.getpid(), None, 0, None, 0, 0)}
for name, call in lists.items():
    got = result(*call)
    assert (got == errno.EPERM) == (unit == "pool"), (unit, name, got)

# Arguments that are not allowed.
refused(libc.socket, 17, 3, 0, error=errno.EAFNOSUPPORT)
refused(libc.socket, 16, 3, 0, error=errno.EAFNOSUPPORT)
assert [result(libc.socket, family, 1, 0) for family in (1, 2, 10)][:2] == [0, 0]
for flag in (0x80, 0x20000, 0x4000000, 0x10000000, 0x40000000):
    refused(libc.unshare, flag)
refused(libc.setns, 0, 0)
refused(libc.mmap, None, 4096, 6, 0x22, -1, 0)
assert result(libc.mmap, None, 4096, 3, 0x22, -1, 0) == 0
executable = libc.mmap(None, 4096, 3, 0x22, -1, 0)
refused(libc.mprotect, ctypes.c_void_p(executable), 4096, 5)
refused(libc.personality, 8)
refused(libc.chmod, directory, 0o4755)
refused(libc.sched_setscheduler, 0, 1, word)

# Rights that root would have.
refused(libc.sethostname, b"x", 1)
if unit == "trim":
    refused(libc.chown, directory, 65534, 65534)
    for path in ("/etc/pagecrew-test", "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/sys/vm/overcommit_memory"):
        got = result(libc.open, path.encode(), os.O_WRONLY | os.O_CREAT, 0o600)
        assert got == errno.EROFS, (path, got)
else:
    # From the idle class to the ordinary one, where the limit could be set.
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        print("back from the idle class")
    refused(libc.setpriority, 0, 0, -1)
PYTHON
    done
    echo "pool: $(python3 "$limits_of_unit" "$pool_unit" --bounding), trim: $(python3 "$limits_of_unit" "$trim_unit" --bounding)"
}

units_reclaim() {
    can_reclaim
    can_limit "$reclaim_unit"
    local service guard guards mounted=/sys/kernel/tracing
    at_exit "kill \$(jobs -p) 2>/dev/null || true"
    # systemd mounts it.
    if ! mountpoint -q "$mounted"; then
        mount -t tracefs tracefs "$mounted" || skip "no file system of tracepoints can be mounted"
        at_exit "kill \$(jobs -p) 2>/dev/null || true; umount --lazy $mounted"
    fi
    python3 "$limits_of_unit" "$reclaim_unit" --kill -- "$pagecrew" --metrics 127.0.0.1:0 >"$work/out" 2>"$work/log" &
    service=$!
    eventually grep -q 'waiting for demand' "$work/log" || fail "$(cat "$work/log")"
    # One for the setting, one for the kernel's threads.
    mapfile -t guards < <(pgrep -P "$service")
    [ "${#guards[@]}" -eq 2 ] || fail "guards: ${guards[*]}"
    has_limits "$reclaim_unit" "$service" 21
    for guard in "${guards[@]}"; do has_limits "$reclaim_unit" "$guard" 21; done
    scrape "$work/log" pagecrew_reclaim_factor
    kill -HUP "$service"
    eventually grep -q 'settings were read again' "$work/log" || fail "no reload: $(cat "$work/log")"
    # systemd sends it to the guards as well, and they take no notice.
    kill "${guards[@]}" "$service"
    wait "$service" || fail "status $?: $(cat "$work/log")"
    nothing_refused "$work/log"
}

# All of them together: nothing that one needs is refused, and each has the rights of its own unit.
units_serve() {
    can_reclaim
    serve_place
    can_limit "$serve_unit"
    local name given_up factor_before services=(pool reclaim) mounted=/sys/kernel/tracing
    factor_before=$(cat "$factor")
    # systemd mounts it.
    if ! mountpoint -q "$mounted"; then
        mount -t tracefs tracefs "$mounted" || skip "no file system of tracepoints can be mounted"
        at_exit "clear_serve; umount --lazy $mounted"
    fi
    if [ "$(trim_works)" = yes ]; then services=(pool trim reclaim); fi
    serve_settings 64M "${services[@]}"
    sed -i "s/^cpu.*/cpu = 100\nunused = \"1s\"\nquota = \"1G\"\nsocket-mode = \"666\"\nfiles = [\"32M\"]/" "$settings"
    listen_as_manager
    python3 "$limits_of_unit" "$serve_unit" --kill -- "$pagecrew" --config "$settings" --directory "$run" --metrics 127.0.0.1:0 2>"$work/log" &
    service=$!
    eventually heard READY=1 || fail "not ready: $(cat "$work/log")"
    wait_for_ready "64 << 20"
    has_limits "$serve_unit" "$service"
    for name in "${services[@]}"; do
        given_up=
        if [ "$name" = reclaim ]; then given_up=21; fi
        has_limits "$root/contrib/pagecrew-$name.service" "$(child "$name")" "$given_up"
    done
    serve_metrics 'all(up(name) == 1 for name in ("pool", "reclaim"))' || fail "metrics"
    backing=tmpfs
    taken_and_back "${somebody[@]}"
    nothing_taken 30
    serve_settings 96M "${services[@]}"
    kill -HUP "$service"
    wait_for_ready "96 << 20"
    for name in "${services[@]}"; do
        kill -KILL "$(child "$name")"
        eventually serve_metrics "up('$name') == 0 or m('pagecrew_serve_restarts_total{service=\"$name\"}') > 0" || fail "$name was not killed"
        eventually serve_metrics "up('$name') == 1" || fail "$name does not come back: $(cat "$work/log")"
    done
    end_serve 2000
    nothing_refused "$work/log"
    nothing_is_left
    echo "${services[*]}: $(python3 "$limits_of_unit" "$serve_unit" --bounding)"
}

# What systemd itself says: of the files, and of how much the services may do (0: nothing, 10: everything; the most is in tenths).
units_verify() {
    needs systemd-analyze
    local unit most copy
    # The groups of calls are no larger here than systemd's.
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$root/tests/real python3 - <<'PYTHON' || fail "the groups of calls are not systemd's"
import limits_of_unit, subprocess

for group, calls in limits_of_unit.GROUPS.items():
    listed = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True).stdout.split()
    more = set(calls.split()) - set(listed)
    assert listed and not more, (group, more)
PYTHON
    if ! systemd-analyze security --help 2>/dev/null | grep -q -e --offline; then skip "this systemd-analyze has no --offline"; fi
    for unit in "$pool_unit 45" "$trim_unit 26" "$reclaim_unit 30" "$serve_unit 52"; do
        most=${unit##* } unit=${unit% *}
        copy=$work/$(basename "$unit")
        # The command is not installed here.
        sed "s|^ExecStart=[^ ]*|ExecStart=$pagecrew|" "$unit" >"$copy"
        systemd-analyze verify "$copy" >"$work/verify" 2>&1 || fail "$(cat "$work/verify")"
        [ ! -s "$work/verify" ] || fail "$(cat "$work/verify")"
        systemd-analyze security --no-pager --offline=true --threshold="$most" "$copy" >"$work/security" 2>&1 ||
            fail "exposed to more than $most: $(cat "$work/security")"
        tail -n 1 "$work/security"
    done
}

add units/pool 300 units_pool tmpfs
add units/pool/hugetlbfs 300 with_huge_pages 100 units_pool hugetlbfs
add units/trim 60 units_trim
add units/trim/hold 60 units_hold
add units/reclaim 60 units_reclaim
add units/serve 120 units_serve
add units/refused 30 units_refused
add units/verify 60 units_verify
