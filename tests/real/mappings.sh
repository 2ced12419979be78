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

# Parts of CPython's own test suite.
python_suite() {
    needs python3
    python3 -m test --help >/dev/null 2>&1 || skip "python3 has no test suite here"
    python3 -c 'import test.test_mmap' 2>/dev/null || skip "python3 has no test suite here"
    cd "$work" || exit
    python3 -m test "$@" || skip "fails without Pagecrew as well"
    "$pagecrew" run -- python3 -m test "$@" || fail "status $?"
}

# Buffers of all sizes, WebAssembly memories that grow, and what worker threads pass to one another: the digest is the same.
node_buffers() {
    needs node
    cat >"$work/buffers.js" <<'SOURCE'
const crypto = require('crypto'), zlib = require('zlib');
const { Worker, isMainThread, parentPort, workerData } = require('worker_threads');
const KIB = 1 << 10, MIB = 1 << 20;
let state = 1;
const random = (limit) => (state = (state * 48271) % 0x7fffffff) % limit;

// Replaces buffers in slots at random; each is checked when it goes.
function churn(seed, rounds) {
    state = seed;
    const slots = new Array(16).fill(null), digest = crypto.createHash('sha256');
    for (let round = 0; round < rounds; round++) {
        const slot = random(16), length = 64 * KIB + random(round % 50 ? 2 * MIB : 32 * MIB), byte = round & 0xff;
        const old = slots[slot];
        if (old) for (let at = 0; at < old.block.length; at += 4093) if (old.block[at] !== old.byte) throw new Error(`byte ${at}`);
        const block = round % 3 ? Buffer.alloc(length, byte) : Buffer.from(new Uint8Array(length).fill(byte).buffer);
        if (round % 97 === 0) digest.update(zlib.inflateSync(zlib.deflateSync(block.subarray(0, MIB), { level: 1 })));
        slots[slot] = { block, byte };
    }
    slots.forEach((slot) => slot && digest.update(slot.block));
    return digest.digest('hex');
}

function webassembly() {
    const memory = new WebAssembly.Memory({ initial: 16, maximum: 2048 });
    for (let pages = 16; pages < 2048; pages *= 2) {
        new Uint8Array(memory.buffer).fill(pages & 0xff, (pages - 16) * 64 * KIB);
        memory.grow(pages);
        const grown = new Uint8Array(memory.buffer);
        if (grown.subarray(pages * 64 * KIB).some((byte) => byte !== 0)) throw new Error('grown memory is not zero');
    }
    return crypto.createHash('sha256').update(new Uint8Array(memory.buffer)).digest('hex');
}

if (isMainThread) {
    const work = [1, 2, 3].map((seed) => new Promise((done, failed) => {
        const worker = new Worker(__filename, { workerData: seed });
        worker.on('message', ({ text, passed }) => done(`${seed} ${text} ${new Uint8Array(passed).every((byte) => byte === seed)}`));
        worker.on('error', failed);
    }));
    console.log(churn(7, 1500), webassembly());
    Promise.all(work).then((lines) => lines.forEach((line) => console.log(line)));
} else {
    const passed = new ArrayBuffer(20 * MIB);
    new Uint8Array(passed).fill(workerData);
    parentPort.postMessage({ text: churn(workerData, 500), passed }, [passed]);
}
SOURCE
    node "$@" "$work/buffers.js" >"$work/without" || skip "fails without Pagecrew as well"
    "$pagecrew" run -- node "$@" "$work/buffers.js" >"$work/with" || fail "status $? with Pagecrew"
    cmp "$work/without" "$work/with" || fail "another result"
}

can_trim_mappings() {
    local release
    release=$(uname -r)
    grep -q '\[madvise\]' /sys/kernel/mm/transparent_hugepage/enabled || skip "huge pages are not for those who ask"
    [ "$(printf '6.12\n%s\n' "$release" | sort -V | head -n 1)" = 6.12 ] || skip "needs Linux 6.12"
}

# The mapping is counted, and what is zero in its huge pages goes back.
mapping_trimmed() {
    can_trim_mappings
    "$pagecrew" run --trim on --stats-json "$work/json" -- "$programs/mappings" sparse || fail "status $?"
    python3 - "$work/json" <<'SOURCE'
import json, sys
counters = json.load(open(sys.argv[1]))["counters"]
assert counters["mapped_eligible_bytes"] == 256 << 20, counters
assert counters["trimmed_bytes"] > 4 << 20, counters
print(counters["trimmed_huge_pages"], "huge pages trimmed")
SOURCE
}

# A program that gave most of its memory back gets rid of what is zero in the rest within seconds, though memory is not short.
mapping_at_rest() {
    can_trim_mappings
    "$pagecrew" run -- python3 -c '
import mmap, time

MIB = 1 << 20
length, kept = 512 * MIB, 64 * MIB
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE // MIB
memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, length, MIB):
    memory[at] = 1
print(resident(), "MiB")
memory.madvise(mmap.MADV_DONTNEED, 0, length - kept)
begin = time.monotonic()
while resident() > kept // MIB // 2:
    assert time.monotonic() < begin + 45, resident()
    time.sleep(0.2)
print(resident(), "MiB after", round(time.monotonic() - begin), "s")
assert all(memory[at] == 1 for at in range(length - kept, length, MIB))
' || fail "status $?"
}

beside=yes
add java/g1 120 java_heap -XX:+UseG1GC -Xcheck:jni
add java/parallel 120 java_heap -XX:+UseParallelGC -Xmx256m
add java/serial 120 java_heap -XX:+UseSerialGC -Xmx256m
add java/uncommit 120 java_heap -XX:+UseG1GC -Xms64m -Xmx1g -XX:MinHeapFreeRatio=5 -XX:MaxHeapFreeRatio=10 -XX:+AlwaysPreTouch
add python-suite/mmap 120 python_suite test_mmap
add python-suite/buffers 240 python_suite test_memoryview test_array test_bytes test_zlib
add node/buffers 120 node_buffers
add node/compacting 120 node_buffers --stress-compaction --gc-interval=500
add mappings/trimmed 60 mapping_trimmed
add mappings/at-rest 60 mapping_at_rest
beside=no

long=yes
# Strings and bytes of gigabytes.
add python-suite/large 1200 python_suite -M 6g test_bigmem
long=no
