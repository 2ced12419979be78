// Helpers run in the idle class, so each may be stopped at any instruction for as long as others want the CPU. Here a debugger stops
// them at random moments, over and over: the program must go on all the same, with every byte right.
#include "check.h"
#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>

struct shared {
    _Atomic uint64_t beats;
    atomic_bool stop;
};

// One block after another, with bursts so that helpers have something to do and pauses so that they get to it.
static void *work(void *argument) {
    struct shared *shared = argument;
    uint64_t state = (uint64_t)gettid();
    char *blocks[6] = {0};
    size_t sizes[6] = {0};
    while (!shared->stop) {
        size_t which = random_word(&state) % 6;
        if (blocks[which]) {
            CHECK(holds(blocks[which], sizes[which], which, false));
            free(blocks[which]);
        }
        sizes[which] = MIB + random_word(&state) % (6 * MIB);
        if (random_word(&state) % 2) {
            blocks[which] = calloc(1, sizes[which]);
            CHECK(blocks[which] && is_zero(blocks[which], sizes[which], false));
        } else {
            CHECK((blocks[which] = malloc(sizes[which])));
        }
        fill(blocks[which], sizes[which], which, false);
        if (random_word(&state) % 16 == 0) usleep(500);
        shared->beats++;
    }
    for (size_t i = 0; i < 6; i++) free(blocks[i]);
    return NULL;
}

// The numbers of the process's helpers.
static size_t helpers(pid_t process, pid_t *found, size_t most) {
    char path[64], name[64];
    snprintf(path, sizeof path, "/proc/%d/task", process);
    DIR *tasks = opendir(path);
    CHECK(tasks);
    size_t count = 0;
    for (struct dirent *entry; (entry = readdir(tasks)) && count < most;) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/comm", process, entry->d_name);
        memset(name, 0, sizeof name);
        int file = open(path, O_RDONLY);
        if (file < 0) continue;
        ssize_t length = read(file, name, sizeof name - 1);
        close(file);
        if (length > 9 && !strncmp(name, "pagecrew/", 9) && name[9] >= '0' && name[9] <= '9') {
            found[count++] = (pid_t)atoi(entry->d_name);
        }
    }
    closedir(tasks);
    return count;
}

static void watch_over(pid_t process, struct shared *shared, uint64_t seconds) {
    uint64_t state = 1, end = now_ns() + seconds * 1000000000u, stops = 0;
    while (now_ns() < end) {
        usleep((useconds_t)(random_word(&state) % 500));
        pid_t threads[64];
        size_t count = helpers(process, threads, 64);
        for (size_t i = 0; i < count; i++) {
            int status;
            // It may end meanwhile.
            if (ptrace(PTRACE_SEIZE, threads[i], NULL, NULL) != 0) continue;
            CHECK(ptrace(PTRACE_INTERRUPT, threads[i], NULL, NULL) == 0);
            CHECK(waitpid(threads[i], &status, __WALL) == threads[i]);
            if (!WIFSTOPPED(status)) continue;
            stops++;
            uint64_t before = shared->beats, patience = now_ns() + 10000000000u;
            while (shared->beats < before + 4) {
                CHECK(now_ns() < patience);
                usleep(200);
            }
            CHECK(ptrace(PTRACE_DETACH, threads[i], NULL, NULL) == 0);
        }
    }
    printf("%llu stops, %llu rounds\n", (unsigned long long)stops, (unsigned long long)shared->beats);
    CHECK(stops > 0 || !under_pagecrew());
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    struct shared *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
        pthread_t other;
        CHECK(pthread_create(&other, NULL, work, shared) == 0);
        work(shared);
        CHECK(pthread_join(other, NULL) == 0);
        exit(0);
    }
    while (shared->beats < 20) usleep(1000);
    watch_over(process, shared, strtoul(arguments[1], NULL, 10));
    shared->stop = true;
    int status;
    CHECK(waitpid(process, &status, 0) == process);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}
