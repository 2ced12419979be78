// Prints the peak resident memory, in KiB, of one pattern of use; whoever runs it compares it with and without Pagecrew.
#include "check.h"
#include <sys/resource.h>

static void touch(char *block, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE) block[at] = 1;
}

static char *fresh(size_t bytes) {
    char *block = malloc(bytes);
    CHECK(block);
    touch(block, bytes);
    return block;
}

// Each block is a little larger than the last one, which is freed first: nothing that is retained fits.
static void growing(void) {
    char *block = NULL;
    for (size_t bytes = 20 * MIB; bytes < 400 * MIB; bytes += 7 * MIB) {
        free(block);
        block = fresh(bytes);
    }
    free(block);
}

// The same by realloc.
static void growing_by_realloc(void) {
    char *block = NULL;
    for (size_t bytes = 3 * MIB; bytes < 400 * MIB; bytes += bytes / 3) {
        block = realloc(block, bytes);
        CHECK(block);
        touch(block, bytes);
    }
    free(block);
}

// Two buffers in turn, of changing sizes.
static void ping_pong(void) {
    char *blocks[2] = {NULL, NULL};
    for (int round = 0; round < 200; round++) {
        free(blocks[round % 2]);
        blocks[round % 2] = fresh((size_t)(100 + round % 7 * 13) * MIB);
    }
    free(blocks[0]);
    free(blocks[1]);
}

// Many blocks just over one huge page.
static void odd_sizes(void) {
    enum { COUNT = 100 };
    static char *blocks[COUNT];
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < COUNT; i++) blocks[i] = fresh(2150 * KIB + (size_t)(i * 37 + round * 11) % 1800 * KIB);
        for (int i = 0; i < COUNT; i++) free(blocks[(i * 7) % COUNT]);
    }
}

// Blocks of one size are freed for blocks of another, over and over.
static void changing_sizes(void) {
    static const size_t sizes[] = {1300 * KIB, 33 * MIB, 2100 * KIB, 5 * MIB, 90 * KIB, 17 * MIB};
    static char *blocks[4096];
    for (size_t phase = 0; phase < 36; phase++) {
        size_t count = 0, each = sizes[phase % 6];
        while ((count + 1) * each <= 300 * MIB && count < 4096) blocks[count++] = fresh(each);
        for (size_t i = 0; i < count; i++) free(blocks[i]);
    }
}

// Blocks below the size of a huge page, which are packed, and above it, in turn.
static void two_kinds(void) {
    static char *blocks[300];
    for (size_t phase = 0; phase < 8; phase++) {
        size_t count = 0, each = phase % 2 ? 4 * MIB : 1900 * KIB;
        while ((count + 1) * each <= 300 * MIB) blocks[count++] = fresh(each);
        for (size_t i = 0; i < count; i++) free(blocks[i]);
    }
}

// Tables of which little is touched, as hash tables and column stores make them.
static void sparse(void) {
    for (int round = 0; round < 10; round++) {
        char *table = calloc(1, 512 * MIB);
        CHECK(table);
        for (size_t at = 0; at < 512 * MIB; at += 64 * PAGE) table[at] = 1;
        free(table);
    }
}

// Half of the memory is in small blocks, which stay with the malloc below.
static void mixed(void) {
    enum { SMALL = 40000 };
    static char *small[SMALL];
    for (int round = 0; round < 10; round++) {
        char *block = fresh(100 * MIB);
        free(block);
        for (int i = 0; i < SMALL; i++) small[i] = memset(malloc(3000), 1, 3000);
        block = fresh(50 * MIB);
        for (int i = 0; i < SMALL; i++) free(small[i]);
        free(block);
    }
}

static void *in_thread(void *argument) {
    uint64_t state = (uintptr_t)argument;
    for (int i = 0; i < 300; i++) free(fresh(THRESHOLD + random_word(&state) % (40 * MIB)));
    return NULL;
}

// Its peak is a matter of chance without Pagecrew, too, so that many rounds have to come near the sum.
static void threads(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, in_thread, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static const struct {
    const char *name;
    void (*run)(void);
} patterns[] = {{"growing", growing},       {"growing-by-realloc", growing_by_realloc},
                {"ping-pong", ping_pong},   {"odd-sizes", odd_sizes},
                {"changing", changing_sizes}, {"sparse", sparse},
                {"two-kinds", two_kinds},
                {"mixed", mixed},           {"threads", threads}};

int main(int count, char **arguments) {
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        if (count == 1) puts(patterns[i].name);
        if (count == 2 && !strcmp(arguments[1], patterns[i].name)) {
            patterns[i].run();
            struct rusage usage;
            CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
            printf("%ld\n", usage.ru_maxrss);
        }
    }
    return 0;
}
