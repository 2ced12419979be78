// A million random operations in eight threads. Blocks change hands, every block's contents are checked when it is resized or
// freed: a word in each page and both ends each time, every byte of some.
#include "check.h"

#define THREADS 8
#define SLOTS 16
#define MAILBOXES 32

struct block {
    char *start;
    size_t size;
    uint64_t seed;
    bool all;
};

static _Atomic(struct block *) mailboxes[MAILBOXES];
static size_t operations = 1000000;
static atomic_size_t counts[8];

static size_t random_size(uint64_t *state) {
    unsigned kind = random_word(state) % 1000, word = random_word(state);
    if (kind < 700) return word % (64 * KIB);
    if (kind < 975) return 512 * KIB + word % (1700 * KIB);
    if (kind < 998) return 2 * MIB + word % (6 * MIB);
    return 8 * MIB + word % (24 * MIB);
}

static void check_block(const struct block *block) { CHECK(holds(block->start, block->size, block->seed, block->all)); }

static void fill_block(struct block *block, uint64_t *state) {
    block->seed = ((uint64_t)random_word(state) << 20) ^ random_word(state);
    block->all = random_word(state) % 32 == 0;
    fill(block->start, block->size, block->seed, block->all);
}

static void allocate(struct block *block, uint64_t *state) {
    block->size = random_size(state);
    unsigned kind = random_word(state) % 8;
    if (kind < 4) {
        block->start = malloc(block->size);
    } else if (kind < 7) {
        block->start = calloc(1, block->size);
        CHECK(block->start || !block->size);
        CHECK(random_word(state) % 16 ? is_zero(block->start, block->size, false) : all_zero(block->start, block->size));
        atomic_fetch_add(&counts[1], 1);
    } else {
        size_t align = (size_t)16 << random_word(state) % 19;
        block->start = block->size < 16 ? malloc(block->size) : memalign(align, block->size);
        CHECK(block->size < 16 || (uintptr_t)block->start % align == 0);
        atomic_fetch_add(&counts[2], 1);
    }
    CHECK(block->start || !block->size);
    fill_block(block, state);
    atomic_fetch_add(&counts[0], 1);
}

static void release(struct block *block) {
    check_block(block);
    free(block->start);
    block->start = NULL;
    block->size = 0;
    atomic_fetch_add(&counts[3], 1);
}

static void resize(struct block *block, uint64_t *state) {
    check_block(block);
    size_t size = random_size(state) + 1, kept = (size < block->size ? size : block->size) & ~(size_t)7;
    block->start = realloc(block->start, size);
    CHECK(block->start);
    if (block->all) {
        CHECK(holds(block->start, kept, block->seed, true));
    } else {
        // The words that a quick look at the old size has covered.
        for (size_t word = 0; word < kept / 8; word += 512) {
            if (word == 0 || word + 32 < block->size / 8) CHECK(((uint64_t *)block->start)[word] == pattern(block->seed, word));
        }
    }
    block->size = size;
    fill_block(block, state);
    atomic_fetch_add(&counts[4], 1);
}

// Swaps a block with what another thread left.
static void hand_over(struct block *block, uint64_t *state) {
    struct block *parcel = malloc(sizeof *parcel);
    CHECK(parcel);
    *parcel = *block;
    parcel = atomic_exchange(&mailboxes[random_word(state) % MAILBOXES], parcel);
    *block = parcel ? *parcel : (struct block){0};
    free(parcel);
    atomic_fetch_add(&counts[5], 1);
}

static void *work(void *argument) {
    uint64_t state = (uintptr_t)argument * 7919 + 17;
    struct block slots[SLOTS] = {0};
    for (size_t i = 0; i < operations / THREADS; i++) {
        struct block *block = &slots[random_word(&state) % SLOTS];
        unsigned action = random_word(&state) % 16;
        if (!block->start) {
            allocate(block, &state);
        } else if (action < 9) {
            release(block);
        } else if (action < 13) {
            resize(block, &state);
        } else {
            hand_over(block, &state);
        }
    }
    for (size_t i = 0; i < SLOTS; i++) {
        if (slots[i].start) release(&slots[i]);
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count > 1) operations = strtoul(arguments[1], NULL, 10);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < MAILBOXES; i++) {
        if (mailboxes[i]) {
            release(mailboxes[i]);
            free(mailboxes[i]);
        }
    }
    printf("%zu allocations (%zu zeroed, %zu aligned), %zu frees, %zu resizes, %zu handed over\n", counts[0], counts[1], counts[2],
           counts[3], counts[4], counts[5]);
    return 0;
}
