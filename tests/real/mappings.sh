# shellcheck shell=bash disable=SC2154,SC2034
# Programs that map their memory themselves, compared with themselves without Pagecrew. Sourced by scripts/test-real.sh.

# Threads that fill a heap with arrays of all sizes and look at what became of them.
java_heap() {
    needs java javac
    cat >"$work/Heap.java" <<'SOURCE'
import java.util.*;
public class Heap {
    public static void main(String[] arguments) throws Exception {
        Thread[] threads = new Thread[4];
        long[] sums = new long[4];
        for (int index = 0; index < 4; index++) {
            final int own = index;
            threads[index] = new Thread(() -> {
                Random random = new Random(own);
                Map<Integer, byte[]> kept = new HashMap<>();
                for (int i = 0; i < 20000; i++) {
                    byte[] block = new byte[1 + random.nextInt(i % 100 == 0 ? 1000000 : 60000)];
                    for (byte b : new byte[] {block[0], block[block.length / 2]}) if (b != 0) throw new Error("not zero");
                    block[block.length / 2] = (byte) i;
                    kept.put(random.nextInt(500), block);
                    byte[] other = kept.get(random.nextInt(500));
                    if (other != null) sums[own] += other[other.length / 2];
                }
            });
            threads[index].start();
        }
        for (Thread thread : threads) thread.join();
        System.gc();
        System.out.println(Arrays.toString(sums));
    }
}
SOURCE
    (cd "$work" && javac Heap.java)
    java -cp "$work" "$@" Heap >"$work/without"
    "$pagecrew" run -- java -cp "$work" "$@" Heap >"$work/with" || fail "status $? with Pagecrew"
    cmp "$work/without" "$work/with" || fail "another result"
}

python_mmap() {
    needs python3
    python3 -m test --help >/dev/null 2>&1 || skip "python3 has no test suite here"
    python3 -c 'import test.test_mmap' 2>/dev/null || skip "python3 has no test suite here"
    cd "$work" || exit
    python3 -m test test_mmap || skip "fails without Pagecrew as well"
    "$pagecrew" run -- python3 -m test test_mmap || fail "status $?"
}

# The mapping is counted, and what is zero in its huge pages goes back.
mapping_trimmed() {
    local release
    release=$(uname -r)
    grep -q '\[madvise\]' /sys/kernel/mm/transparent_hugepage/enabled || skip "huge pages are not for those who ask"
    [ "$(printf '6.12\n%s\n' "$release" | sort -V | head -n 1)" = 6.12 ] || skip "needs Linux 6.12"
    "$pagecrew" run --trim on --stats-json "$work/json" -- "$programs/mappings" sparse || fail "status $?"
    python3 - "$work/json" <<'SOURCE'
import json, sys
counters = json.load(open(sys.argv[1]))["counters"]
assert counters["mapped_eligible_bytes"] == 256 << 20, counters
assert counters["trimmed_bytes"] > 4 << 20, counters
print(counters["trimmed_huge_pages"], "huge pages trimmed")
SOURCE
}

add java/g1 120 java_heap -XX:+UseG1GC -Xcheck:jni
add java/parallel 120 java_heap -XX:+UseParallelGC -Xmx256m
add java/serial 120 java_heap -XX:+UseSerialGC -Xmx256m
add java/uncommit 120 java_heap -XX:+UseG1GC -Xms64m -Xmx1g -XX:MinHeapFreeRatio=5 -XX:MaxHeapFreeRatio=10 -XX:+AlwaysPreTouch
add python-mmap 120 python_mmap
add mappings/trimmed 60 mapping_trimmed
