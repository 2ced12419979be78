// What a program does to its own memory with madvise, mlock and mprotect is over when the memory is freed: the next owner finds
// ordinary memory.
#include "check.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

// Of libnuma, which need not be here.
long mbind(void *address, unsigned long len, int mode, const unsigned long *nodes, unsigned long count, unsigned flags) __attribute__((weak));
#define MPOL_BIND_ 2
#define MPOL_F_ADDR_ 2

#ifndef MADV_COLD
#define MADV_COLD 20
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#define MADV_DONTNEED_LOCKED_ 24
#define MADV_COLLAPSE_ 25

static const int kinds[] = {MADV_NORMAL,      MADV_RANDOM,        MADV_SEQUENTIAL,     MADV_WILLNEED,          MADV_DONTNEED,
                            MADV_FREE,        MADV_DONTFORK,      MADV_DOFORK,         MADV_MERGEABLE,         MADV_UNMERGEABLE,
                            MADV_HUGEPAGE,    MADV_NOHUGEPAGE,    MADV_DONTDUMP,       MADV_DODUMP,            MADV_WIPEONFORK,
                            MADV_KEEPONFORK,  MADV_COLD,          MADV_PAGEOUT,        MADV_POPULATE_READ,     MADV_POPULATE_WRITE,
                            MADV_DONTNEED_LOCKED_, MADV_COLLAPSE_};
#define KINDS (sizeof kinds / sizeof *kinds)

static const size_t sizes[] = {1300 * KIB, 2 * MIB, 5 * MIB + 100 * KIB, 40 * MIB};
#define SIZES (sizeof sizes / sizeof *sizes)

static char *first_page(char *block) { return (char *)(((uintptr_t)block + PAGE - 1) & ~(PAGE - 1)); }
static size_t whole_pages(size_t size) { return (size - PAGE) & ~(PAGE - 1); }

// A new owner's memory: zero where that was asked for, writable, inherited by a child, and kept until it is freed.
static void ordinary(size_t size) {
    char *zeroes = calloc(1, size);
    CHECK(zeroes && all_zero(zeroes, size));
    char *block = malloc(size);
    CHECK(block);
    fill(block, size, 3, true);
    fill(zeroes, size, 4, true);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) _exit(holds(block, size, 3, true) && holds(zeroes, size, 4, true) ? 0 : 1);
    CHECK(wait_for(child) == 0);
    block = realloc(block, 2 * size);
    CHECK(block && holds(block, size & ~(size_t)7, 3, true));
    free(zeroes);
    free(block);
}

static void all_advice(void) {
    for (size_t kind = 0; kind < KINDS; kind++) {
        for (size_t i = 0; i < SIZES; i++) {
            char *block = malloc(sizes[i]);
            CHECK(block);
            fill(block, sizes[i], kind, true);
            int result = madvise(first_page(block), whole_pages(sizes[i]), kinds[kind]);
            // What the kernel can't do it refuses, as always.
            CHECK(result == 0 || errno == EINVAL || errno == EAGAIN || errno == EBUSY || errno == ENOMEM);
            bool kept = kinds[kind] != MADV_DONTNEED && kinds[kind] != MADV_FREE && kinds[kind] != MADV_DONTNEED_LOCKED_;
            if (kept) CHECK(holds(block, sizes[i], kind, true));
            if (kinds[kind] == MADV_DONTNEED) CHECK(all_zero(first_page(block), whole_pages(sizes[i])));
            fill(block, sizes[i], kind + 1, true);
            free(block);
            ordinary(sizes[i]);
        }
    }
}

// Advice on a part of a block, which is then resized.
static void advice_then_resize(void) {
    for (size_t i = 0; i < SIZES; i++) {
        char *block = malloc(sizes[i]);
        fill(block, sizes[i], 8, true);
        CHECK(madvise(first_page(block), 16 * PAGE, MADV_NOHUGEPAGE) == 0);
        CHECK(madvise(first_page(block) + 64 * PAGE, 16 * PAGE, MADV_DONTDUMP) == 0);
        block = realloc(block, 3 * sizes[i]);
        CHECK(block && holds(block, sizes[i] & ~(size_t)7, 8, true));
        block = realloc(block, sizes[i] / 2);
        CHECK(block && block[0] == (char)pattern(8, 0));
        free(block);
        ordinary(sizes[i]);
    }
}

static void locking(void) {
    long before = status_field("VmLck");
    for (size_t i = 0; i < SIZES; i++) {
        for (int way = 0; way < 3; way++) {
            char *block = malloc(sizes[i]);
            CHECK(block);
            memset(block, 1, sizes[i]);
            int result = way == 0   ? mlock(first_page(block), whole_pages(sizes[i]))
                         : way == 1 ? mlock2(first_page(block), whole_pages(sizes[i]), MLOCK_ONFAULT)
                                    : mlock(first_page(block) + 8 * PAGE, PAGE);
            if (result < 0) CHECK(errno == ENOMEM || errno == EPERM);
            if (way == 2) CHECK(munlock(first_page(block) + 8 * PAGE, PAGE) == 0);
            // Its owner frees it as it is.
            free(block);
            ordinary(sizes[i]);
        }
        // A locked block that grows stays locked and keeps its contents.
        char *block = malloc(sizes[i]);
        fill(block, sizes[i], 6, true);
        if (mlock(first_page(block), whole_pages(sizes[i])) == 0) {
            block = realloc(block, sizes[i] + 9 * MIB);
            CHECK(block && holds(block, sizes[i] & ~(size_t)7, 6, true));
        }
        free(block);
    }
    // It may take a moment where the CPUs are busy.
    long after = status_field("VmLck");
    for (int i = 0; i < 100 && after > before + 1024; i++) {
        sleep_ms(100);
        after = status_field("VmLck");
    }
    printf("locked: %ld KiB before, %ld KiB after\n", before, after);
    // glibc unmaps what it frees, so nothing stays locked.
    CHECK(after <= before + 1024);
}

static void locking_all(void) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    if (geteuid() != 0 && limit.rlim_cur != RLIM_INFINITY) return;
    size_t before = resident();
    CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    printf("mlockall: resident %zu MiB before, %zu MiB after\n", before / MIB, resident() / MIB);
    fflush(stdout);
    CHECK(resident() < before + 64 * MIB);
    for (int round = 0; round < 5; round++) {
        for (size_t i = 0; i < SIZES; i++) {
            char *block = calloc(1, sizes[i]);
            CHECK(block && all_zero(block, sizes[i]));
            fill(block, sizes[i], 2, true);
            block = realloc(block, sizes[i] * 2);
            CHECK(holds(block, sizes[i] & ~(size_t)7, 2, true));
            free(block);
        }
    }
    CHECK(resident() < before + 320 * MIB);
    CHECK(munlockall() == 0);
    ordinary(5 * MIB);
}

static void protecting(void) {
    // Freed while it can't be written, as glibc allows for what it got from mmap.
    static const int protections[] = {PROT_READ, PROT_NONE, PROT_READ | PROT_WRITE | PROT_EXEC};
    for (size_t i = 0; i < SIZES; i++) {
        for (int p = 0; p < 3; p++) {
            for (int part = 0; part < 3; part++) {
                char *block = malloc(sizes[i]);
                CHECK(block);
                fill(block, sizes[i], 5, true);
                char *at = part == 0 ? first_page(block) + PAGE : part == 1 ? first_page(block) + 100 * PAGE : first_page(block) + PAGE;
                size_t bytes = part == 2 ? whole_pages(sizes[i]) - PAGE : 16 * PAGE;
                CHECK(mprotect(at, bytes, protections[p]) == 0);
                if (protections[p] != PROT_NONE) CHECK(holds(block, sizes[i], 5, true));
                free(block);
                ordinary(sizes[i]);
            }
        }
    }
}

// Memory bound to a node, with a key that forbids writing, or of which another thread would handle the faults.
static void binding(void) {
    unsigned long nodes = 1;
    for (size_t i = 0; mbind && i < SIZES; i++) {
        char *block = malloc(sizes[i]);
        CHECK(block);
        if (mbind(first_page(block), whole_pages(sizes[i]), MPOL_BIND_, &nodes, 8, 0) != 0) return;
        memset(block, 1, sizes[i]);
        free(block);
        block = malloc(sizes[i]);
        CHECK(block);
        int policy = -1;
        CHECK(syscall(SYS_get_mempolicy, &policy, NULL, 0, first_page(block), MPOL_F_ADDR_) == 0);
        CHECK(policy != MPOL_BIND_);
        free(block);
        ordinary(sizes[i]);
    }
}

static void keys(void) {
    int key = pkey_alloc(0, PKEY_DISABLE_WRITE);
    for (size_t i = 0; key >= 0 && i < SIZES; i++) {
        char *block = malloc(sizes[i]);
        CHECK(block);
        CHECK(pkey_mprotect(first_page(block), whole_pages(sizes[i]), PROT_READ | PROT_WRITE, key) == 0);
        free(block);
        ordinary(sizes[i]);
    }
}

static void faults(void) {
    int file = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (file < 0) return;
    struct uffdio_api api = {.api = UFFD_API};
    CHECK(ioctl(file, UFFDIO_API, &api) == 0);
    alarm(60 * patience());
    for (size_t i = 0; i < SIZES; i++) {
        char *block = malloc(sizes[i]);
        CHECK(block);
        struct uffdio_register range = {
            .range = {.start = (uintptr_t)first_page(block), .len = whole_pages(sizes[i])}, .mode = UFFDIO_REGISTER_MODE_MISSING};
        CHECK(ioctl(file, UFFDIO_REGISTER, &range) == 0);
        free(block);
        // Nobody handles these: whoever gets one waits for ever.
        ordinary(sizes[i]);
    }
    alarm(0);
    close(file);
}

int main(void) {
    all_advice();
    advice_then_resize();
    protecting();
    locking();
    binding();
    keys();
    faults();
    locking_all();
    return 0;
}
