# shellcheck shell=bash disable=SC2154,SC2034
# The test binaries that cargo built, as they run on the machine itself. Sourced by scripts/test-real.sh in guests.

# Those that ask how long something takes, which an emulated machine can't say (a hundred clients at once take 30 times as long, one takes 10
# times; and whoever is promised half a CPU beside others has less where eight emulated ones share two), and a storm that would take a quarter of an hour there: those of test-real.sh are scaled.
not_emulated=(a_hundred_clients_at_once_wait_little crew::crew::tests::a_caller_is_not_held_back_by_helpers_that_do_not_run
    crew::hogs::no_call_into_the_kernel_waits_long_for_a_helper region::tests::a_storm_loses_no_byte
    a_watcher_rests_even_if_memory_is_to_go_back_at_once)

# Simulations, which have nothing of the machine and take minutes there.
simulated=(pool::simulation pool::world trim::tests::a_fleet_of_ten_thousand)

# BINARY:TEST of those for which an emulated machine is fast enough if nothing runs beside them: memory has to be touched between two looks
# of the watcher, 5 to 20 ms; one take has to be served within milliseconds.
by_itself=(pagecrew:region::tests::memory_of_another_lane_is_used_before_the_peak_is_raised
    pagecrew-pool:what_is_ready_is_taken_within_a_millisecond)

# Skips a test that takes more than the machine has, in MiB.
memory_of() {
    local has
    has=$(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
    if [ "$has" -lt "$1" ]; then skip "takes more memory than the machine's $has MiB"; fi
}

# unit NAME: one of the binaries.
unit() {
    local alone=() left_out test reason result
    for test in "${by_itself[@]}"; do
        if [ "${test%%:*}" = "$1" ]; then alone+=("${test#*:}"); fi
    done
    left_out=("${not_emulated[@]/#/--skip=}" "${alone[@]/#/--skip=}" "${simulated[@]/#/--skip=}")
    # Those of the command build programs.
    if [[ $1 == cli-* && $1 != cli-preload ]]; then needs gcc; fi
    case $1 in
    pagecrew | pagecrew-frames | pagecrew-pool) memory_of 1024 ;;
    esac
    cd "$work" || exit
    # An emulated machine's CPUs share those of its host: so many tests at once would leave helpers, which keep away from others, none.
    if [ "${patience:-1}" -gt 1 ]; then export RUST_TEST_THREADS=2; fi
    RUST_BACKTRACE=0 "$root/target/guest-tests/$1" --show-output "${left_out[@]}" >"$work/out" 2>&1 || {
        local status=$?
        # Only what the failed ones have printed, and why processes that they started ended.
        sed '/^failures:/,$d' "$work/out" | grep -A 5 'panicked at' | cut -c 1-2000 || true
        sed -n '/^failures:/,$p' "$work/out"
        fail "status $status: $(tail -n 5 "$work/out")"
    }
    for test in "${alone[@]}"; do
        "$root/target/guest-tests/$1" --exact "$test" >"$work/alone" 2>&1 || fail "status $?: $(cat "$work/alone")"
        grep -q '^test result: ok. 1 passed' "$work/alone" || fail "there is no test $test"
    done
    # One may pass because there is nothing to try.
    reason=$(sed -n 's/^left out: //p' "$work/out" | sort | uniq -c | sort -rn | sed -n 's/^ *[0-9]* //;1p')
    result=$(grep '^test result' "$work/out" | sed -e 's/test result: ok. //' -e 's/; 0 measured//' \
        -e 's/filtered out/left out (measure time, or have nothing of the machine)/' -e 's/; 0 left out[^;]*//')
    if [ ${#alone[@]} -gt 0 ]; then result+="; ${#alone[@]} of those left out passed by itself"; fi
    echo "$result${reason:+; $(grep -c '^left out: ' "$work/out") tried nothing ($reason)}"
}

for binary in "$root"/target/guest-tests/*; do
    add "unit/$(basename "$binary")" 600 unit "$(basename "$binary")"
done

# Pairs on the stacks of the CPUs, by threads that are preempted, moved and interrupted all the time.
sequences() {
    local stacks='in restartable sequences'
    # That machine has none.
    # shellcheck disable=SC2154
    if [ "$guest" = small ]; then stacks='under try-locks'; fi
    PAGECREW_TEST_PAIRS=$1 PAGECREW_TEST_STACKS=$stacks "$root/target/guest-tests/pagecrew" --exact sys::cpu_stack::tests::pairs_under_forced_preemption --nocapture >"$work/out" 2>&1 ||
        fail "status $?: $(cat "$work/out")"
    grep -h ' pairs' "$work/out" | tail -n 1
}

case $(uname -m) in
aarch64) add sequences 600 sequences 1000000 ;;
*) add sequences 600 sequences 100000 ;;
esac
