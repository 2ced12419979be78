# shellcheck shell=bash disable=SC2154,SC2034
# All services under one supervisor: they are there, come back when they are killed, take over settings, and leave nothing. Sourced by
# scripts/test-real.sh.

# What is left when a test ends: nothing.
clear_serve() {
    local process
    for process in $(jobs -p); do
        kill "$process" 2>/dev/null || true
        timeout 20 tail --sleep-interval 0.1 --pid "$process" -f /dev/null || kill -KILL "$process" || true
    done
    if [ -n "${pool:-}" ]; then
        while mountpoint -q "$pool/mem"; do umount --lazy "$pool/mem"; done
        rm -rf "$pool"
    fi
    if [ -n "${group:-}" ]; then remove_group "$group"; fi
}

# serve_place: directories of its own, as $pool and $run, and a file of settings, $settings.
serve_place() {
    if [ "$(id -u)" -ne 0 ]; then skip "takes root"; fi
    needs python3 pgrep
    interpreter=python3
    pool=$(mktemp -d)
    chmod 755 "$pool"
    export PAGECREW_POOL_SOCKET=$pool/socket
    run=$pool/run settings=$work/settings
    at_exit clear_serve
}

# serve_settings POOL-SIZE SERVICE...
serve_settings() {
    local size=$1 names
    shift
    names=$(printf '"%s", ' "$@")
    cat >"$settings" <<SETTINGS
[serve]
services = [${names%, }]
[pool]
size = "$size"
directory = "$pool"
cpu = 100
floor = "1M"
[trim]
names = ["no-such-program"]
groups = [${group:+"\"$group\""}]
interval = "1s"
SETTINGS
}

# start_serve: in the background. Sets `service`.
start_serve() {
    : >"$work/notified"
    # Those of a killed one may still write to theirs.
    rm -f "$work/log"
    "$pagecrew" serve --config "$settings" --directory "$run" --metrics 127.0.0.1:0 >"$work/out" 2>"$work/log" &
    service=$!
    eventually heard READY=1 || fail "not ready: $(cat "$work/log" "$work/notified")"
}

# heard TEXT: whether the service manager has.
heard() {
    grep -q "^$1" "$work/notified"
}

# child NAME: the process of a service.
child() {
    local words=$1
    case $1 in
    pool) words='pool serve' ;;
    trim) words='trim --watch' ;;
    metrics) words='serve-metrics' ;;
    esac
    pgrep -P "$service" -f "^pagecrew $words"
}

# another_child NAME PROCESS: whether a service has another process than this one.
another_child() {
    local now
    now=$(child "$1") && [ "$now" != "$2" ]
}

# serve_metrics EXPRESSION: of the joined metrics, where m(SAMPLE) is the value of a sample, or None, and `took` how long it took.
serve_metrics() {
    python3 - "$work/log" "$1" <<'PYTHON'
import re, sys, time, urllib.request

address = re.search(r"http://127\.0\.0\.1:\d+/metrics", open(sys.argv[1], encoding="utf-8").read())[0]
begin = time.monotonic()
text = urllib.request.urlopen(address, timeout=20).read().decode()
took = time.monotonic() - begin
assert text.endswith("# EOF\n") and text.count("# EOF\n") == 1, text
samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
families = re.findall("^# TYPE ([^ ]+)", text, re.MULTILINE)
assert len(families) == len(set(families)), families
m = lambda name: float(samples[name]) if name in samples else None
up = lambda name: m(f'pagecrew_serve_up{{service="{name}"}}')
sys.exit(not eval(f"({sys.argv[2]})"))
PYTHON
}

# The processes of the supervisor and its services, guards and fillers among them: all have the settings or the directory in their command, or
# are named as guards are.
left_over() {
    pgrep -f -- "$pool" || pgrep -x pagecrew/guard
}

# runs PROCESS: whether it does. One that has ended may wait for a process that never asks.
runs() {
    grep -s '^State:' "/proc/$1/status" | grep -qv 'Z (zombie)'
}

nothing_left_over() {
    ! left_over >/dev/null
}

# nothing_is_left: no process, no mount, no setting.
nothing_is_left() {
    eventually nothing_left_over || fail "processes are left: $(left_over)"
    if mountpoint -q "$pool/mem"; then fail "the memory of the pool is still mounted"; fi
    if [ -e "$run" ]; then fail "left: $(ls -la "$run")"; fi
    factor_is "$factor_before" || fail "the setting is $(cat "$factor"), and was $factor_before"
    [ -z "${group:-}" ] || control_is "$control_before" || fail "the group's control is $(control_text), and was $control_before"
}

# end_serve MILLISECONDS: tells it to end, which may take no longer.
end_serve() {
    local begin took
    begin=$(date +%s%N)
    kill "$service"
    wait "$service" || fail "status $?: $(cat "$work/log")"
    took=$((($(date +%s%N) - begin) / 1000000))
    [ "$took" -le "$(($1 * ${patience:-1}))" ] || fail "it took $took ms to end: $(cat "$work/log")"
    heard STOPPING=1 || fail "the manager has heard: $(cat "$work/notified")"
    ended_after=$took
}

serve_whole() {
    limited_group
    can_reclaim
    serve_place
    local name before used control_before factor_before bounding has left again
    factor_before=$(cat "$factor") control_before=$(control_text)
    listen_as_manager
    serve_settings 64M pool trim reclaim
    start_serve
    wait_for_ready "64 << 20"
    eventually control_is_not "$control_before" || fail "the group is not held: $(cat "$work/log")"

    # Each has the rights of its own unit, and whoever is beside the socket of the metrics has none.
    for name in pool trim reclaim; do
        bounding=$(python3 "$limits_of_unit" "$root/contrib/pagecrew-$name.service" --bounding) has=$(child "$name")
        has=$(awk '/^Cap(Prm|Eff):/ { print $2 }' "/proc/$has/task"/*/status | sort -u) left=$bounding
        # SYS_ADMIN it gives up as soon as it listens.
        if [ "$name" = reclaim ]; then left=$(printf '%016x' $((0x$bounding & ~(1 << 21)))); fi
        [ "$has" = "$left" ] && grep -q "^CapBnd:.*$bounding" "/proc/$(child "$name")/status" || fail "$name: $has instead of $left"
    done
    [ "$(awk '/^Cap/ { print $2 }' "/proc/$(child metrics)/status" | sort -u)" = 0000000000000000 ] || fail "the gateway has rights"
    for name in pool trim reclaim metrics; do
        grep -q '^NoNewPrivs:.*1' "/proc/$(child $name)/status" || fail "$name could get more rights"
    done

    # All metrics at one place, and those of each service at its own.
    serve_metrics 'up("pool") == up("trim") == up("reclaim") == 1 and m("pagecrew_pool_size_bytes") == 64 << 20
        and m("pagecrew_trim_members") is not None and m("pagecrew_reclaim_factor") is not None' || fail "metrics"
    [ "$(stat --format %a "$run")" = 700 ] || fail "$(ls -ld "$run")"
    for name in pool trim reclaim serve; do [ -S "$run/$name.metrics" ] || fail "$(ls "$run")"; done

    # A service that is killed comes back, one that hangs holds up nobody.
    for name in reclaim pool trim metrics; do
        before=$(child $name)
        kill -KILL "$before"
        eventually another_child $name "$before" || fail "$name does not come back: $(cat "$work/log")"
        eventually serve_metrics 'up("pool") == up("trim") == up("reclaim") == 1' || fail "not served again after a kill of $name: $(cat "$work/log")"
    done
    serve_metrics 'm("pagecrew_serve_restarts_total{service=\"pool\"}") >= 1' || fail "no restart was counted"
    eventually control_is_not "$control_before" || fail "the group is not held again: $(cat "$work/log")"
    kill -STOP "$(child trim)"
    serve_metrics "up('trim') == 0 and up('pool') == 1 and took < 1 * ${patience:-1}" || fail "metrics beside a service that hangs"
    kill -CONT "$(child trim)"
    eventually serve_metrics 'up("trim") == 1' || fail "trim is not served again"

    # A wrong file changes nothing.
    before=$(pgrep -P "$service" | sort | xargs)
    sed -i 's/^size.*/size = "lots"/' "$settings"
    kill -HUP "$service"
    eventually grep -q 'settings stay as they are: .*line 4: pool.size' "$work/log" || fail "no reason: $(cat "$work/log")"
    [ "$(pgrep -P "$service" | sort | xargs)" = "$before" ] || fail "processes have changed"
    serve_metrics 'up("pool") == up("trim") == up("reclaim") == 1' || fail "metrics after a wrong reload"

    # A right one reaches all of them; a service that is taken out ends, one that is added starts.
    : >"$work/notified"
    serve_settings 96M pool reclaim
    before=$(child pool)
    again=$(grep -c 'is served again' "$work/log")
    kill -HUP "$service"
    wait_for_ready "96 << 20"
    eventually control_is "$control_before" || fail "trim has left the group held"
    eventually heard READY=1 || fail "the manager has heard: $(cat "$work/notified")"
    heard RELOADING=1 || fail "the manager has heard: $(cat "$work/notified")"
    [ "$(child pool)" = "$before" ] || fail "the pool was started anew"
    grep -q 'read again; from now on: reclaim, pool$' "$work/log" || fail "$(cat "$work/log")"
    [ "$(grep -c 'is served again' "$work/log")" = "$again" ] || fail "what has only read its settings again is called served again: $(cat "$work/log")"
    if child trim; then fail "trim still runs"; fi
    serve_metrics 'up("trim") is None and up("pool") == 1' || fail "metrics without trim"
    serve_settings 96M pool trim reclaim
    kill -HUP "$service"
    eventually control_is_not "$control_before" || fail "trim does not begin: $(cat "$work/log")"

    one_line 1 "$pagecrew" serve --config "$settings" --directory "$run"
    grep -q 'runs already' "$work/error" || fail "$(cat "$work/error")"

    # Nothing happens: nothing is done.
    used=$(ran_us "$service" "$(child metrics)")
    sleep 5
    used=$(($(ran_us "$service" "$(child metrics)") - used))
    [ "$used" -lt 10000 ] || fail "$used us of CPU in 5 s"

    end_serve 1000
    nothing_is_left
    echo "$control, ended after $ended_after ms, $used us of CPU in 5 s"
}

# A supervisor that is killed takes its services with it, and the next one finds a clean machine at once.
serve_killed() {
    can_reclaim
    serve_place
    if [ "$(trim_works)" = yes ]; then limited_group && at_exit clear_serve; fi
    local name control_before='' factor_before round killed services=(pool reclaim)
    factor_before=$(cat "$factor")
    if [ -n "${group:-}" ]; then control_before=$(control_text) services=(pool trim reclaim); fi
    listen_as_manager
    serve_settings 64M "${services[@]}"
    for round in 1 2 3; do
        start_serve
        eventually serve_metrics 'up("pool") == up("reclaim") == 1' || fail "round $round: $(cat "$work/log")"
        [ -z "${group:-}" ] || eventually control_is_not "$control_before" || fail "the group is not held: $(cat "$work/log")"
        killed=$(pgrep -P "$service")
        kill -KILL "$service"
        wait "$service" 2>/dev/null || true
        if [ "$round" = 1 ]; then
            eventually nothing_left_over || fail "round $round: left: $(left_over)"
            for name in $killed; do if runs "$name"; then fail "process $name is left: $(cat "/proc/$name/status")"; fi; done
            if mountpoint -q "$pool/mem"; then fail "the memory of the pool is still mounted"; fi
            factor_is "$factor_before" || fail "the setting is $(cat "$factor")"
            [ -z "${group:-}" ] || control_is "$control_before" || fail "the group is still held"
        fi
    done
    # The last one was killed a moment ago.
    start_serve
    serve_metrics 'up("pool") == up("reclaim") == 1' || fail "the next one does not serve: $(cat "$work/log")"
    if grep -Ev 'metrics at|are to be kept ready|are ready|waiting for demand|served: ' "$work/log"; then fail "the next one had trouble"; fi
    end_serve 1000
    nothing_is_left
    echo "${services[*]}"
}

trim_works() {
    (can_trim >/dev/null && echo yes) || echo no
}

# What can't work here is left out, and the others go on. What is wrong is refused before anything is there.
serve_left_out() {
    can_reclaim
    serve_place
    local factor_before
    factor_before=$(cat "$factor")
    listen_as_manager
    serve_settings 64M pol
    one_line 2 "$pagecrew" serve --config "$settings" --directory "$run"
    grep -q "line 2: serve.services: there is no service 'pol'" "$work/error" || fail "$(cat "$work/error")"
    serve_settings 63M pool reclaim
    one_line 2 "$pagecrew" serve --config "$settings" --directory "$run"
    grep -q "line 4: pool.size: '63M' is not a multiple" "$work/error" || fail "$(cat "$work/error")"
    if [ -e "$run" ]; then fail "something was begun"; fi
    # Reserved huge pages that there are none of.
    serve_settings 64M pool reclaim
    sed -i 's/^cpu.*/backing = "hugetlbfs"/' "$settings"
    if "$pagecrew" pool serve --config "$settings" 2>"$work/error"; then fail "there is a pool"; elif [ $? -ne 3 ]; then skip "huge pages are reserved here"; fi
    start_serve
    grep -q 'pool is not started again before the settings are read again (SIGHUP): it has ended with status 3' "$work/log" || fail "$(cat "$work/log")"
    heard 'STATUS=.*pool: off until the next reload, it has ended with status 3' || fail "the manager has heard: $(cat "$work/notified")"
    serve_metrics 'up("reclaim") == 1 and up("pool") == 0 and m("pagecrew_serve_given_up{service=\"pool\"}") == 1' || fail "metrics"
    serve_settings 64M pool reclaim
    kill -HUP "$service"
    wait_for_ready "64 << 20"
    end_serve 1000
    nothing_is_left
    # Where nothing is left, there is nothing to run for.
    serve_settings 64M pool
    sed -i 's/^cpu.*/backing = "hugetlbfs"/' "$settings"
    local status=0
    "$pagecrew" serve --config "$settings" --directory "$run" 2>"$work/error" || status=$?
    [ "$status" -eq 3 ] || fail "status $status: $(cat "$work/error")"
    tail -n 1 "$work/error" | grep -q 'no service can be run here (pool: it has ended with status 3)' || fail "$(cat "$work/error")"
    # As JSON, and with a reader that goes away: it ends as any service does.
    serve_settings 64M reclaim
    status=0
    timeout 20 "$pagecrew" serve --json --config "$settings" --directory "$run" 2>"$work/error" | head -n 1 >"$work/out" || status=$?
    [ "$status" -eq 0 ] || fail "status $status: $(cat "$work/error")"
    grep -q '"event":"starting","pid":[0-9]*,"service":"reclaim"' "$work/out" || fail "$(cat "$work/out")"
    nothing_is_left
    one_line 3 setpriv --reuid 65534 --regid 65534 --clear-groups "$pagecrew" serve
    grep -q 'takes root' "$work/error" || fail "$(cat "$work/error")"
}

# A pool counts what reclaim keeps free ahead as available, for as long as reclaim says so, and no longer.
serve_ahead() {
    local file=/dev/shm/pagecrew-ahead
    needs python3
    if pgrep -f '^pagecrew reclaim|/pagecrew reclaim' >/dev/null || [ -e "$file" ]; then skip "reclaim runs on this machine"; fi
    serve --size 2M --floor 1M
    at_exit "rm -f $file; clear_pool"
    # Twice the distance lies below the watermark high; the rest is what the kernel leaves out of caches.
    python3 - "$file" "$pagecrew" <<'PYTHON' || fail "status $?"
import json, os, subprocess, sys, time

file, pagecrew = sys.argv[1:]
MIB, GIB = 1 << 20, 1 << 30
memory = {words[0]: int(words[1]) << 10 for words in map(str.split, open("/proc/meminfo"))}
total = memory["MemTotal:"]
# No more can be available than there is, so it is to be far less than what is in use.
gap = min(512 * MIB, total // 10, (total - memory["MemAvailable:"]) // 4)


def line(age, text_of_sum=None):
    text = f"pagecrew ahead 1 {time.clock_gettime_ns(time.CLOCK_MONOTONIC) - age} {60 * MIB} 0 {gap}"
    total = 0xCBF29CE484222325
    for byte in text.encode():
        total = (total ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{text} {text_of_sum or format(total, '016x')}\n"


def more(text, mode=0o644):
    """How much more is available for the pool with that text in the file than without."""
    with open(file, "w") as out:
        os.fchmod(out.fileno(), mode)
        out.write(text)
    available = lambda: json.loads(subprocess.check_output([pagecrew, "pool", "status", "--json"]))["available_bytes"]
    told = available()
    os.unlink(file)
    return told - available()


# Others take and give back meanwhile, so it is tried some times.
seen = max(more(line(0)) for _ in range(5))
assert seen >= gap, seen
for void in [line(2 * 10**9), line(0, "0" * 16), "", "x" * 1000]:
    assert min(more(void) for _ in range(5)) < gap // 2, void
assert min(more(line(0), 0o666) for _ in range(5)) < gap // 2
print(f"{seen >> 20} MiB for a distance of {gap >> 20}")
PYTHON
    stop_server
}

add serve/whole 180 serve_whole
add serve/killed 120 serve_killed
add serve/left-out 60 serve_left_out
add serve/ahead 60 serve_ahead
