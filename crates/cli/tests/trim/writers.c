// Threads that write to sparse huge pages and check every byte that they wrote before, while the pages are split and made huge again:
// writers MIB THREADS WRITES. Half of what is written is zero, so that subpages become zero and cease to be.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { HUGE = 2 << 20, PAGE = 4096, TOUCHED = 40, EVERY = 1 << 14 };

static unsigned char *start, *shadow;
static size_t huge_pages, threads, writes;
static atomic_size_t lost, collapsed;

// The slot number `slot` of thread `thread`: a byte of its own in one of the subpages that are in use.
static size_t place(size_t thread, size_t slot) {
    size_t page = slot / TOUCHED, subpage = slot % TOUCHED * 12;
    return page * HUGE + subpage * PAGE + (thread * 251 + slot * 7) % (PAGE / threads) + thread * (PAGE / threads);
}

static void *write_and_check(void *argument) {
    size_t thread = (size_t)argument, slots = huge_pages * TOUCHED;
    uint64_t random = thread * 0x9e3779b97f4a7c15u + 1;
    for (size_t write = 0; write < writes / threads; write++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        size_t slot = (random >> 8) % slots, at = place(thread, slot);
        volatile unsigned char *byte = start + at;
        unsigned char *expected = shadow + thread * slots + slot;
        if (*byte != *expected) atomic_fetch_add(&lost, 1);
        *byte = *expected = random & 1 ? (unsigned char)(random >> 32) : 0;
        if (write % EVERY == 0) {
            size_t page = random / EVERY % huge_pages;
            if (!madvise(start + page * HUGE, HUGE, MADV_COLLAPSE)) atomic_fetch_add(&collapsed, 1);
        }
    }
    return NULL;
}

static void *map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(1);
    return memory;
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    size_t bytes = strtoul(arguments[1], NULL, 10) << 20;
    threads = strtoul(arguments[2], NULL, 10), writes = strtoul(arguments[3], NULL, 10);
    huge_pages = bytes / HUGE;
    start = (unsigned char *)(((uintptr_t)map(bytes + HUGE) + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    if (madvise(start, bytes, MADV_HUGEPAGE)) return 1;
    for (size_t page = 0; page < huge_pages; page++) start[page * HUGE] = 0;
    shadow = map(threads * huge_pages * TOUCHED);
    puts("ready");
    fflush(stdout);
    pthread_t all[64];
    for (size_t thread = 0; thread < threads; thread++)
        if (pthread_create(&all[thread], NULL, write_and_check, (void *)thread)) return 1;
    for (size_t thread = 0; thread < threads; thread++) pthread_join(all[thread], NULL);
    for (size_t thread = 0; thread < threads; thread++)
        for (size_t slot = 0; slot < huge_pages * TOUCHED; slot++)
            if (start[place(thread, slot)] != shadow[thread * huge_pages * TOUCHED + slot]) atomic_fetch_add(&lost, 1);
    printf("%zu lost, %zu made huge again\n", lost, collapsed);
    return lost != 0;
}
