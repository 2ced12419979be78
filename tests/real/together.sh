# shellcheck shell=bash disable=SC2154,SC2034
# All services beside programs under `run`, and a load that comes and goes: nothing goes up and down by itself, and nothing is lost. Sourced by
# scripts/test-real.sh.

# together SECONDS
together() {
    can_have_demand
    serve_place
    local factor_before keeper='' group='' control_before=''
    factor_before=$(cat "$factor")
    change "$factor" "$factor_before"
    at_exit 'kill -9 ${watcher:-} 2>/dev/null || true; end_jobs; clear_serve'
    # A quarter of the memory is for all of it, and the disk has as much.
    little_memory 4
    listen_as_manager
    serve_settings 512M pool trim reclaim
    sed -i 's/^floor.*/floor = "256M"/; s/^names.*/names = ["python3"]/' "$settings"
    start_serve
    wait_for_ready "512 << 20"
    python3 "$root/tests/real/together.py" "$pagecrew" "$pool/socket" "$work/disk/files" "$1" >"$work/together" 2>&1 &
    watcher=$!
    wait "$watcher" || fail "$(tail -n 30 "$work/together") $(tail -n 20 "$work/log")"
    end_serve 1000
    much_memory
    nothing_is_left
    tail -n 1 "$work/together"
}

long=yes
add together/hour 4500 together 3600
long=no
