// A process that does everything to its huge pages that may be in the way of somebody who trims them: unmaps them, moves them, protects
// them, locks them, forks, runs itself anew, and ends. Checks what it wrote all the time. restless ROUNDS
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HUGE = 2 << 20, PAGES = 16, STRIDE = 50 << 10 };

#define CHECK(what) do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static void check(const char *start) {
    for (size_t at = 0; at < (size_t)PAGES * HUGE; at += STRIDE) CHECK(start[at] == 'Z' && (!at || start[at - 1] == 0));
}

static char *sparse(void) {
    size_t bytes = (size_t)PAGES * HUGE;
    char *start = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    char *aligned = (char *)(((uintptr_t)start + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    CHECK(!madvise(aligned, bytes, MADV_HUGEPAGE));
    for (size_t at = 0; at < bytes; at += STRIDE) aligned[at] = 'Z';
    return aligned;
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 0;
    size_t bytes = (size_t)PAGES * HUGE;
    setvbuf(stdout, NULL, _IONBF, 0);
    char *start = sparse();
    usleep(3000);
    check(start);
    // A child that writes to what it shares, and one that ends at once.
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        for (size_t at = 0; at < bytes; at += STRIDE) start[at] = 'C';
        usleep(2000);
        for (size_t at = 0; at < bytes; at += STRIDE) CHECK(start[at] == 'C');
        _exit(0);
    }
    check(start);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    check(start);
    // To another place and back to being writable.
    char *elsewhere = mmap(NULL, bytes + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(elsewhere != MAP_FAILED);
    elsewhere = (char *)(((uintptr_t)elsewhere + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    CHECK(mremap(start, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere) == elsewhere);
    check(elsewhere);
    CHECK(!mprotect(elsewhere, bytes, PROT_NONE));
    usleep(1000);
    CHECK(!mprotect(elsewhere, bytes, PROT_READ | PROT_WRITE));
    check(elsewhere);
    CHECK(!mlock(elsewhere, bytes / 2));
    check(elsewhere);
    CHECK(!munlock(elsewhere, bytes / 2));
    CHECK(!munmap(elsewhere, bytes / 2));
    CHECK(!madvise(elsewhere + bytes / 2, bytes / 2, MADV_DONTNEED));
    for (size_t at = bytes / 2; at < bytes; at += 4096) CHECK(elsewhere[at] == 0);
    if (rounds > 1) {
        char text[16];
        snprintf(text, sizeof text, "%d", rounds - 1);
        execl("/proc/self/exe", arguments[0], text, (char *)NULL);
        CHECK(!"exec");
    }
    puts("done");
    return 0;
}
