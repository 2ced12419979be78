// Children of every kind, while other threads allocate and free.
#include "check.h"
#include <dirent.h>
#include <signal.h>
#include <spawn.h>

#define THREADS 3
#define LIVE (64 * MIB)
// What each thread takes while others fork, and the most times.
#define GROWTH 60
#define GROWN (64 * MIB)

extern char **environ;

static atomic_bool done;
static atomic_size_t rounds_done;
static char *live_block;

static void *churn(void *argument) {
    uint64_t state = (uintptr_t)argument;
    while (!atomic_load(&done)) {
        size_t size = 600 * KIB + random_word(&state) % (8 * MIB);
        char *block = random_word(&state) % 2 ? malloc(size) : calloc(1, size);
        CHECK(block);
        uint64_t seed = random_word(&state);
        fill(block, size, seed, false);
        CHECK(holds(block, size, seed, false));
        if (random_word(&state) % 4 == 0) {
            block = realloc(block, 2 * size);
            CHECK(block && ((uint64_t *)block)[0] == pattern(seed, 0));
        }
        if (random_word(&state) % 8 == 0) CHECK(mlock(block, PAGE) == 0 || errno == ENOMEM || errno == EPERM || errno == EAGAIN);
        free(block);
        atomic_fetch_add(&rounds_done, 1);
    }
    return NULL;
}

static void *in_thread_of_child(void *argument) {
    char *block = malloc(20 * MIB);
    CHECK(block);
    memset(block, 3, 20 * MIB);
    free(argument);
    return block;
}

// What a child does: its data is there, zeroes are zero, threads work.
static void live_as_child(int depth) {
    CHECK(holds(live_block, LIVE, 4711, false));
    for (int i = 0; i < 3; i++) {
        char *zeroes = calloc(1, 24 * MIB);
        CHECK(zeroes && all_zero(zeroes, 24 * MIB));
        memset(zeroes, 0xff, 24 * MIB);
        char *block = malloc(3 * MIB + 5);
        CHECK(block);
        memset(block, 1, 3 * MIB + 5);
        block = realloc(block, 80 * MIB);
        CHECK(block && block[3 * MIB] == 1);
        free(zeroes);
        free(block);
    }
    pthread_t thread;
    void *result, *given = malloc(5 * MIB);
    CHECK(pthread_create(&thread, NULL, in_thread_of_child, given) == 0);
    CHECK(pthread_join(thread, &result) == 0);
    free(result);
    if (depth > 0) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            live_as_child(depth - 1);
            _exit(depth);
        }
        CHECK(wait_for(child) == depth);
        CHECK(holds(live_block, LIVE, 4711, false));
    }
    free(live_block);
}

// Says how the child ended, if not as it should have.
static void expect_status(pid_t child, int expected) {
    int status = wait_for(child);
    if (status != expected) {
        fprintf(stderr, "child %d ended with %d instead of %d (below 0: a signal)\n", child, status, expected);
        fail(__FILE__, __LINE__, "status == expected");
    }
}

static void forking(int rounds) {
    for (int round = 0; round < rounds; round++) {
        // Something to retain at the moment of the fork.
        char *block = malloc(32 * MIB);
        memset(block, 9, 32 * MIB);
        free(block);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20 * patience());
            live_as_child(round % 3);
            if (round % 2) _exit(40 + round % 10);
            exit(40 + round % 10);
        }
        expect_status(child, 40 + round % 10);
    }
}

static void sharing_memory(int rounds, const char *self) {
    for (volatile int round = 0; round < rounds; round++) {
        pid_t child = vfork();
        CHECK(child >= 0);
        if (child == 0) _exit(round % 100);
        CHECK(wait_for(child) == round % 100);
        child = vfork();
        CHECK(child >= 0);
        if (child == 0) {
            execl("/bin/true", "true", (char *)NULL);
            _exit(127);
        }
        CHECK(wait_for(child) == 0);
        CHECK(posix_spawn(&child, self, NULL, NULL, (char *[]){(char *)self, "child", NULL}, environ) == 0);
        CHECK(wait_for(child) == 33);
        CHECK(system("exit 5") == 5 << 8);
        FILE *pipe = popen("echo hello", "r");
        char text[16] = "";
        CHECK(pipe && fgets(text, sizeof text, pipe) && !strcmp(text, "hello\n") && pclose(pipe) == 0);
        child = fork();
        if (child == 0) {
            execl(self, self, "child", (char *)NULL);
            _exit(127);
        }
        CHECK(wait_for(child) == 33);
    }
    CHECK(holds(live_block, LIVE, 4711, false));
}

// What the parent retains is no memory of the child's.
static void inheriting_little(void) {
    char *block = malloc(GIB);
    memset(block, 5, GIB);
    free(block);
    int ends[2];
    CHECK(pipe(ends) == 0);
    size_t before = resident();
    pid_t child = fork();
    if (child == 0) {
        size_t size = resident();
        CHECK(write(ends[1], &size, sizeof size) == sizeof size);
        _exit(0);
    }
    size_t after = 0;
    CHECK(read(ends[0], &after, sizeof after) == sizeof after);
    close(ends[0]);
    close(ends[1]);
    CHECK(wait_for(child) == 0);
    printf("resident: %zu MiB before the fork, %zu MiB in the child\n", before / MIB, after / MIB);
    CHECK(after < LIVE + 100 * MIB);
}

// A child has the descriptors that its parent opened, and no others.
static int descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory);
    while (readdir(directory)) count++;
    closedir(directory);
    return count;
}

static void inheriting_descriptors(void) {
    int expected = descriptors();
    for (int round = 0; round < 100; round++) {
        char *block = calloc(1, 48 * MIB);
        CHECK(block);
        memset(block, 1, 48 * MIB);
        free(block);
        pid_t child = fork();
        if (child == 0) _exit(descriptors() - expected);
        CHECK(wait_for(child) == 0);
    }
}

// Memory whose protection was changed, freed just before the fork, works in the child.
static void after_protecting(void) {
    for (int round = 0; round < 60; round++) {
        char *blocks[16];
        for (int i = 0; i < 16; i++) {
            blocks[i] = malloc(i % 2 ? 4 * MIB : 1200 * KIB);
            memset(blocks[i], 1, PAGE);
            char *page = (char *)(((uintptr_t)blocks[i] + PAGE - 1) & ~(PAGE - 1));
            CHECK(mprotect(page, 16 * PAGE, PROT_READ) == 0);
        }
        for (int i = 0; i < 16; i++) {
            // As a program has to: glibc's malloc does not forgive it.
            if (!under_pagecrew()) {
                char *page = (char *)(((uintptr_t)blocks[i] + PAGE - 1) & ~(PAGE - 1));
                CHECK(mprotect(page, 16 * PAGE, PROT_READ | PROT_WRITE) == 0);
            }
            free(blocks[i]);
        }
        pid_t child = fork();
        if (child == 0) {
            for (int i = 0; i < 16; i++) {
                blocks[i] = malloc(i % 2 ? 4 * MIB : 1200 * KIB);
                memset(blocks[i], 2, i % 2 ? 4 * MIB : 1200 * KIB);
            }
            _exit(6);
        }
        int status = wait_for(child);
        if (status != 6) {
            fprintf(stderr, "round %d: child that writes to its own memory: %d\n", round, status);
            fail(__FILE__, __LINE__, "status == 6");
        }
    }
}

// Handlers of pthread_atfork may allocate, in whatever order they were registered.
static char *for_handlers;
static void allocating_handler(void) {
    char *block = malloc(3 * MIB);
    CHECK(block);
    memset(block, 1, 3 * MIB);
    free(for_handlers);
    for_handlers = block;
}

static void with_handlers(void) {
    for (int round = 0; round < 10; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(round);
        CHECK(wait_for(child) == round);
    }
}

// A server that goes to the background before it has any large memory, and one that does so afterwards.
static void daemonizing(bool early) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        char *before = early ? NULL : large_and_live(300 * MIB);
        if (fork()) _exit(0);
        setsid();
        char *after = large_and_live(300 * MIB);
        free(before);
        for (size_t at = 0; at < 300 * MIB; at += PAGE) CHECK(after[at] == (char)(at / PAGE + 1));
        CHECK(write(ends[1], "fine", 4) == 4);
        exit(0);
    }
    CHECK(wait_for(child) == 0);
    close(ends[1]);
    char text[8] = "";
    CHECK(read(ends[0], text, 4) == 4 && !strcmp(text, "fine"));
    // The background process has ended when the pipe has.
    CHECK(read(ends[0], text, 4) == 0);
    close(ends[0]);
}

// Whoever flushes streams holds locks of the C library that a fork takes as well, and may allocate meanwhile.
static ssize_t allocating_write(void *cookie, const char *text, size_t size) {
    (void)cookie, (void)text;
    char *block = malloc(2 * MIB);
    CHECK(block);
    memset(block, 1, PAGE);
    free(block);
    // More than any cache holds.
    block = malloc(80 * MIB);
    CHECK(block);
    free(block);
    atomic_fetch_add(&rounds_done, 1);
    return (ssize_t)size;
}

static void *flush(void *argument) {
    while (!atomic_load(&done)) {
        CHECK(fputs("line", argument) >= 0);
        CHECK(fflush(NULL) == 0);
    }
    return NULL;
}

static void with_streams(void) {
    FILE *stream = fopencookie(NULL, "w", (cookie_io_functions_t){.write = allocating_write});
    CHECK(stream);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, flush, stream) == 0);
    for (int round = 0; round < 400; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(round % 100);
        CHECK(wait_for(child) == round % 100);
    }
    atomic_store(&done, true);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(atomic_load(&rounds_done) > 0);
    CHECK(fclose(stream) == 0);
}

// How often each thread takes GROWN: what merges into a mapping larger than all memory, the kernel lets nobody fork with.
static size_t growth(void) {
    size_t fits = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) / 2 / (THREADS * GROWN);
    return fits < GROWTH ? fits : GROWTH;
}

// Takes address space all the time: whoever forks meanwhile may do so while these threads have more of it made accessible.
static void *grow(void *argument) {
    (void)argument;
    for (size_t i = 0; i < growth(); i++) {
        CHECK(malloc(GROWN));
        // A thread that others take the CPU from is in the middle of that for a while.
        if (i % 4 == 0) sched_yield();
        atomic_fetch_add(&rounds_done, 1);
    }
    return NULL;
}

static void beside_growth(void) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, grow, NULL) == 0);
    for (int round = 0; atomic_load(&rounds_done) < THREADS * growth(); round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20 * patience());
            for (int i = 0; i < 4; i++) CHECK(malloc(GROWN));
            _exit(round % 100);
        }
        expect_status(child, round % 100);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void as_child(void) {
    char *block = calloc(1, 8 * MIB);
    CHECK(block && all_zero(block, 8 * MIB));
    free(block);
    exit(33);
}

int main(int count, char **arguments) {
    const char *part = count > 1 ? arguments[1] : "all";
    if (!strcmp(part, "child")) as_child();
    alarm(90 * patience());
    bool all = !strcmp(part, "all");
    if (!strcmp(part, "handlers")) {
        // Registered before the first large block.
        CHECK(pthread_atfork(allocating_handler, allocating_handler, allocating_handler) == 0);
        large_and_live(64 * MIB);
        with_handlers();
        return 0;
    }
    if (all || !strcmp(part, "daemon")) {
        daemonizing(true);
        daemonizing(false);
    }
    live_block = malloc(LIVE);
    CHECK(live_block);
    fill(live_block, LIVE, 4711, true);
    if (all || !strcmp(part, "little")) inheriting_little();
    if (all || !strcmp(part, "descriptors")) inheriting_descriptors();
    if (all || !strcmp(part, "protect")) after_protecting();
    if (!strcmp(part, "streams")) with_streams();
    if (!strcmp(part, "growing")) {
        for (int round = 0; round < 40; round++) {
            pid_t child = fork();
            if (child == 0) {
                beside_growth();
                _exit(0);
            }
            expect_status(child, 0);
        }
    }
    if (all || !strcmp(part, "quiet")) {
        forking(15);
        sharing_memory(5, arguments[0]);
    }
    if (all || !strcmp(part, "storm")) {
        pthread_t threads[THREADS];
        for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
        forking(60);
        sharing_memory(15, arguments[0]);
        atomic_store(&done, true);
        for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        printf("%zu rounds of other threads\n", atomic_load(&rounds_done));
    }
    CHECK(holds(live_block, LIVE, 4711, true));
    return 0;
}
