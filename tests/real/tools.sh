# shellcheck shell=bash disable=SC2154,SC2034
# Compilers, databases, compressors and stress-ng, compared with themselves without Pagecrew. Sourced by scripts/test-real.sh.

# A source that takes a compiler a few hundred MiB.
compiler() {
    needs g++
    cat >"$work/heavy.cpp" <<'SOURCE'
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <regex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>
template <int N> struct Deep { using type = std::tuple<typename Deep<N - 1>::type, std::variant<int, Deep<N - 1>>>; static int sum() { return N + Deep<N - 1>::sum(); } };
template <> struct Deep<0> { using type = int; static int sum() { return 0; } };
template <std::size_t... I> int all(std::index_sequence<I...>) { return (Deep<static_cast<int>(I) % 200>::sum() + ...); }
template <int N> std::map<std::string, std::function<int(int)>> table() {
    std::map<std::string, std::function<int(int)>> result;
    result["a"] = [](int x) { return x + N; };
    result["b"] = [](int x) { return x * N; };
    std::vector<std::pair<int, std::string>> sorted(N + 1, {N, "x"});
    std::sort(sorted.begin(), sorted.end());
    return result;
}
template <std::size_t... I> std::size_t tables(std::index_sequence<I...>) { return (table<static_cast<int>(I)>().size() + ...); }
int main() {
    std::regex pattern("(a|b)*c");
    std::cout << all(std::make_index_sequence<800>()) + tables(std::make_index_sequence<60>()) << std::regex_match("abc", pattern);
}
SOURCE
    cd "$work" || exit
    # The name of the output is part of debug information, so both are made under one name.
    g++ -std=c++17 -O1 -g -c heavy.cpp -o heavy.o || fail "without Pagecrew"
    mv heavy.o without.o
    "$pagecrew" run -- g++ -std=c++17 -O1 -g -c heavy.cpp -o heavy.o || fail "status $? with Pagecrew"
    cmp heavy.o without.o || fail "another object file"
    echo "$(wc -c <heavy.o) bytes"
}

sqlite() {
    needs sqlite3
    cat >"$work/script.sql" <<'SCRIPT'
PRAGMA cache_size = -300000;
CREATE TABLE item (id INTEGER PRIMARY KEY, kind INTEGER, name TEXT, body BLOB);
WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 400000)
INSERT INTO item SELECT n, n % 97, printf('name %d', n * 7919 % 100003), zeroblob(n % 300) FROM number;
INSERT INTO item SELECT n, 1000, 'large', zeroblob(3000000) FROM (SELECT 1000001 AS n UNION SELECT 1000002 UNION SELECT 1000003);
CREATE INDEX by_name ON item (name, kind);
UPDATE item SET body = zeroblob(length(body) + 100) WHERE kind < 20;
DELETE FROM item WHERE id % 3 = 0;
SELECT kind, count(*), sum(length(body)), max(name) FROM item GROUP BY kind ORDER BY kind;
SELECT count(*) FROM item a JOIN item b ON a.name = b.name WHERE a.id < b.id;
SELECT length(group_concat(name)) FROM item;
SELECT length(replace(hex(zeroblob(8000000)), '0', 'abc'));
VACUUM;
PRAGMA integrity_check;
SCRIPT
    sqlite3 :memory: <"$work/script.sql" >"$work/without" || fail "without Pagecrew"
    "$pagecrew" run -- sqlite3 :memory: <"$work/script.sql" >"$work/with" || fail "status $? with Pagecrew"
    cmp "$work/without" "$work/with" || fail "other results"
    [ "$(tail -n 1 "$work/with")" = ok ] || fail "integrity_check: $(tail -n 1 "$work/with")"
}

compressor() {
    needs "$1"
    local command=("$@")
    # Text that compresses, of which no two parts are the same.
    seq 1 7500000 >"$work/input"
    "${command[@]}" <"$work/input" >"$work/without" || fail "without Pagecrew"
    "$pagecrew" run -- "${command[@]}" <"$work/input" >"$work/with" || fail "status $? with Pagecrew"
    cmp "$work/without" "$work/with" || fail "other output"
    "$pagecrew" run -- "$1" -d -c -T0 <"$work/with" | cmp - "$work/input" || fail "not what went in"
}

stress() {
    needs stress-ng
    "$pagecrew" run -- stress-ng --temp-path "$work" --malloc 2 --malloc-bytes 512M --vm 2 --vm-bytes 256M --verify -t "$1" 2>&1 ||
        fail "status $?"
}

beside=yes
add compiler 120 compiler
add sqlite 60 sqlite
add xz 90 compressor xz -T0 -1 -c
add zstd 60 compressor zstd -T0 -12 -c -q
beside=no
add stress-ng 40 stress 10s
long=yes
add stress-ng/long 150 stress 120s
add xz/strong 300 compressor xz -T0 -6 -c
long=no
