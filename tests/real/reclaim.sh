# shellcheck shell=bash disable=SC2154,SC2034
# Memory that is free before it is taken: what becomes of the kernel's setting, and who may change it. Sourced by scripts/test-real.sh.

factor=/proc/sys/vm/watermark_scale_factor

factor_is() {
    [ "$(cat "$factor")" = "$1" ]
}

# How nice the kernel's reclaim threads are.
urgency() {
    local process
    for process in $(pgrep -x 'kswapd[0-9]+'); do awk '{ print $19 }' "/proc/$process/stat"; done | sort | uniq | tr '\n' ' '
}

urgency_is() {
    [ "$(urgency)" = "$1" ]
}

# Skips unless it can be done here.
can_reclaim() {
    if [ "$(id -u)" -ne 0 ] || [ ! -w "$factor" ]; then skip "takes root, and $factor"; fi
    local status=0
    timeout 0.3 "$pagecrew" reclaim >"$work/out" 2>&1 || status=$?
    [ "$status" -ne 3 ] || skip "$(tail -n 1 "$work/out")"
}

# can_have_demand: the same, for tests that read a disk. An emulated one is slow, and what a kernel keeps free by itself may be enough for it: a
# quarter of vm.min_free_kbytes, whatever the factor is. With huge pages that is 17 MiB of Debian 12's 4 GiB.
can_have_demand() {
    can_reclaim
    if [ -n "${guest:-}" ]; then
        change "$factor" 1
        change /proc/sys/vm/min_free_kbytes 8192
    fi
}

# start_reclaim OPTION...: in the background. Sets `service`.
start_reclaim() {
    "$pagecrew" reclaim "$@" >"$work/said" 2>"$work/log" &
    service=$!
    eventually grep -q -e 'waiting for demand' -e '"ready"' "$work/log" "$work/said" || fail "$(cat "$work/log")"
}

# one_line STATUS COMMAND...: ends with that status and says why in one line.
one_line() {
    local expected=$1 status=0
    shift
    "$@" >"$work/out" 2>"$work/error" || status=$?
    [ "$status" -eq "$expected" ] || fail "$*: status $status: $(cat "$work/error")"
    [ "$(wc -l <"$work/error")" -eq 1 ] || fail "$*: $(cat "$work/error")"
}

# While there is no demand it changes nothing, and costs nothing.
reclaim_rest() {
    can_reclaim
    at_exit "kill \$(jobs -p) 2>/dev/null || true"
    local before used resident
    before=$(cat "$factor")
    start_reclaim
    one_line 1 "$pagecrew" reclaim
    grep -q 'runs already' "$work/error" || fail "$(cat "$work/error")"
    one_line 2 "$pagecrew" reclaim --most 50%
    one_line 3 setpriv --reuid 65534 --regid 65534 --clear-groups "$pagecrew" reclaim
    kill -HUP "$service"
    eventually grep -q 'settings were read again' "$work/log" || fail "no reload: $(cat "$work/log")"
    used=$(ran_us "$service")
    sleep 10
    used=$(($(ran_us "$service") - used))
    # 0.1 % of a CPU, unless somebody else has memory reclaimed.
    [ "$used" -lt 10000 ] || fail "$used us of CPU in 10 s"
    resident=$(awk '/^VmRSS:/ { print $2 }' "/proc/$service/status")
    [ "$resident" -lt 16384 ] || fail "$resident KiB resident"
    factor_is "$before" || fail "the setting is $(cat "$factor")"
    kill "$service"
    wait "$service" || fail "status $?: $(cat "$work/log")"
    factor_is "$before" || fail "the setting is $(cat "$factor")"
    echo "$used us of CPU in 10 s, $resident KiB"
}

# Ends what runs still. Whoever keeps the disk takes it away, once nobody else has its input open.
end_jobs() {
    exec 8>&- 9>&-
    local pid
    for pid in $(jobs -p); do
        [ "$pid" = "$keeper" ] || kill -9 "$pid" 2>/dev/null || true
    done
    wait
}

# said_something FILE: waits until somebody has written to it.
said_something() {
    local _
    for _ in $(seq 600); do
        if [ -s "$1" ]; then return; fi
        sleep 0.5
    done
    fail "nothing was said in five minutes"
}

# A disk's files are read while little memory is left: more is kept free, and the setting is as it was in the end, whatever the end is. Takes
# nearly all of the machine's memory, so it runs in guests, and elsewhere only where it is asked for.
reclaim_demand() {
    can_have_demand
    local before nice round service keeper _
    before=$(cat "$factor")
    change "$factor" "$before"
    nice=$(urgency)
    keeper='' service=''
    at_exit end_jobs
    little_memory
    for round in TERM KILL KILL KILL KILL HUP; do
        start_reclaim --json
        read_much 4 >/dev/null &
        local readers=$!
        for _ in $(seq 600); do
            if grep -q '"begun"' "$work/said"; then break; fi
            sleep 0.05
        done
        if ! grep -q '"begun"' "$work/said"; then
            wait "$readers" || true
            fail "nothing was kept free: $(cat "$work/said" "$work/log")"
        fi
        if [ "$round" = HUP ]; then
            # What somebody else sets stays.
            echo 33 >"$factor"
            wait "$readers" || fail "readers: status $?"
            kill "$service"
            wait "$service" || fail "status $?: $(cat "$work/log")"
            factor_is 33 || fail "the setting is $(cat "$factor"), not what was set meanwhile"
            change "$factor" "$before"
            eventually urgency_is "$nice" || fail "the kernel's threads are as nice as $(urgency)"
        else
            factor_is "$before" && fail "the setting is as it was"
            urgency_is '-20 ' || [ "$(id -u)" -ne 0 ] || fail "the kernel's threads are as nice as $(urgency)"
            kill -s "$round" "$service"
            wait "$service" || [ "$round" = KILL ] || fail "status $?: $(cat "$work/log")"
            eventually factor_is "$before" || fail "after SIG$round the setting is $(cat "$factor"): $(cat "$work/said")"
            eventually urgency_is "$nice" || fail "after SIG$round the kernel's threads are as nice as $(urgency)"
            wait "$readers" || fail "readers: status $?"
        fi
    done
    much_memory
    grep -o '"gap_bytes":[0-9]*' "$work/said" | sort -t : -k 2 -n | tail -n 1
}

# reclaim_kills ROUNDS: killed at random moments while there is demand, before it, and while it begins. All is as it was after each.
reclaim_kills() {
    can_have_demand
    local before nice round service keeper readers changed=0 _
    before=$(cat "$factor")
    change "$factor" "$before"
    nice=$(urgency)
    keeper='' service='' readers=''
    at_exit 'kill -9 ${readers:-} 2>/dev/null || true; end_jobs'
    little_memory
    while :; do read_much 4 >/dev/null; done &
    readers=$!
    for round in $(seq "$1"); do
        "$pagecrew" reclaim --json >"$work/said" 2>"$work/log" &
        service=$!
        sleep "$((RANDOM % 2)).$((RANDOM % 10))$((RANDOM % 10))"
        factor_is "$before" || changed=$((changed + 1))
        kill -KILL "$service" 2>/dev/null || fail "round $round: it has ended: $(cat "$work/log")"
        wait "$service" || true
        eventually factor_is "$before" || fail "round $round: the setting is $(cat "$factor"), and was $before"
        eventually urgency_is "$nice" || fail "round $round: the kernel's threads are as nice as $(urgency)"
    done
    kill -9 "$readers" 2>/dev/null || true
    wait "$readers" || true
    readers=''
    # What was never changed says nothing.
    [ $((4 * changed)) -ge "$1" ] || fail "only $changed of $1 times there was something to put back"
    eventually no_guard || fail "guards are left: $(pgrep -a pagecrew/guard)"
    much_memory
    echo "$changed of $1 times the setting was changed"
}

no_guard() {
    ! pgrep -x pagecrew/guard >/dev/null
}

# little_memory [SHARE]: a sixteenth of the memory, or another part, is left to page cache, and there is a disk to read from, until `much_memory`.
# Sets `locker` and `keeper`.
little_memory() {
    local total
    total=$(($(awk '/^MemTotal/ { print $2 }' /proc/meminfo) * 1024))
    # A guest has a disk, which is read through the page cache as well.
    [ -n "${guest:-}" ] || disk_in_memory $((total / 4))
    mkfifo "$work/lock-end"
    "$pagecrew" bench-worker lock $((total / ${1:-16})) <"$work/lock-end" >"$work/lock-said" 2>&1 &
    locker=$!
    exec 9>"$work/lock-end"
    said_something "$work/lock-said"
    if grep -q . "$work/lock-said"; then skip "no memory can be locked: $(tail -n 1 "$work/lock-said")"; fi
}

# All of it is there again.
much_memory() {
    exec 9>&- 8>&-
    wait "$locker" || fail "who has locked memory: status $?"
    if [ -n "$keeper" ]; then wait "$keeper" || fail "the disk: status $?"; fi
}

# read_much READERS: so many read all there is at once.
read_much() {
    if [ -n "$keeper" ]; then
        "$pagecrew" bench-worker load "$work/disk/files" "$1" cached
        return
    fi
    local number reader running=() size
    size=$(($(blockdev --getsize64 /dev/vda) >> 20))
    for number in $(seq 0 $(($1 - 1))); do
        dd bs=1M if=/dev/vda of=/dev/null status=none "skip=$((number * size / $1))" "count=$((size / $1))" &
        running+=($!)
    done
    for reader in "${running[@]}"; do wait "$reader"; done
}

# disk_in_memory BYTES: a disk full of files below $work/disk, until descriptor 8 is closed. Sets `keeper`.
disk_in_memory() {
    mkdir "$work/disk"
    mkfifo "$work/disk-end"
    "$pagecrew" bench-worker keep-disk "$work/disk" "$1" 0 <"$work/disk-end" >"$work/disk-said" 2>&1 &
    keeper=$!
    exec 8>"$work/disk-end"
    said_something "$work/disk-said"
    # It says an empty line, or why it can't.
    if grep -q . "$work/disk-said"; then skip "no disk: $(tail -n 1 "$work/disk-said" | sed "s|$work/[^ ]*: ||")"; fi
}

# How often tasks of $group were at its limit.
times_at_limit() {
    if [ -e "$group/memory.failcnt" ]; then
        cat "$group/memory.failcnt"
    else
        awk '/^max / { print $2 }' "$group/memory.events.local"
    fi
}

# Has four tasks in $group read more than its limit has room for, and adds to the file $1 how often they were at the limit.
read_in_group() {
    local before number reader running _
    before=$(times_at_limit)
    for _ in $(seq "$((${patience:-1} > 1 ? 1 : 5))"); do
        running=()
        for number in 0 1 2 3; do
            local from=("if=$work/disk/files/$number")
            # A guest's disk, which is read through the page cache as well.
            if [ -z "$keeper" ]; then from=(if=/dev/vda "skip=$((180 * number))" count=180); fi
            (echo "$BASHPID" >"$group/cgroup.procs" && exec dd bs=1M of=/dev/null status=none "${from[@]}") &
            running+=($!)
        done
        for reader in "${running[@]}"; do
            wait "$reader" || fail "a reader: status $?"
        done
    done
    echo $(($(times_at_limit) - before)) >>"$1"
}

# All that can be set for $group.
settings_of_group() {
    local name
    for name in max high low min limit_in_bytes soft_limit_in_bytes swappiness oom_control oom.group swap.max memsw.limit_in_bytes; do
        if [ -e "$group/memory.$name" ]; then
            # What is counted there is no setting.
            echo "$name: $(grep -v -e '^under_oom' -e '^oom_kill ' "$group/memory.$name")"
        fi
    done
}

middle() {
    sort -n "$1" | sed -n "$((($(wc -l <"$1") + 1) / 2))p"
}

# Skips unless groups can be made whose memory can be reclaimed. Sets `mount`.
can_reclaim_groups() {
    mount=/sys/fs/cgroup/memory
    if [ -e "$mount/memory.limit_in_bytes" ]; then return; fi
    mount=/sys/fs/cgroup
    grep -qw memory "$mount/cgroup.controllers" 2>/dev/null || skip "no memory controller can be had here"
    echo +memory >"$mount/cgroup.subtree_control" 2>/dev/null || skip "no memory controller can be had here"
    [ -e "$mount/memory.reclaim" ] || skip "the kernel has no memory.reclaim (Linux 5.19)"
}

# The threads of service $1 that write for groups, and may never come to the end of that, have none of its files: whoever waits for those to be closed, as a
# guard does, does not wait for such a thread. (Linux 5.9)
files_of_their_own() {
    local thread found=0
    [ "$(printf '5.9\n%s\n' "$(uname -r)" | sort -V | head -n 1)" = 5.9 ] || return 0
    for thread in "/proc/$1/task/"*; do
        case $(cat "$thread/comm") in
        groups*)
            found=$((found + 1))
            [ "$(readlink "$thread/fd/2")" != "$(readlink "/proc/$1/fd/2")" ] || fail "$(cat "$thread/comm") has the files of the whole process: $(ls -l "$thread/fd")"
            ;;
        esac
    done
    [ "$found" -ge 2 ] || fail "$found threads for groups"
}

# Tasks of a group at its limit reclaim for themselves half as often at most, and whatever the end is, the group is as before.
reclaim_group() {
    can_reclaim
    local mount round before began took
    [ "$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)" -gt 2000000 ] || skip "takes 2 GB of free memory"
    can_reclaim_groups
    group=$mount/pagecrew-test-$$
    keeper='' service='' readers=''
    at_exit "end_jobs; remove_group $group"
    [ -n "${guest:-}" ] || disk_in_memory $((800 << 20))
    # A group that comes later, and gets its limit after that.
    start_reclaim --groups "$(basename "$group")"
    mkdir "$group" || skip "no control group can be made"
    if [ -e "$group/memory.max" ]; then
        echo 256M >"$group/memory.max"
    else
        echo 256M >"$group/memory.limit_in_bytes"
    fi
    before=$(settings_of_group)
    for round in TERM TERM KILL; do
        [ -n "$service" ] || start_reclaim --groups "$group"
        sleep 0.5
        read_in_group "$work/with"
        files_of_their_own "$service"
        # In the middle of a load.
        read_in_group "$work/last" &
        readers=$!
        sleep 0.1
        began=$(date +%s%N)
        kill -s "$round" "$service"
        wait "$service" || [ "$round" = KILL ] || fail "status $?: $(cat "$work/log")"
        took=$((($(date +%s%N) - began) / 1000000))
        [ "$round" = KILL ] || echo "$took" >>"$work/took"
        [ "$round" = KILL ] || grep -q 'control groups: .* reclaimed ahead' "$work/log" || fail "nothing was reclaimed: $(cat "$work/log")"
        grep -o '[0-9]* times their tasks had to' "$work/log" | cut -d ' ' -f 1 >>"$work/noticed" || true
        service=
        wait "$readers" || fail "readers: status $?"
        [ "$(settings_of_group)" = "$before" ] || fail "after SIG$round: $(settings_of_group), and before: $before"
        read_in_group "$work/without"
    done
    # Programs beside it may hold up one of them, but no write may.
    [ "$(sort -n "$work/took" | head -n 1)" -le $((100 * ${patience:-1})) ] || fail "ended after $(tr '\n' ' ' <"$work/took")ms"
    [ "$(middle "$work/without")" -ge 50 ] || skip "tasks were at the limit $(middle "$work/without") times only"
    [ $((2 * $(middle "$work/with"))) -le "$(middle "$work/without")" ] ||
        fail "at the limit $(tr '\n' ' ' <"$work/with")times, and $(tr '\n' ' ' <"$work/without")without"
    # What counts is whether it was noticed.
    [ "$(middle "$work/with")" -lt 50 ] || grep -q '[1-9]' "$work/noticed" ||
        fail "at the limit $(tr '\n' ' ' <"$work/with")times, and none was noticed"
    # Nobody is in it, and nothing of ours.
    eventually rmdir "$group" || fail "the group can't be removed"
    if [ -n "$keeper" ]; then
        exec 8>&-
        wait "$keeper" || fail "the disk: status $?"
    fi
    echo "at the limit $(middle "$work/with") times, and $(middle "$work/without") without"
}

# events_of_group NAME: those of the group alone.
events_of_group() {
    grep -F "\"$1\"" "$work/said" | grep -F "\"$group\"" || true
}

# A group that takes most, and has half of the page cache, is held to what it has as long as there is demand, without a limit. Takes as much
# memory as reclaim/demand.
reclaim_hog() {
    can_have_demand
    local mount round readers _ before share files
    can_reclaim_groups
    group=$mount/pagecrew-test-$$
    keeper='' service=''
    at_exit "end_jobs; remove_group $group"
    mkdir "$group" || skip "no control group can be made"
    before=$(settings_of_group)
    little_memory
    start_reclaim --json
    for round in 1 2; do
        (echo "$BASHPID" >"$group/cgroup.procs" && read_much 8) >/dev/null &
        readers=$!
        for _ in $(seq 2400); do
            if [ "$(events_of_group group-held | wc -l)" -ge "$round" ]; then break; fi
            sleep 0.05
        done
        # While they read: a disk's page cache goes with the last one who has it open.
        if [ "$round" -eq 1 ]; then files=$(awk '/^(Ina|A)ctive\(file\)/ { sum += $2 } END { printf "%.0f\n", 1024 * sum }' /proc/meminfo); fi
        wait "$readers" || fail "readers: status $?"
        [ "$(events_of_group group-held | wc -l)" -ge "$round" ] || fail "it was not held: $(cat "$work/said" "$work/log")"
        for _ in $(seq 300); do
            if [ "$(events_of_group group-let-go | wc -l)" -ge "$round" ]; then break; fi
            sleep 0.2
        done
        [ "$(events_of_group group-let-go | wc -l)" -ge "$round" ] || fail "it is held after a minute: $(cat "$work/said")"
    done
    [ "$(settings_of_group)" = "$before" ] || fail "$(settings_of_group), and before: $before"
    share=$(events_of_group group-held | head -n 1 | grep -o '"share_bytes":[0-9]*' | cut -d : -f 2)
    # Of all page cache it has half when that begins; what there is changes a little.
    [ "$files" -ge $((16 << 20)) ] || fail "$files bytes of page cache while they read"
    [ $((5 * share)) -ge $((2 * files)) ] || fail "held to $share bytes of $files"
    kill "$service"
    wait "$service" || fail "status $?: $(cat "$work/log")"
    eventually rmdir "$group" || fail "the group can't be removed"
    much_memory
    echo "$((share >> 20)) of $((files >> 20)) MiB"
}

# What a program that somebody has named reads while there is demand leaves the page cache behind it. Takes as much memory as reclaim/demand.
reclaim_behind() {
    can_reclaim
    local dropped
    keeper='' service=''
    at_exit end_jobs
    [ -z "${guest:-}" ] || skip "a guest has no disk with files"
    little_memory
    start_reclaim --json --groups none --drop-behind "$(basename "$pagecrew")"
    read_much 4 >/dev/null || fail "readers: status $?"
    read_much 4 >/dev/null || fail "readers: status $?"
    kill "$service"
    wait "$service" || fail "status $?: $(cat "$work/log")"
    dropped=$(grep '"behind-end"' "$work/said" | grep -o '"dropped_bytes":[0-9]*' | cut -d : -f 2)
    [ "${dropped:-0}" -ge $((64 << 20)) ] || fail "dropped: ${dropped:-nothing}: $(cat "$work/said" "$work/log")"
    much_memory
    echo "$((dropped >> 20)) MiB"
}

add reclaim/rest 60 reclaim_rest
add reclaim/group 300 reclaim_group
[ -n "${guest:-}" ] || long=yes
add reclaim/demand 300 reclaim_demand
add reclaim/hog 300 reclaim_hog
add reclaim/behind 300 reclaim_behind
long=yes
add reclaim/kills 1800 reclaim_kills 300
long=no
