// What `doctor` says is true: each word tries one thing under Pagecrew and prints what came of it.
#include "../preload/check.h"
#include <signal.h>
#include <sys/mman.h>

// Kilobytes of this process's private memory in huge pages.
static size_t in_huge_pages(void) {
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file);
    char line[256];
    size_t sum = 0, value;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "AnonHugePages: %zu kB", &value) == 1) sum += value;
    }
    fclose(file);
    return sum;
}

// Blocks that are used whole get huge pages, where there are any: KiB of 64 MiB.
static void huge(void) {
    char *block = malloc(64 * MIB);
    CHECK(block);
    fill(block, 64 * MIB, 1, true);
    printf("%zu\n", in_huge_pages());
    free(block);
}

// The byte behind a block's pages: `guarded` if touching it ends a child, `open` if not.
static void guard(void) {
    char *block = malloc(4 * MIB);
    CHECK(block);
    block[0] = 1;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        volatile char *behind = block + ((malloc_usable_size(block) + PAGE - 1) & ~(PAGE - 1));
        *behind = 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("%s\n", WIFSIGNALED(status) ? "guarded" : "open");
    free(block);
}

// Huge pages of which little is used, as long as it takes until they are trimmed: MiB that are resident before and after.
static void sparse(char *start, size_t bytes, unsigned seconds) {
    for (size_t at = 0; at < bytes; at += 50 * KIB) start[at] = 'Z';
    printf("%zu before\n", resident() / MIB);
    fflush(stdout);
    for (unsigned waited = 0; waited < 10 * seconds && resident() > bytes / 2; waited++) sleep_ms(100);
    for (size_t at = 0; at < bytes; at += 50 * KIB) CHECK(start[at] == 'Z' && start[at + 1] == 0);
    printf("%zu after\n", resident() / MIB);
}

static void sparse_mapping(unsigned seconds) {
    size_t bytes = 128 * MIB, huge = 2 * MIB;
    char *mapped = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    char *start = (char *)(((uintptr_t)mapped + huge - 1) & ~(uintptr_t)(huge - 1));
    if (madvise(start, bytes, MADV_HUGEPAGE)) {
        printf("no huge pages\n");
        return;
    }
    sparse(start, bytes, seconds);
}

// Smaller, since the program itself has a hundredth of a CPU for it, and emulated it takes long.
static void sparse_block(unsigned seconds) {
    size_t bytes = 48 * MIB;
    char *block = calloc(1, bytes);
    CHECK(block);
    sparse(block, bytes, seconds);
    free(block);
}

// Memory that was freed and is kept, until it goes back or `seconds` are over: MiB that are resident before and after.
static void kept(unsigned seconds) {
    char *blocks[16];
    for (int i = 0; i < 16; i++) fill((blocks[i] = malloc(8 * MIB)), 8 * MIB, 1, true);
    for (int i = 0; i < 16; i++) free(blocks[i]);
    printf("%zu before\n", resident() / MIB);
    fflush(stdout);
    for (unsigned waited = 0; waited < 10 * seconds && resident() > 48 * MIB; waited++) sleep_ms(100);
    printf("%zu after\n", resident() / MIB);
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    unsigned seconds = count > 2 ? (unsigned)atoi(arguments[2]) : 10;
    if (!strcmp(what, "huge")) huge();
    else if (!strcmp(what, "guard")) guard();
    else if (!strcmp(what, "sparse-mapping")) sparse_mapping(seconds);
    else if (!strcmp(what, "sparse-block")) sparse_block(seconds);
    else if (!strcmp(what, "kept")) kept(seconds);
    else return 2;
    return 0;
}
