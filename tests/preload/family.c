// Every function of the malloc family, as the standards say, below, at and above the threshold.
#include "check.h"

static const size_t sizes[] = {1,           100,           PAGE,         THRESHOLD - 1, THRESHOLD,     THRESHOLD + 1,
                               70001,       100 * KIB,     256 * KIB,    MIB - 1,       MIB,           MIB + 1,
                               2 * MIB - 1, 2 * MIB,       2 * MIB + 1,  5 * MIB - 7,   33 * MIB + 11, 64 * MIB};
#define SIZES (sizeof sizes / sizeof *sizes)

static volatile size_t largest = SIZE_MAX;

// Other mallocs than glibc's change errno as they like; what they serve themselves is not looked at that closely.
static bool glibc_below = true;

// Runs an allocation of `size` bytes and checks that a success keeps errno.
#define KEEPING(size, expression) \
    ({ \
        errno = 77; \
        void *result_ = (expression); \
        CHECK(result_); \
        CHECK(errno == 77 || ((size) < THRESHOLD && !glibc_below)); \
        result_; \
    })

#define REFUSED(expression) \
    do { \
        errno = 0; \
        CHECK((expression) == NULL); \
        CHECK(errno == ENOMEM); \
    } while (0)

#define REFUSED_BELOW(expression) \
    do { \
        errno = 0; \
        CHECK((expression) == NULL); \
        CHECK(errno == ENOMEM || !glibc_below); \
    } while (0)

static bool aligned(const void *pointer, size_t to) { return (uintptr_t)pointer % to == 0; }

// Checks a fresh block, uses all of it, and frees it.
static void use(void *block, size_t size) {
    CHECK(aligned(block, _Alignof(max_align_t)) || size < sizeof(max_align_t));
    CHECK(malloc_usable_size(block) >= size);
    fill(block, size, size, true);
    CHECK(holds(block, size, size, true));
    errno = 77;
    free(block);
    CHECK(errno == 77 || size < THRESHOLD);
}

static void one_of_each(void) {
    for (size_t i = 0; i < SIZES; i++) {
        size_t size = sizes[i];
        // Twice, so that the second one is made of what the first one left.
        for (int round = 0; round < 2; round++) {
            use(KEEPING(size, malloc(size)), size);
            char *zeroes = KEEPING(size, calloc(1, size));
            CHECK(all_zero(zeroes, size));
            use(zeroes, size);
            zeroes = KEEPING(size, calloc(size, 1));
            CHECK(all_zero(zeroes, size));
            use(zeroes, size);
            use(KEEPING(size, realloc(NULL, size)), size);
            use(KEEPING(size, reallocarray(NULL, size, 1)), size);
            void *page = KEEPING(size, valloc(size));
            CHECK(aligned(page, PAGE));
            use(page, size);
            page = KEEPING(size, pvalloc(size));
            CHECK(aligned(page, PAGE));
            use(page, (size + PAGE - 1) & ~(PAGE - 1));
        }
    }
}

static void zero_sizes(void) {
    free(NULL);
    CHECK(malloc_usable_size(NULL) == 0);
    void *blocks[] = {malloc(0), calloc(0, 5), calloc(5, 0), realloc(NULL, 0)};
    for (size_t i = 0; i < 4; i++) free(blocks[i]);
    void *block = malloc(3 * MIB);
    CHECK(realloc(block, 0) == NULL);
    block = (void *)1;
    CHECK(posix_memalign(&block, 64, 0) == 0);
    free(block);
}

static void impossible_sizes(void) {
    REFUSED(malloc(largest));
    REFUSED(malloc(largest - 100));
    REFUSED(malloc(largest / 2 + 1));
    REFUSED(calloc(largest, 2));
    REFUSED(calloc(largest / 2, 3));
    REFUSED(calloc(1, largest));
    REFUSED(calloc(largest >> 31, largest >> 31));
    REFUSED(realloc(NULL, largest));
    REFUSED(reallocarray(NULL, largest, 4));
    REFUSED_BELOW(memalign(PAGE, largest - PAGE));
    REFUSED_BELOW(aligned_alloc(PAGE, largest & ~(PAGE - 1)));
    REFUSED_BELOW(pvalloc(largest));
    REFUSED_BELOW(valloc(largest - 100));
    void *place = (void *)77;
    CHECK(posix_memalign(&place, PAGE, largest - PAGE) == ENOMEM && place == (void *)77);
    // What can't be resized stays as it was.
    for (size_t size = 100; size <= 100 * MIB; size *= 100) {
        char *block = malloc(size);
        fill(block, size, 5, true);
        REFUSED(realloc(block, largest));
        REFUSED(realloc(block, largest / 2 + 1));
        REFUSED(reallocarray(block, largest / 8, 9));
        CHECK(holds(block, size, 5, true));
        free(block);
    }
}

static void alignments(void) {
    for (size_t align = 8; align <= GIB; align *= 2) {
        for (size_t size = 2 * MIB; size <= 9 * MIB; size += 3 * MIB + 333) {
            void *block = (void *)1;
            errno = 77;
            CHECK(posix_memalign(&block, align, size) == 0 && errno == 77 && block && aligned(block, align));
            use(block, size);
            block = KEEPING(size, aligned_alloc(align, (size + align - 1) / align * align));
            CHECK(aligned(block, align));
            *(char *)block = 1;
            free(block);
            block = KEEPING(size, memalign(align, size));
            CHECK(aligned(block, align));
            use(block, size);
        }
        // A small request with a large alignment may be too much for the malloc below.
        void *small = memalign(align, 100);
        CHECK(small ? aligned(small, align) : align > 64 * KIB);
        free(small);
        // Several at a time don't overlap.
        char *blocks[4];
        for (int i = 0; i < 4; i++) {
            blocks[i] = KEEPING(2 * MIB, memalign(align, 2 * MIB));
            memset(blocks[i], i, 2 * MIB);
        }
        for (int i = 0; i < 4; i++) {
            CHECK(blocks[i][0] == i && blocks[i][2 * MIB - 1] == i);
            free(blocks[i]);
        }
    }
    // An aligned block that grows keeps its contents.
    char *block = memalign(64 * MIB, 3 * MIB);
    fill(block, 3 * MIB, 9, true);
    block = realloc(block, 40 * MIB);
    CHECK(holds(block, 3 * MIB, 9, true));
    free(block);
    void *place = (void *)77;
    CHECK(posix_memalign(&place, 3, 2 * MIB) == EINVAL && place == (void *)77);
    CHECK(posix_memalign(&place, 4, 2 * MIB) == EINVAL && place == (void *)77);
    CHECK(posix_memalign(&place, 0, 2 * MIB) == EINVAL && place == (void *)77);
    CHECK(posix_memalign(&place, 24, 2 * MIB) == EINVAL && place == (void *)77);
}

// Every step of a long way up and down, across the threshold and the size of a huge page.
static void resizing(void) {
    static const size_t way[] = {100,         900 * KIB, THRESHOLD,   1500 * KIB, 3 * MIB,  2 * MIB,  100 * MIB, 101 * MIB, 5 * MIB,
                                 600 * KIB,   400 * KIB, 4 * MIB,     1,          50 * MIB, 49 * MIB, 2 * MIB,   2 * MIB + 1,
                                 1 * MIB - 1, 1 * MIB,   300 * MIB,   7 * MIB,    10};
    for (int round = 0; round < 3; round++) {
        size_t size = 64;
        char *block = malloc(size);
        // Something in the way, so that not everything grows where it is.
        void *obstacle = round ? malloc(2 * MIB) : NULL;
        fill(block, size, 1, true);
        for (size_t i = 0; i < sizeof way / sizeof *way; i++) {
            // The pattern of a word does not depend on the size, so what is kept is the shorter of both, in whole words.
            size_t kept = (way[i] < size ? way[i] : size) & ~(size_t)7;
            block = KEEPING(way[i] < size ? way[i] : size, round == 2 ? reallocarray(block, way[i], 1) : realloc(block, way[i]));
            size = way[i];
            CHECK(malloc_usable_size(block) >= size);
            CHECK(holds(block, kept, 1, true));
            fill(block, size, 1, true);
            if (round == 1) {
                free(obstacle);
                obstacle = malloc(2 * MIB);
            }
        }
        free(block);
        free(obstacle);
    }
    // Doubling, as a vector does.
    size_t size = 1000;
    char *block = malloc(size);
    fill(block, size, 3, true);
    while (size < 256 * MIB) {
        block = KEEPING(size, realloc(block, 2 * size));
        CHECK(holds(block, size, 3, false));
        size *= 2;
        fill(block, size, 3, false);
    }
    free(block);
}

static void usable_sizes(void) {
    for (size_t i = 0; i < SIZES; i++) {
        char *block = malloc(sizes[i]);
        size_t usable = malloc_usable_size(block);
        // All of what is said to be usable is.
        memset(block, 7, usable);
        block = realloc(block, usable + 5 * MIB);
        CHECK(block[0] == 7 && block[usable - 1] == 7);
        free(block);
    }
}

// Blocks of one medium size begin at different lines of their pages, and where one begins stays so as it grows and shrinks.
static void lines(void) {
    if (!under_pagecrew()) return;
    char *blocks[32];
    for (size_t size = 192 * KIB; size <= MIB; size += 104 * KIB) {
        bool seen[PAGE / 64] = {false};
        int different = 0;
        for (int i = 0; i < 32; i++) {
            blocks[i] = malloc(size);
            CHECK(aligned(blocks[i], 64));
            size_t line = (uintptr_t)blocks[i] % PAGE / 64;
            different += !seen[line];
            seen[line] = true;
        }
        CHECK(different >= 8);
        for (int i = 0; i < 32; i++) {
            size_t line = (uintptr_t)blocks[i] % PAGE;
            for (size_t longer = size; longer <= 48 * MIB; longer *= 3) {
                fill(blocks[i], size, 9, true);
                blocks[i] = realloc(blocks[i], longer);
                CHECK(malloc_usable_size(blocks[i]) >= longer && holds(blocks[i], size, 9, false));
                memset(blocks[i] + longer - PAGE, 1, PAGE);
            }
            CHECK((uintptr_t)blocks[i] % PAGE == line);
            blocks[i] = realloc(blocks[i], THRESHOLD);
            CHECK(holds(blocks[i], THRESHOLD, 9, true));
        }
        for (int i = 0; i < 32; i++) free(blocks[i]);
    }
}

static void sized_frees(void) {
    void (*free_sized)(void *, size_t) = dlsym(RTLD_DEFAULT, "free_sized");
    void (*free_aligned_sized)(void *, size_t, size_t) = dlsym(RTLD_DEFAULT, "free_aligned_sized");
    if (!under_pagecrew() && !(free_sized && free_aligned_sized)) return;
    CHECK(free_sized && free_aligned_sized);
    for (size_t i = 0; i < SIZES; i++) {
        errno = 77;
        free_sized(malloc(sizes[i]), sizes[i]);
        free_sized(calloc(1, sizes[i]), sizes[i]);
        size_t whole = (sizes[i] + 63) & ~(size_t)63;
        free_aligned_sized(aligned_alloc(64, whole), 64, whole);
        CHECK(errno == 77 || !glibc_below);
    }
    free_sized(NULL, 5);
    free_aligned_sized(NULL, 8, 5);
}

// Blocks of one thread are freed by another one; a thread with the smallest stack has room for it.
static void *free_here(void *block) {
    void *mine = malloc(3 * MIB);
    CHECK(mine);
    memset(mine, 1, 3 * MIB);
    free(block);
    mine = realloc(mine, 64 * MIB);
    CHECK(mine);
    free(mine);
    // Long enough for everything that happens only now and then.
    for (int i = 0; i < 20; i++) {
        char *table = calloc(1, 32 * MIB);
        CHECK(table);
        memset(table, 1, 32 * MIB);
        free(table);
    }
    mine = calloc(1, 10 * MIB);
    CHECK(mine && all_zero(mine, 10 * MIB));
    return mine;
}

static void small_stacks(void) {
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN) == 0);
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        void *block = malloc(5 * MIB), *result;
        CHECK(pthread_create(&thread, &attributes, free_here, block) == 0);
        CHECK(pthread_join(thread, &result) == 0);
        free(result);
        // Past the intervals at which the process's own size and the machine's state are read again.
        sleep_ms(i % 4 ? 2 : 110);
    }
    pthread_attr_destroy(&attributes);
}

int main(void) {
    const char *below = getenv("MALLOC_BELOW");
    glibc_below = !below || !strcmp(below, "glibc");
    one_of_each();
    zero_sizes();
    impossible_sizes();
    alignments();
    resizing();
    usable_sizes();
    lines();
    sized_frees();
    small_stacks();
    return 0;
}
