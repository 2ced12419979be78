// After a burst of 2 GiB the program sleeps, without another call: what is free goes back, and helpers end.
#include "check.h"
#include <dirent.h>

static int threads_now(void) { return (int)status_field("Threads"); }

int main(int count, char **arguments) {
    unsigned seconds = count > 1 ? (unsigned)atoi(arguments[1]) : 30;
    // What is live at the end: 100 MiB in one block, 30 MiB in blocks of the malloc below.
    char *live_block = malloc(100 * MIB);
    fill(live_block, 100 * MIB, 1, true);
    static char *small[1000];
    for (int i = 0; i < 1000; i++) CHECK((small[i] = memset(malloc(30 * KIB), i, 30 * KIB)));
    size_t live_bytes = resident();
    for (int round = 0; round < 3; round++) {
        char *blocks[64];
        for (int i = 0; i < 64; i++) {
            blocks[i] = round % 2 ? calloc(1, 32 * MIB) : malloc(32 * MIB);
            CHECK(blocks[i]);
            memset(blocks[i], 1, 32 * MIB);
        }
        for (int i = 0; i < 64; i++) free(blocks[i]);
    }
    printf("%zu MiB live, %zu MiB after the burst, %d threads\n", live_bytes / MIB, resident() / MIB, threads_now());
    uint64_t start = now_ns(), back = 0, alone = 0;
    while (now_ns() < start + seconds * 1000000000ull) {
        // The sleep itself takes no call that Pagecrew could hear of; reading /proc takes none either.
        sleep_ms(250);
        if (!back && resident() <= live_bytes + 64 * MIB) back = now_ns() - start;
    }
    size_t after = resident();
    uint64_t end = now_ns() + 45000000000u;
    while (under_pagecrew() && now_ns() < end && threads_now() > 1) sleep_ms(250);
    alone = now_ns() - start;
    printf("%zu MiB after %u s; back after %.1f s, alone after %.1f s\n", after / MIB, seconds, (double)back / 1e9, (double)alone / 1e9);
    CHECK(after <= live_bytes + 64 * MIB);
    CHECK(threads_now() == 1);
    CHECK(holds(live_block, 100 * MIB, 1, true));
    return 0;
}
