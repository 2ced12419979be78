// A program in a memory cgroup, whose limit whoever starts it has set. `churn` stays within its peak, over and over; `exceed` goes
// on until it is killed, and says how far it came.
#include "check.h"

// Everything is touched: what counts against a cgroup is pages.
static char *touched(size_t bytes, bool zeroed) {
    char *block = zeroed ? calloc(1, bytes) : malloc(bytes);
    CHECK(block);
    if (zeroed) CHECK(is_zero(block, bytes, false));
    memset(block, (int)(bytes / PAGE) | 1, bytes);
    return block;
}

// Up to `peak` bytes live, in blocks of changing sizes: each phase leaves holes that the next one's blocks don't fit in.
static void churn(size_t peak, unsigned seconds) {
    uint64_t state = 1, end = now_ns() + seconds * 1000000000ull;
    static const size_t sizes[] = {1300 * KIB, 2100 * KIB, 3 * MIB, 3900 * KIB, 5 * MIB, 17 * MIB, 33 * MIB, 90 * KIB};
    enum { MOST = 4096 };
    static char *blocks[MOST];
    size_t phases = 0;
    // The whole peak once, in one block, so that it is the same whatever the phases below look like.
    free(touched(peak, false));
    while (now_ns() < end) {
        size_t each = sizes[phases % (sizeof sizes / sizeof *sizes)], live = 0, count = 0;
        while (live + each <= peak - 8 * MIB && count < MOST) {
            blocks[count++] = touched(each, random_word(&state) % 2);
            live += each;
            // Now and then one is freed and another one made in its place.
            if (random_word(&state) % 4 == 0) {
                size_t which = random_word(&state) % count;
                free(blocks[which]);
                blocks[which] = touched(each, false);
            }
        }
        // In another order than they were made in.
        for (size_t i = 0; i < count; i += 2) free(blocks[i]);
        for (size_t i = 1; i < count; i += 2) free(blocks[i]);
        phases++;
    }
    printf("%zu phases\n", phases);
}

static void exceed(size_t step) {
    for (size_t total = 0;;) {
        // Free memory is retained at every moment.
        free(touched(4 * step, false));
        touched(step, false);
        total += step;
        char text[32];
        int length = snprintf(text, sizeof text, "%zu\n", total / MIB);
        CHECK(write(1, text, (size_t)length) == length);
    }
}

int main(int count, char **arguments) {
    CHECK(count == 4);
    size_t bytes = strtoul(arguments[2], NULL, 10) * MIB;
    if (!strcmp(arguments[1], "churn")) churn(bytes, (unsigned)atoi(arguments[3]));
    if (!strcmp(arguments[1], "exceed")) exceed(bytes);
    return 0;
}
