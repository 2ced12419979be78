// A program of many large sizes, whose free memory is moved about by the page tables: what is in its blocks stays there, whatever the
// program does to its descriptors, its memory and its system calls meanwhile.
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/utsname.h>

#define SLOTS 10

static void mixture(unsigned rounds, uint64_t seed) {
    struct {
        char *block;
        size_t bytes;
        uint64_t seed;
    } slots[SLOTS] = {0};
    for (unsigned round = 0; round < rounds; round++) {
        unsigned slot = random_word(&seed) % SLOTS, kind = random_word(&seed) % 8;
        size_t bytes = MIB + random_word(&seed) % (15 * MIB);
        char *block = slots[slot].block;
        if (block) CHECK(holds(block, slots[slot].bytes, slots[slot].seed, false));
        if (block && kind == 0) {
            char *other = realloc(block, bytes);
            // Of a shorter one, the last words were not filled.
            CHECK(other && holds(other, bytes < slots[slot].bytes ? 31 * 8 : slots[slot].bytes, slots[slot].seed, false));
            block = other;
        } else {
            free(block);
            block = kind == 1 ? calloc(1, bytes) : malloc(bytes);
            CHECK(block && (kind != 1 || is_zero(block, bytes, true)));
        }
        fill(block, bytes, round + seed % 1000, false);
        slots[slot].block = block;
        slots[slot].bytes = bytes;
        slots[slot].seed = round + seed % 1000;
    }
    for (unsigned slot = 0; slot < SLOTS; slot++) {
        if (slots[slot].block) CHECK(holds(slots[slot].block, slots[slot].bytes, slots[slot].seed, false));
        free(slots[slot].block);
    }
}

// The number of the descriptor by which pages are moved; -1 for none.
static int descriptor(void) {
    for (int number = 3; number < 1024; number++) {
        char path[64], target[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", number);
        if (readlink(path, target, sizeof target - 1) > 0 && strstr(target, "userfaultfd")) return number;
    }
    return -1;
}

static bool must_move(void) {
    struct utsname about;
    int major = 0, minor = 0;
    int file = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    if (file >= 0) close(file);
    CHECK(uname(&about) == 0 && sscanf(about.release, "%d.%d", &major, &minor) == 2);
    return under_pagecrew() && file >= 0 && (major > 6 || (major == 6 && minor >= 17));
}

// Has `part` run in a child, which has what the parent has.
static void in_child(void (*part)(void)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        part();
        _exit(0);
    }
    // Its parent goes on meanwhile, with pages that are shared for a while.
    mixture(100, 99);
    CHECK(wait_for(child) == 0);
}

static void as_before(void) { mixture(300, 5); }

static void without_descriptors(void) {
    mixture(200, 6);
    CHECK(syscall(SYS_close_range, 3, ~0u, 0) == 0);
    mixture(200, 7);
    // All of the numbers are somebody else's.
    for (int number = 0; number < 1024; number++) dup2(0, number);
    mixture(200, 8);
}

static void with_faults_of_its_own(void) {
    mixture(200, 9);
    int file = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    if (file < 0) return;
    struct uffdio_api api = {.api = UFFD_API};
    CHECK(ioctl(file, UFFDIO_API, &api) == 0);
    for (size_t bytes = 4 * MIB; bytes <= 16 * MIB; bytes *= 2) {
        char *block = aligned_alloc(PAGE, bytes);
        CHECK(block);
        struct uffdio_register range = {.range = {.start = (uintptr_t)block, .len = bytes}, .mode = UFFDIO_REGISTER_MODE_WP};
        CHECK(ioctl(file, UFFDIO_REGISTER, &range) == 0);
        CHECK(ioctl(file, UFFDIO_UNREGISTER, &range.range) == 0);
        free(block);
    }
    mixture(200, 10);
}

// From here on, the calls that pages are moved with end the process.
static void filtered_by(bool by_prctl) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (by_prctl) {
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    } else {
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
    }
}

static void filtered_later(void) {
    mixture(200, 11);
    filtered_by(true);
    mixture(200, 12);
}

static void filtered_from_the_beginning(void) {
    filtered_by(false);
    mixture(200, 13);
}

static void *thread(void *seed) {
    mixture(400, (uintptr_t)seed);
    return NULL;
}

static void with_threads_that_fork(void) {
    pthread_t threads[3];
    for (uintptr_t index = 0; index < 3; index++) CHECK(pthread_create(&threads[index], NULL, thread, (void *)(20 + index)) == 0);
    for (unsigned child = 0; child < 20; child++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            mixture(10, child);
            _exit(0);
        }
        CHECK(wait_for(pid) == 0);
    }
    for (unsigned index = 0; index < 3; index++) CHECK(pthread_join(threads[index], NULL) == 0);
}

int main(void) {
    in_child(filtered_from_the_beginning);
    long table = status_field("FDSize");
    mixture(500, 1);
    int number = descriptor();
    if (must_move()) CHECK(number >= 0);
    // What a program opens has the numbers that it expects, and the table of descriptors stays as long as it is.
    CHECK(number < 0 || (number >= 32 && number < table));
    in_child(as_before);
    in_child(without_descriptors);
    in_child(with_faults_of_its_own);
    in_child(filtered_later);
    in_child(filtered_from_the_beginning);
    with_threads_that_fork();
    mixture(200, 14);
    return 0;
}
