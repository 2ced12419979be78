# shellcheck shell=bash disable=SC2154,SC2034
# NumPy's own tests and jobs in Python, compared with themselves without Pagecrew. Sourced by scripts/test-real.sh.

python=$root/.venv/bin/python

needs_python() {
    if ! [ -x "$python" ] || ! "$python" -c "import $1" 2>/dev/null; then skip "no $1 in .venv (scripts/setup.sh makes it)"; fi
}

# numpy_tests MODULE...: passes what passes without Pagecrew, and as many.
numpy_tests() {
    local modules=() module way
    needs_python pytest
    needs_python numpy
    for module in "$@"; do modules+=("numpy.$module"); done
    local pytest=("$python" -m pytest --quiet --no-header -p no:cacheprovider -m 'not slow' --pyargs "${modules[@]}")
    cd "$work" || exit
    (EXPECT_PAGECREW=0 "${pytest[@]}") >without 2>&1 || true
    ("$pagecrew" run -- "${pytest[@]}") >with 2>&1 || true
    for way in without with; do
        sed -n 's/ in [0-9.]*s.*//; /passed/p' "$way" | tail -n 1 >"$way.sum"
        grep '^FAILED' "$way" | sort >"$way.failed" || true
    done
    if ! grep -q passed without.sum; then
        tail -n 20 without
        skip "the tests don't run without Pagecrew"
    fi
    if ! cmp -s without.failed with.failed || ! cmp -s without.sum with.sum; then
        tail -n 60 with
        fail "$(cat with.sum) instead of $(cat without.sum)"
    fi
    cat with.sum
}

# A script whose output is the same both ways.
same_output() {
    needs_python "$1"
    "$python" "$root/tests/real/$2" >"$work/without" || fail "without Pagecrew"
    "$pagecrew" run -- "$python" "$root/tests/real/$2" >"$work/with" || fail "status $? with Pagecrew"
    diff "$work/without" "$work/with" || fail "other results"
    tail -n 1 "$work/with"
}

beside=yes
add numpy/others 120 numpy_tests _core.tests.test_mem_overlap lib.tests.test_io _core.tests.test_shape_base _core.tests.test_numeric
add pandas 90 same_output pandas frames.py
add multiprocessing 90 same_output numpy processes.py
beside=no
long=yes
add numpy/multiarray 240 numpy_tests _core.tests.test_multiarray
add numpy/all-core 1500 numpy_tests _core lib fft linalg ma
long=no
