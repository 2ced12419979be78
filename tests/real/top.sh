# shellcheck shell=bash disable=SC2154
# What `pagecrew top` shows, on a terminal (top.py has one of its own) and without. Sourced by scripts/test-real.sh.

# ends_with STATUS COMMAND...: ends with that status and says why in one line.
ends_with() {
    local expected=$1 status=0
    shift
    "$@" >"$work/out" 2>"$work/error" </dev/null || status=$?
    [ "$status" -eq "$expected" ] || fail "$*: status $status: $(cat "$work/error")"
    [ "$(wc -l <"$work/error")" -eq 1 ] || fail "$*: $(cat "$work/error")"
}

# Without a terminal: as text, as JSON, and what is refused.
top_text() {
    needs python3
    local view
    ends_with 2 "$pagecrew" top
    grep -q -e '--once' "$work/error" || fail "no hint: $(cat "$work/error")"
    ends_with 2 "$pagecrew" top --once --interval 0
    ends_with 2 "$pagecrew" top --once --view nonsense
    ends_with 2 "$pagecrew" top --once --json --view nodes
    ends_with 2 "$pagecrew" top --once --config /no/such/file
    ends_with 2 "$pagecrew" top nonsense
    for _ in 1 2; do
        "$pagecrew" top --once --interval 200ms >"$work/text" 2>"$work/error" || fail "status $?: $(cat "$work/error")"
        for view in Nodes Stalls Programs Trim Pool Reclaim; do
            grep -q "^== $view" "$work/text" || fail "no $view in: $(cat "$work/text")"
        done
        [ ! -s "$work/error" ] || fail "$(cat "$work/error")"
        if grep -q $'\e' "$work/text"; then fail "escapes in text"; fi
    done
    "$pagecrew" top --once --interval 200ms --json | python3 -m json.tool >"$work/json" || fail "no JSON"
    "$pagecrew" top --once --interval 200ms --view nodes | grep -q '^0 ' || fail "no node 0"
    # An object a line, and an end without a word where nobody reads any more.
    { "$pagecrew" top --json --interval 100ms 2>"$work/error" || [ $? -eq 141 ]; } | head -n 3 >"$work/lines"
    [ ! -s "$work/error" ] || fail "$(cat "$work/error")"
    python3 -c 'import json, sys; assert [json.loads(line)["version"] for line in sys.stdin] == [1, 1, 1]' <"$work/lines"
    # Another user sees the machine as well.
    if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null; then
        env -u PAGECREW_STATS_DIR setpriv --reuid 65534 --regid 65534 --clear-groups "$pagecrew" top --once --interval 200ms >"$work/text" ||
            fail "status $? as another user"
        grep -q 'not allowed to look at' "$work/text" || fail "nothing was denied to another user: $(cat "$work/text")"
    fi
}

# On a terminal.
top_terminal() {
    needs python3 stty
    python3 tests/real/top.py "$pagecrew" "$work"
}

# What it costs to look at 300 processes each second.
top_cost() {
    needs python3
    if [ "${patience:-1}" -gt 1 ]; then skip "an emulated machine can't say what something costs"; fi
    python3 tests/real/top.py "$pagecrew" "$work" cost
}

beside=waits
add top/terminal 180 top_terminal
add top/text 60 top_text
beside=no
long=yes
add top/cost 60 top_cost
long=no
