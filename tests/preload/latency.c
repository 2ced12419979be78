// Beside programs that take every CPU: how long calls of malloc's family sleep. A call may be preempted like any other code, but it
// must not wait for somebody who doesn't run. Prints the longest sleep of a call, and how often any slept.
#include "check.h"
#include <sys/resource.h>
#include <sys/wait.h>

static uint64_t cpu_ns(void) {
    struct timespec time;
    CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// Nanoseconds that this thread was ready to run and did not get a CPU.
static uint64_t waited_ns(int file) {
    char text[128] = {0};
    CHECK(pread(file, text, sizeof text - 1, 0) > 0);
    unsigned long long ran, waited;
    CHECK(sscanf(text, "%llu %llu", &ran, &waited) == 2);
    return waited;
}

static uint64_t longest, sleeps;
static int schedstat;

// Time that is neither run nor waiting for a CPU is sleep.
#define TIMED(call)                                                                    \
    do {                                                                               \
        uint64_t waited = waited_ns(schedstat), cpu = cpu_ns(), start = now_ns();      \
        call;                                                                          \
        uint64_t wall = now_ns() - start;                                              \
        cpu = cpu_ns() - cpu, waited = waited_ns(schedstat) - waited;                  \
        uint64_t slept = wall > cpu + waited ? wall - cpu - waited : 0;                \
        if (slept > longest) longest = slept;                                          \
        sleeps += slept > 1000000;                                                     \
    } while (0)

int main(int count, char **arguments) {
    CHECK(count == 3);
    uint64_t seconds = strtoul(arguments[1], NULL, 10), most = strtoul(arguments[2], NULL, 10) * 1000000u;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    pid_t others[256];
    long started = 0;
    for (; started < 2 * cpus && started < 256; started++) {
        others[started] = fork();
        CHECK(others[started] >= 0);
        if (others[started] == 0) {
            CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
            for (;;) __asm__ volatile("");
        }
    }
    schedstat = open("/proc/thread-self/schedstat", O_RDONLY);
    CHECK(schedstat >= 0);
    uint64_t state = 1, end = now_ns() + seconds * 1000000000u, calls = 0;
    static char *blocks[8];
    while (now_ns() < end) {
        size_t which = random_word(&state) % 8, size = 1 * MIB + random_word(&state) % (24 * MIB);
        if (blocks[which]) TIMED(free(blocks[which]));
        if (random_word(&state) % 2) {
            TIMED(blocks[which] = calloc(1, size));
        } else {
            TIMED(blocks[which] = malloc(size));
        }
        CHECK(blocks[which]);
        // Not in the time: what faults in is the kernel's matter.
        memset(blocks[which], 1, size);
        calls++;
    }
    for (long i = 0; i < started; i++) {
        CHECK(kill(others[i], SIGKILL) == 0);
        CHECK(waitpid(others[i], NULL, 0) == others[i]);
    }
    printf("%llu rounds, longest sleep %.2f ms, %llu calls slept for more than 1 ms\n", (unsigned long long)calls,
           (double)longest / 1e6, (unsigned long long)sleeps);
    CHECK(longest <= most);
    return 0;
}
