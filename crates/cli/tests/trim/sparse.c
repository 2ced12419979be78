// Huge pages with one byte in every so many, as the kernel's own test of its shrinker has them. Says "ready", waits for the end of its
// input, and checks that every byte is what it was. sparse MIB STRIDE [locked|shared]
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { HUGE = 2 << 20 };

int main(int count, char **arguments) {
    size_t bytes = strtoul(arguments[1], NULL, 10) << 20, stride = strtoul(arguments[2], NULL, 10);
    const char *manner = count > 3 ? arguments[3] : "";
    char *start = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return 1;
    start = (char *)(((uintptr_t)start + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    if (madvise(start, bytes, MADV_HUGEPAGE)) return 1;
    for (size_t at = 0; at < bytes; at += stride) start[at] = (char)(at / stride | 1);
    if (!strcmp(manner, "locked") && mlock(start, bytes)) return 1;

    if (!strcmp(manner, "shared") && !fork()) {
        // Gone with its parent.
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pause();
    }
    printf("ready %p\n", (void *)start);
    fflush(stdout);
    while (getchar() != EOF) {}
    for (size_t at = 0; at < bytes; at++) {
        char expected = at % stride ? 0 : (char)(at / stride | 1);
        if (start[at] != expected) {
            printf("lost at %zu\n", at);
            return 1;
        }
    }
    puts("intact");
    return 0;
}
