// What a process has written or buffered when it ends is what arrives, and nothing else. The arguments: which part, and the file.
#include "check.h"

#define BUFFER (4 * MIB)
#define BLOCK (8 * MIB)

// Ends with a large buffer full of output, which only the end of the process flushes.
static void buffered(const char *path, const char *how) {
    FILE *file = fopen(path, "w");
    CHECK(file);
    CHECK(setvbuf(file, malloc(BUFFER), _IOFBF, BUFFER) == 0);
    large_and_live(600 * MIB);
    for (int line = 0; line < 300000; line++) CHECK(fprintf(file, "line %d\n", line) > 0);
    if (!strcmp(how, "exit")) exit(3);
    if (!strcmp(how, "_exit")) {
        CHECK(fflush(file) == 0);
        _exit(3);
    }
}

static char *blocks[2];
static int file_of_writer;

// Writes the same pattern over and over, in one call each; at the end of the process one may be under way.
static void *writer(void *argument) {
    int which = (int)(uintptr_t)argument;
    for (off_t round = 0;; round++) {
        ssize_t count = pwrite(file_of_writer, blocks[which], BLOCK, (2 * (round % 4) + which) * (off_t)BLOCK);
        CHECK(count == (ssize_t)BLOCK);
    }
    return NULL;
}

static void writing(const char *path, const char *how) {
    file_of_writer = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(file_of_writer >= 0);
    for (int i = 0; i < 2; i++) {
        blocks[i] = malloc(BLOCK);
        memset(blocks[i], 'a' + i, BLOCK);
    }
    large_and_live(300 * MIB);
    pthread_t thread;
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, writer, (void *)i) == 0);
    uint64_t state = (uint64_t)getpid();
    struct timespec time = {0, 10000000 + (long)(random_word(&state) % 20000000)};
    nanosleep(&time, NULL);
    if (!strcmp(how, "exit")) exit(4);
    _exit(4);
}

// Every byte of the file is of the pattern; what was not written yet is a hole only where no later byte of that block is there.
static void check_written(const char *path) {
    int file = open(path, O_RDONLY);
    CHECK(file >= 0);
    char *block = malloc(BLOCK);
    for (int which = 0;; which++) {
        ssize_t count = pread(file, block, BLOCK, which * (off_t)BLOCK);
        CHECK(count >= 0);
        if (count == 0) break;
        char expected = (char)('a' + which % 2);
        ssize_t good = 0;
        while (good < count && block[good] == expected) good++;
        // Behind what was written there may be nothing but a hole.
        for (ssize_t at = good; at < count; at++) CHECK(block[at] == 0);
        if (good > 0 && good < count) {
            off_t hole = lseek(file, which * (off_t)BLOCK + good, SEEK_HOLE);
            if (hole > which * (off_t)BLOCK + ((good + (ssize_t)PAGE - 1) & ~((ssize_t)PAGE - 1))) {
                fprintf(stderr, "block %d: %zd bytes of the pattern, then zeroes that somebody wrote up to %ld\n", which, good,
                        (long)(hole - which * (off_t)BLOCK));
                fail(__FILE__, __LINE__, "no zeroes were written");
            }
        }
    }
    free(block);
    close(file);
}

int main(int count, char **arguments) {
    CHECK(count == 4);
    const char *path = arguments[2];
    int rounds = atoi(arguments[3]);
    for (int round = 0; round < rounds; round++) {
        for (int how = 0; how < 2; how++) {
            pid_t child = fork();
            CHECK(child >= 0);
            const char *name = how ? "_exit" : "exit";
            if (child == 0) {
                alarm(20 * patience());
                if (!strcmp(arguments[1], "buffered")) buffered(path, name);
                if (!strcmp(arguments[1], "writing")) writing(path, name);
            }
            CHECK(wait_for(child) == (*arguments[1] == 'b' ? 3 : 4));
            if (*arguments[1] == 'b') {
                FILE *file = fopen(path, "r");
                char line[64], expected[64];
                int number = 0;
                while (fgets(line, sizeof line, file)) {
                    snprintf(expected, sizeof expected, "line %d\n", number++);
                    CHECK(!strcmp(line, expected));
                }
                CHECK(number == 300000);
                fclose(file);
            } else {
                check_written(path);
            }
            CHECK(unlink(path) == 0);
        }
    }
    return 0;
}
