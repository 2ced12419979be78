// The mmap family, tried at random within a window of addresses: what each call returns, where memory may be read and written, what it
// holds, and which mappings the kernel has. Two runs with one seed print the same, with and without Pagecrew.
//
// mappings SEED STEPS  prints everything to standard output
// mappings storm       threads and forks at once, checks itself
// mappings sparse      touches little of a large mapping and waits
#include <fcntl.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
#define WINDOW (192 * MIB)

static char *window;
static sigjmp_buf back;

static void on_fault(int signal) {
    siglongjmp(back, signal);
}

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

static int chance(int percent) {
    return (int)draw(100) < percent;
}

// The byte at an address: -1 where it can't be read.
static int peek(char *address) {
    if (sigsetjmp(back, 1)) return -1;
    return *(volatile unsigned char *)address;
}

// 0 where it could be written, else the signal.
static int poke(char *address, unsigned char byte) {
    int signal = sigsetjmp(back, 1);
    if (signal) return signal;
    *(volatile unsigned char *)address = byte;
    return 0;
}

// Prints a hash of every page's first and last byte.
static void print_contents(void) {
    uint64_t hash = 1469598103934665603u;
    for (size_t at = 0; at < WINDOW; at += PAGE) {
        // Most of the window is not mapped, and each fault is a signal.
        unsigned char resident;
        if (mincore(window + at, PAGE, &resident) != 0) {
            hash = (hash ^ 7) * 1099511628211u;
            continue;
        }
        if (at % (64 * PAGE) && at / PAGE % 64 != 63) continue;
        hash = (hash ^ (uint64_t)(peek(window + at) + 2)) * 1099511628211u;
        hash = (hash ^ (uint64_t)(peek(window + at + PAGE - 1) + 2)) * 1099511628211u;
    }
    printf("contents %016llx\n", (unsigned long long)hash);
}

// Prints the mappings of the window. Neighbours that differ in nothing that can be seen here are one: where the kernel joins them is
// its own affair.
static void print_mappings(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], last_about[512] = "";
    unsigned long last_start = 0, last_end = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long start, end, offset, inode;
        char rights[8], name[256] = "";
        if (sscanf(line, "%lx-%lx %7s %lx %*s %lu %255s", &start, &end, rights, &offset, &inode, name) < 5) continue;
        unsigned long low = (unsigned long)window, high = low + WINDOW;
        if (end <= low || start >= high) continue;
        start = (start < low ? low : start) - low;
        end = (end > high ? high : end) - low;
        char about[512];
        if (inode)
            snprintf(about, sizeof about, "%s file %ld", rights, (long)(offset - start));
        else
            snprintf(about, sizeof about, "%s %s", rights, name);
        if (start == last_end && strcmp(about, last_about) == 0) {
            last_end = end;
            continue;
        }
        if (last_end) printf("  %lx-%lx %s\n", last_start, last_end, last_about);
        last_start = start;
        last_end = end;
        strcpy(last_about, about);
    }
    if (last_end) printf("  %lx-%lx %s\n", last_start, last_end, last_about);
    if (maps) fclose(maps);
}

static size_t random_len(void) {
    size_t len;
    switch (draw(5)) {
    case 0: len = PAGE * (1 + draw(64)); break;
    case 1: len = 2 * MIB * (1 + draw(4)); break;
    case 2: len = PAGE * (1 + draw(6 * MIB / PAGE)); break;
    case 3: len = 32 * MIB + PAGE * draw(16 * MIB / PAGE); break;
    default: len = MIB * (1 + draw(40)); break;
    }
    if (chance(3)) len += draw(PAGE);
    if (chance(1)) len = 0;
    return len;
}

static size_t random_place(size_t len) {
    size_t room = len < WINDOW ? WINDOW - len : 0;
    size_t at = room ? draw(room) : 0;
    at &= chance(50) ? ~(2 * MIB - 1) : ~(PAGE - 1);
    if (chance(2)) at += 1 + draw(PAGE - 1);
    return at;
}

static int random_rights(void) {
    static const int rights[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE,
                                 PROT_READ | PROT_WRITE, PROT_WRITE, PROT_READ | PROT_EXEC, PROT_READ | PROT_WRITE | PROT_EXEC};
    return rights[draw(sizeof rights / sizeof *rights)];
}

// An address as others see it: in the window, elsewhere, or a failure.
static void print_result(const char *call, void *result, size_t about) {
    long offset = (char *)result - window;
    if (result == MAP_FAILED)
        printf("%s %zx: error %d\n", call, about, errno);
    else if (offset >= 0 && (size_t)offset < WINDOW)
        printf("%s %zx: at %lx, errno %d\n", call, about, offset, errno);
    else
        printf("%s %zx: elsewhere, errno %d\n", call, about, errno);
}

static void write_somewhere(void) {
    size_t len = random_len() & ~(PAGE - 1), at = random_place(len) & ~(PAGE - 1);
    size_t step = PAGE * (1 + draw(64));
    unsigned char byte = (unsigned char)(1 + draw(255));
    uint64_t faults = 0;
    for (size_t offset = 0; offset < len && faults < 64; offset += step) faults += poke(window + at + offset, byte) != 0;
    printf("write %zx-%zx: %llu faults\n", at, at + len, (unsigned long long)faults);
}

static void step(int file) {
    errno = 99;
    size_t len = random_len(), at = random_place(len);
    int rights = random_rights();
    switch (draw(12)) {
    case 0:
    case 1:
    case 2: {
        int flags = MAP_FIXED | (chance(80) ? MAP_PRIVATE : MAP_SHARED) | (chance(85) ? MAP_ANONYMOUS : 0);
        if (chance(20)) flags |= MAP_NORESERVE;
        if (chance(5)) flags |= MAP_STACK;
        if (chance(5)) flags |= MAP_POPULATE;
        if (chance(2)) flags &= ~MAP_PRIVATE & ~MAP_SHARED;
        if (chance(20)) flags = (flags & ~MAP_FIXED) | MAP_FIXED_NOREPLACE;
        int descriptor = flags & MAP_ANONYMOUS ? -1 : file;
        long offset = chance(50) ? 0 : (long)(PAGE * draw(64));
        if (chance(2)) offset += 7;
        if (descriptor >= 0 && len > 16 * MIB) len = 16 * MIB;
        print_result("mmap", mmap(window + at, len, rights, flags, descriptor, offset), at);
        break;
    }
    case 3: {
        // Anywhere: the result is looked at and unmapped again.
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | (chance(50) ? MAP_NORESERVE : 0);
        char *place = mmap(NULL, len, PROT_READ | PROT_WRITE, flags, -1, 0);
        printf("mmap anywhere: %s, errno %d\n", place == MAP_FAILED ? "failed" : "made", errno);
        if (place != MAP_FAILED) {
            int first = peek(place), last = peek(place + len - 1);
            poke(place, 1);
            poke(place + len - 1, 2);
            errno = 99;
            int result = munmap(place, len);
            printf("  %d %d, munmap %d errno %d, then %d %d\n", first, last, result, errno, peek(place), peek(place + len - 1));
        }
        break;
    }
    case 4:
    case 5: {
        int result = munmap(window + at, len);
        printf("munmap %zx-%zx: %d, errno %d\n", at, at + len, result, errno);
        break;
    }
    case 6:
    case 7: {
        int result = mprotect(window + at, len, rights);
        printf("mprotect %zx-%zx %d: %d, errno %d\n", at, at + len, rights, result, errno);
        break;
    }
    case 8: {
        size_t new_len = chance(50) ? len : random_len(), to = random_place(new_len);
        int flags = chance(70) ? MREMAP_MAYMOVE | MREMAP_FIXED : 0;
        print_result("mremap", mremap(window + at, len, new_len, flags, window + to), at);
        break;
    }
    case 9:
    case 10: {
        static const int advice[] = {MADV_DONTNEED,  MADV_DONTNEED,    MADV_DONTNEED,   MADV_NORMAL,     MADV_RANDOM,
                                     MADV_HUGEPAGE,  MADV_NOHUGEPAGE,  MADV_DONTFORK,   MADV_WIPEONFORK, MADV_KEEPONFORK,
                                     MADV_DONTDUMP,  MADV_WILLNEED,    MADV_COLD,       12345};
        int kind = advice[draw(sizeof advice / sizeof *advice)];
        int result = chance(15) ? posix_madvise(window + at, len, (int)draw(6)) : madvise(window + at, len, kind);
        printf("madvise %zx-%zx %d: %d, errno %d\n", at, at + len, kind, result, errno);
        break;
    }
    default:
        if (chance(10)) {
            size_t small = len % (16 * PAGE);
            int result = chance(50) ? mlock(window + at, small) : munlock(window + at, small);
            printf("mlock %zx-%zx: %d, errno %d\n", at, at + small, result, errno);
        } else {
            write_somewhere();
        }
        break;
    }
}

static int differential(uint64_t seed, long steps) {
    state = seed * 2654435761u + 1;
    // The kernel puts new mappings at the highest addresses that are free: above the window, where this leaves room.
    char *above = mmap(NULL, 4096 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *room = mmap(NULL, 3 * WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED || above == MAP_FAILED) return 2;
    munmap(above, 4096 * MIB);
    window = (char *)(((uintptr_t)room + WINDOW) & ~(2 * MIB - 1));
    // A file of known contents.
    char name[] = "/tmp/mappings-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    char page[PAGE];
    for (size_t at = 0; at < 20 * MIB; at += PAGE) {
        memset(page, (int)(at / PAGE % 251 + 1), PAGE);
        if (write(file, page, PAGE) != (ssize_t)PAGE) return 2;
    }
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    for (long index = 0; index < steps; index++) {
        step(file);
        if (index % 8 == 7) {
            print_contents();
            print_mappings();
        }
        if (index % 64 == 63) {
            // A child sees what it should and goes its own way.
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) {
                print_contents();
                munmap(window, WINDOW);
                print_mappings();
                fflush(stdout);
                _exit(0);
            }
            waitpid(child, NULL, 0);
        }
    }
    return 0;
}

// Storm: every thread maps, fills, changes and unmaps ranges of its own and checks each byte it relies on.

static atomic_int failed;

static void check(int right, const char *what) {
    if (!right && !atomic_exchange(&failed, 1)) fprintf(stderr, "mappings: %s (errno %d)\n", what, errno);
}

static void *storm_thread(void *argument) {
    uint64_t own = (uint64_t)(uintptr_t)argument * 7919 + 17;
    for (int round = 0; round < 60 && !failed; round++) {
        own = own * 6364136223846793005u + 1442695040888963407u;
        size_t len = (2 + (own >> 40) % 48) * MIB;
        int reserve = own >> 20 & 1;
        char *place = mmap(NULL, len, reserve ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        check(place != MAP_FAILED, "mmap failed");
        if (place == MAP_FAILED) break;
        if (reserve) check(mprotect(place, len, PROT_READ | PROT_WRITE) == 0, "mprotect failed");
        for (size_t at = 0; at < len; at += 64 * PAGE) {
            check(place[at] == 0, "a new mapping is not zero");
            place[at] = (char)(own >> 30 | 1);
        }
        size_t half = len / 2 & ~(PAGE - 1);
        if (own >> 21 & 1) {
            check(madvise(place + half, len - half, MADV_DONTNEED) == 0, "madvise failed");
            for (size_t at = half; at < len; at += PAGE) check(place[at] == 0, "discarded memory is not zero");
        }
        if (own >> 22 & 1) {
            char *moved = mremap(place, len, 2 * len, MREMAP_MAYMOVE);
            check(moved != MAP_FAILED, "mremap failed");
            if (moved == MAP_FAILED) break;
            check(moved[len] == 0 && moved[2 * len - 1] == 0, "what mremap added is not zero");
            place = moved;
            len *= 2;
        }
        check(place[0] == (char)(own >> 30 | 1), "contents are lost");
        if (own >> 23 & 1) {
            check(munmap(place, half) == 0, "munmap of a part failed");
            check(munmap(place + half, len - half) == 0, "munmap of the rest failed");
        } else {
            check(munmap(place, len) == 0, "munmap failed");
        }
    }
    return NULL;
}

static int storm(void) {
    pthread_t threads[6];
    for (uintptr_t index = 0; index < 6; index++) pthread_create(&threads[index], NULL, storm_thread, (void *)index);
    for (int round = 0; round < 12 && !failed; round++) {
        pid_t child = fork();
        if (child == 0) {
            storm_thread((void *)(uintptr_t)(100 + round % 3));
            _exit(failed);
        }
        int status = 0;
        waitpid(child, &status, 0);
        check(status == 0, "a child failed");
    }
    for (int index = 0; index < 6; index++) pthread_join(threads[index], NULL);
    return failed;
}

static size_t resident(void) {
    size_t pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (!statm || fscanf(statm, "%*s %zu", &pages) != 1) _exit(3);
    fclose(statm);
    return pages * PAGE;
}

// A large mapping of which little is touched, until some of it was trimmed: how long that takes depends on who else wants the CPUs.
static int sparse(void) {
    size_t len = 256 * MIB, step = 16 * PAGE;
    char *place = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return 2;
    for (size_t at = 0; at < len; at += step) place[at] = 1;
    size_t most = resident();
    for (int tenths = 0; tenths < 450 && resident() + 16 * MIB > most; tenths++) usleep(100000);
    for (size_t at = 0; at < len; at += PAGE) {
        if (place[at] != (at % step == 0)) return 1;
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count == 2 && strcmp(arguments[1], "sparse") == 0) return sparse();
    if (count == 2 && strcmp(arguments[1], "storm") == 0) return storm();
    if (count != 3) return 2;
    return differential(strtoull(arguments[1], NULL, 10), atol(arguments[2]));
}
