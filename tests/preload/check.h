// What the programs in this directory share. Each is an ordinary program that checks what any user of malloc relies on, so each
// also has to pass without Pagecrew. It prints what failed to standard error and ends with status 1.
#ifndef CHECK_H
#define CHECK_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define PAGE ((size_t)4096)

// The default threshold: blocks from here on are spans.
#define THRESHOLD (64 * KIB)

#define CHECK(condition) \
    do { \
        if (!(condition)) fail(__FILE__, __LINE__, #condition); \
    } while (0)

// Ends the process by a system call: a failure must not depend on what is being tested.
static inline void __attribute__((noreturn)) fail(const char *file, int line, const char *condition) {
    char text[512];
    int length = snprintf(text, sizeof text, "%s:%d: %s failed (errno %d, process %d)\n", file, line, condition, errno, getpid());
    if (write(2, text, (size_t)length) < 0) {}
    syscall(SYS_exit_group, 1);
    __builtin_unreachable();
}

// Whether malloc is Pagecrew's.
static inline bool under_pagecrew(void) {
    Dl_info info;
    void *function = dlsym(RTLD_DEFAULT, "malloc");
    return function && dladdr(function, &info) && info.dli_fname && strstr(info.dli_fname, "pagecrew");
}

// Whoever runs these programs says whether Pagecrew is meant to be there; a test that passes without it by mistake proves nothing.
static inline void __attribute__((constructor)) check_expectation(void) {
    const char *expected = getenv("EXPECT_PAGECREW");
    if (expected) CHECK(under_pagecrew() == (*expected == '1'));
}

// How many times longer things take than on a machine of its own: in an emulated one, what `patience` says (scripts/guests.sh).
static inline unsigned patience(void) {
    const char *said = getenv("patience");
    int times = said ? atoi(said) : 1;
    return times > 1 ? (unsigned)times : 1;
}

static inline uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static inline void sleep_ms(unsigned milliseconds) {
    struct timespec time = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&time, &time) && errno == EINTR) {}
}

static inline int thread_id(void) { return (int)syscall(SYS_gettid); }

// Reads a small file of /proc without allocating. Returns its length, or -1.
static inline ssize_t read_file(const char *path, char *text, size_t size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    size_t filled = 0;
    ssize_t count;
    while (filled < size - 1 && (count = read(file, text + filled, size - 1 - filled)) > 0) filled += (size_t)count;
    close(file);
    text[filled] = 0;
    return (ssize_t)filled;
}

// A field of /proc/self/status, such as "VmLck", in the file's own unit (KiB for memory).
static inline long status_field(const char *name) {
    char text[8192];
    if (read_file("/proc/self/status", text, sizeof text) < 0) return -1;
    size_t length = strlen(name);
    for (char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (!strncmp(line, name, length) && line[length] == ':') return strtol(line + length + 1, NULL, 10);
    }
    return -1;
}

// Resident memory of this process in bytes.
static inline size_t resident(void) {
    char text[256];
    CHECK(read_file("/proc/self/statm", text, sizeof text) > 0);
    char *rest;
    strtoul(text, &rest, 10);
    return strtoul(rest, NULL, 10) * PAGE;
}

static inline unsigned random_word(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*state >> 33);
}

// A pattern that says which block it belongs to and where in it.
static inline uint64_t pattern(uint64_t seed, size_t index) {
    uint64_t word = seed * 0x9e3779b97f4a7c15u + index * 0xbf58476d1ce4e5b9u + 1;
    return word ^ (word >> 29);
}

// The words of a block that are looked at: all of them, or the first and last 32 and the first one of each 4 KiB.
static inline size_t next_word(size_t index, size_t words, bool all) {
    if (all || index < 31 || index + 32 >= words) return index + 1;
    size_t next = (index / 512 + 1) * 512;
    return next + 32 < words ? next : words - 32;
}

#define FOR_WORDS(index, bytes, all) for (size_t index = 0; index < (bytes) / 8; index = next_word(index, (bytes) / 8, all))

static inline void fill(void *block, size_t bytes, uint64_t seed, bool all) {
    uint64_t *words = block;
    FOR_WORDS(index, bytes, all) words[index] = pattern(seed, index);
    for (size_t at = bytes & ~(size_t)7; at < bytes; at++) ((unsigned char *)block)[at] = (unsigned char)(seed + at);
}

static inline bool holds(const void *block, size_t bytes, uint64_t seed, bool all) {
    const uint64_t *words = block;
    FOR_WORDS(index, bytes, all) {
        if (words[index] != pattern(seed, index)) {
            fprintf(stderr, "at byte %zu of %zu: %#lx instead of %#lx\n", index * 8, bytes, words[index], pattern(seed, index));
            return false;
        }
    }
    for (size_t at = bytes & ~(size_t)7; at < bytes; at++) {
        if (((const unsigned char *)block)[at] != (unsigned char)(seed + at)) return false;
    }
    return true;
}

static inline bool is_zero(const void *block, size_t bytes, bool all) {
    const uint64_t *words = block;
    FOR_WORDS(index, bytes, all) {
        if (words[index]) {
            fprintf(stderr, "at byte %zu of %zu: %#lx instead of zero\n", index * 8, bytes, words[index]);
            return false;
        }
    }
    for (size_t at = bytes & ~(size_t)7; at < bytes; at++) {
        if (((const unsigned char *)block)[at]) return false;
    }
    return true;
}

// The whole block, whatever its size, through memcmp's speed: for blocks that are checked many times.
static inline bool all_zero(const void *block, size_t bytes) {
    const unsigned char *start = block;
    return bytes == 0 || (*start == 0 && memcmp(start, start + 1, bytes - 1) == 0);
}

// Waits for a child and returns its status; a negative number for the signal that ended it.
static inline int wait_for(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) < 0) CHECK(errno == EINTR);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

// Makes several hundred MiB resident, so that the end of the process is worth Pagecrew's while.
static void *volatile live;
static inline void *large_and_live(size_t bytes) {
    char *block = malloc(bytes);
    CHECK(block);
    for (size_t at = 0; at < bytes; at += PAGE) block[at] = (char)(at / PAGE + 1);
    // The compiler must not think that nobody looks at it.
    live = block;
    return live;
}

#endif
