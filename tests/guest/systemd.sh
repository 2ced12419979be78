# shellcheck shell=bash disable=SC2154
# The units under systemd itself, installed as an operator does: started, killed, changed, upgraded, stopped. Sourced by scripts/test-real.sh in
# guests; machines whose first process is another one skip them.

# installed LINE...: the command and the units where operators have them, with these settings. Ended and gone when the test ends.
installed() {
    [ -d /run/systemd/system ] || skip "systemd is not the first process here"
    mkdir -p /usr/local/bin /etc/pagecrew
    at_exit uninstall
    install "$pagecrew" /usr/local/bin/pagecrew
    install -m 644 "$root"/contrib/*.service /run/systemd/system/
    printf '%s\n' "$@" >/etc/pagecrew/pagecrew.toml
    systemctl daemon-reload
    # What other tests have said is theirs.
    begun=$(date +%s)
}

uninstall() {
    # shellcheck disable=SC2046
    kill $(jobs -p) 2>/dev/null || true
    systemctl stop pagecrew pagecrew-pool pagecrew-trim pagecrew-reclaim
    if [ -n "${group:-}" ]; then remove_group "$group"; fi
    rm -rf /etc/pagecrew
}

# said UNIT: what it has said since the test began.
said() {
    journalctl --unit "$1" --since "@$begun" --output cat --no-pager
}

has_said() {
    said "$1" | grep -q -e "$2"
}

# shows UNIT PROPERTY PATTERN: systemd has that of it.
shows() {
    systemctl show --property "$2" --value "$1" | grep -qx -e "$3"
}

main_process() {
    systemctl show --property MainPID --value "$1"
}

started() {
    systemctl start "$1" || fail "$1 is not started: $(said "$1")"
    shows "$1" ActiveState active || fail "$1: $(systemctl status --no-pager "$1")"
    has_limits "$root/contrib/$1.service" "$(main_process "$1")" "${2:-}"
}

# again UNIT PROCESS: another process is served.
again() {
    shows "$1" ActiveState active && shows "$1" SubState running && [ "$(main_process "$1")" != "$2" ]
}

# killed UNIT: and begun again.
killed() {
    local before
    before=$(main_process "$1")
    systemctl kill --signal KILL --kill-whom main "$1"
    eventually again "$1" "$before" || fail "not begun again: $(systemctl status --no-pager "$1")"
}

stopped() {
    systemctl stop "$1" || fail "not stopped"
    shows "$1" Result success || fail "$1: $(systemctl status --no-pager "$1")"
    nothing_refused <(said "$1")
}

pool_has() {
    [ "$(pool_status "$1")" = True ]
}

systemd_pool() {
    installed '[pool]' 'size = "96M"' 'files = ["32M"]' 'cpu = 100' 'floor = "1M"' 'quota = { nobody = "64M" }' 'socket-mode = "0666"'
    local unit=pagecrew-pool path sum
    started "$unit"
    "$pagecrew" pool wait --size 96M --timeout 60s || fail "$(said "$unit")"
    path=$("${somebody[@]}" "$pagecrew" pool take --size 32M) || fail "take: status $?"
    "${somebody[@]}" dd if=/dev/urandom of="$path" bs=1M count=32 conv=notrunc status=none || fail "nothing can be written"
    sum=$(sha256sum <"$path")
    killed "$unit"
    eventually pool_has "s['taken_bytes'] == 32 << 20" || fail "taken: $("$pagecrew" pool status)"
    # An upgrade.
    systemctl restart "$unit" || fail "$(said "$unit")"
    eventually pool_has "s['taken_bytes'] == 32 << 20" || fail "taken: $("$pagecrew" pool status)"
    "${somebody[@]}" "$pagecrew" pool take --size 48M >"$work/out" 2>&1 && fail "beyond the quota"
    grep -q quota "$work/out" || fail "$(cat "$work/out")"
    sed -i 's/96M/banana/' /etc/pagecrew/pagecrew.toml
    systemctl reload "$unit" || fail "reload: status $?"
    eventually has_said "$unit" "line 2: pool.size: 'banana'" || fail "$(said "$unit")"
    sed -i 's/banana/128M/' /etc/pagecrew/pagecrew.toml
    systemctl reload "$unit" || fail "reload: status $?"
    eventually shows "$unit" StatusText 'full, 128 MiB of 128 MiB ready, 32 MiB taken' || fail "$(systemctl status --no-pager "$unit")"
    stopped "$unit"
    [ "$(sha256sum <"$path")" = "$sum" ] || fail "the file is not what it was"
    systemctl start "$unit" || fail "$(said "$unit")"
    "${somebody[@]}" "$pagecrew" pool release "$path" >/dev/null || fail "release: status $?"
    stopped "$unit"
    mountpoint -q /run/pagecrew/pool/mem && fail "the mount is still there"
    # What makes no sense is not tried again and again.
    sed -i 's/128M/banana/' /etc/pagecrew/pagecrew.toml
    systemctl start "$unit" 2>/dev/null && fail "started with nonsense"
    shows "$unit" ActiveState failed || fail "$(systemctl status --no-pager "$unit")"
    shows "$unit" NRestarts 0 || fail "tried again: $(systemctl status --no-pager "$unit")"
    systemctl reset-failed "$unit"
}

systemd_trim() {
    limited_group
    local unit=pagecrew-trim before process
    before=$(control_text)
    installed '[trim]' 'users = ["nobody"]' "groups = [\"$group\"]" 'interval = "500ms"' 'cpu = 50'
    "${somebody[@]}" "$programs/sparse" 64 1 stay >"$work/there" &
    process=$!
    eventually grep -q there "$work/there" || fail "no process to trim"
    [ "$(kib_huge "$process")" -ge 65536 ] || skip "there are no huge pages to be had"
    started "$unit"
    eventually shows "$unit" StatusText '1 process trimmed, [5-6][0-9].* MiB gone in all, 1 group held at its limit' ||
        fail "$(systemctl status --no-pager "$unit")"
    [ "$(kib_huge "$process")" -lt 65536 ] || fail "$(kib_huge "$process") KiB in huge pages"
    control_is_not "$before" || fail "the group is not held"
    killed "$unit"
    eventually control_is_not "$before" || fail "the group is not held again: $(said "$unit")"
    stopped "$unit"
    control_is "$before" || fail "the group's control is $(control_text), and was $before"
    kill -USR1 "$process"
    wait "$process" || fail "the data is not what it was: status $?"
}

# The niceness of the kernel's reclaim threads.
kswapd_is() {
    local thread nice
    for thread in $(pgrep '^kswapd'); do
        nice=$(awk '{ print $19 }' "/proc/$thread/stat")
        [ "$nice" = "$1" ] || return 1
    done
}

systemd_reclaim() {
    installed '[reclaim]'
    local unit=pagecrew-reclaim before
    before=$(cat "$factor")
    started "$unit" 21
    shows "$unit" StatusText 'waits for demand.*' || fail "$(systemctl status --no-pager "$unit")"
    kswapd_is -20 || fail "the kernel's threads do not come first"
    killed "$unit"
    eventually kswapd_is -20 || fail "the kernel's threads do not come first: $(said "$unit")"
    systemctl reload "$unit" || fail "reload: status $?"
    stopped "$unit"
    kswapd_is 0 || fail "the kernel's threads are not as they were"
    [ "$(cat "$factor")" = "$before" ] || fail "the setting is $(cat "$factor"), and was $before"
}

systemd_serve() {
    installed '[pool]' 'size = "64M"' 'cpu = 100' 'floor = "1M"' '[trim]' 'users = ["nobody"]' '[serve]' 'metrics = 9753'
    local unit=pagecrew name pid
    # One of the single units goes before it begins.
    started pagecrew-pool
    started "$unit"
    shows pagecrew-pool ActiveState inactive || fail "two pools: $(systemctl status --no-pager pagecrew-pool)"
    eventually shows "$unit" StatusText 'reclaim: waits for demand.*; pool: full, 64 MiB of 64 MiB ready, 0 B taken; trim: 0 processes trimmed.*' ||
        fail "$(systemctl status --no-pager "$unit")"
    for name in pool trim reclaim; do
        pid=$(pgrep -o -f "^pagecrew $name ") || fail "$name does not run"
        has_limits "$root/contrib/pagecrew-$name.service" "$pid" "$([ "$name" = reclaim ] && echo 21)"
        kill -KILL "$pid"
        eventually has_said "$unit" "pagecrew: $name.*ended by signal 9" || fail "$(said "$unit")"
    done
    eventually shows "$unit" StatusText 'reclaim: waits for demand.*; pool: full, 64 MiB of 64 MiB ready, 0 B taken; trim: 0 processes trimmed.*' ||
        fail "$(systemctl status --no-pager "$unit")"
    python3 -c '
import urllib.request
text = urllib.request.urlopen("http://127.0.0.1:9753/metrics", timeout=60).read().decode()
assert all(name in text for name in ("pagecrew_pool_ready_bytes", "pagecrew_trim_gone_bytes", "pagecrew_reclaim_factor")), text' || fail "metrics"
    systemctl reload "$unit" || fail "reload: status $?"
    killed "$unit"
    stopped "$unit"
    pgrep -f '^pagecrew ' && fail "somebody is left"
    kswapd_is 0 || fail "the kernel's threads are not as they were"
}

add systemd/pool 120 systemd_pool
add systemd/trim 120 systemd_trim
add systemd/reclaim 120 systemd_reclaim
add systemd/serve 180 systemd_serve
