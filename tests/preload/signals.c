// Signals at a high rate while memory is allocated and freed; helpers never get one; a handler may end the process at any instant.
#include "check.h"
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/time.h>

#define THREADS 4

static atomic_size_t delivered, to_helpers;
static atomic_bool done;
static int failures;

// Whether a thread of this process is one of Pagecrew's.
static bool is_helper(int thread) {
    char path[64], name[32];
    snprintf(path, sizeof path, "/proc/self/task/%d/comm", thread);
    return read_file(path, name, sizeof name) > 0 && !strncmp(name, "pagecrew/", 9);
}

static void count(int signal) {
    (void)signal;
    int saved = errno;
    size_t number = atomic_fetch_add(&delivered, 1);
    // The name takes system calls, which are safe in a handler; snprintf with these formats allocates nothing.
    if (number % 16 == 0 && is_helper(thread_id())) atomic_fetch_add(&to_helpers, 1);
    errno = saved;
}

static void *churn(void *argument) {
    uint64_t state = (uintptr_t)argument;
    while (!atomic_load(&done)) {
        size_t size = 700 * KIB + random_word(&state) % (6 * MIB);
        errno = 77;
        char *block = random_word(&state) % 2 ? malloc(size) : calloc(1, size);
        CHECK(block && errno == 77);
        uint64_t seed = random_word(&state);
        fill(block, size, seed, false);
        size_t kept = size & ~(size_t)7;
        if (random_word(&state) % 4 == 0) {
            block = realloc(block, size + 5 * MIB);
            CHECK(block && ((uint64_t *)block)[0] == pattern(seed, 0) && ((uint64_t *)block)[kept / 8 - 1] == pattern(seed, kept / 8 - 1));
        } else {
            CHECK(holds(block, size, seed, false));
        }
        free(block);
    }
    return NULL;
}

static void at_a_high_rate(int which, int signal) {
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    CHECK(sigaction(signal, &action, NULL) == 0);
    atomic_store(&done, false);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
    struct itimerval rate = {{0, 500}, {0, 500}}, off = {0};
    CHECK(setitimer(which, &rate, NULL) == 0);
    size_t before = atomic_load(&delivered);
    uint64_t end = now_ns() + 1500000000u;
    // Longer on a machine so slow that few have come until then.
    while (now_ns() < end || (atomic_load(&delivered) <= before + 1000 / patience() && now_ns() < end + 60000000000u)) {
        // Besides the timer, every thread gets signals of its own.
        for (int i = 0; i < THREADS; i++) pthread_kill(threads[i], signal);
        sleep_ms(1);
    }
    CHECK(setitimer(which, &off, NULL) == 0);
    atomic_store(&done, true);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(atomic_load(&delivered) > before + 1000 / patience());
}

// Makes sure that a helper lives.
static void call_helpers(void) {
    for (int i = 0; i < 4; i++) {
        char *block = calloc(1, 256 * MIB);
        CHECK(block);
        memset(block, 1, 256 * MIB);
        free(block);
    }
}

// A program that takes its signals in one thread blocks them in all of its own; one that was delivered to a helper instead would
// kill the process.
static void by_waiting(void) {
    sigset_t set, before;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, &before) == 0);
    signal(SIGUSR1, SIG_DFL);
    signal(SIGUSR2, SIG_DFL);
    call_helpers();
    for (int i = 0; i < 200; i++) {
        CHECK(kill(getpid(), SIGUSR1) == 0);
        int signal = 0;
        CHECK(sigwait(&set, &signal) == 0 && signal == SIGUSR1);
    }
    int file = signalfd(-1, &set, SFD_CLOEXEC);
    CHECK(file >= 0);
    for (int i = 0; i < 200; i++) {
        CHECK(kill(getpid(), SIGUSR2) == 0);
        struct signalfd_siginfo about;
        CHECK(read(file, &about, sizeof about) == sizeof about && about.ssi_signo == SIGUSR2);
    }
    close(file);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
}

static void quit(int signal) {
    (void)signal;
    _exit(5);
}

// A handler that ends the process with _exit, as many do for SIGTERM, at any instant of malloc and free: the process must end, with
// that status. `bytes` decides whether its end is worth Pagecrew's while.
static void quitting_at_any_instant(size_t bytes, int rounds, const char *name) {
    uint64_t state = bytes + 1;
    int wrong = 0;
    for (int round = 0; round < rounds; round++) {
        int ready[2];
        CHECK(pipe(ready) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            signal(SIGTERM, quit);
            if (bytes) large_and_live(bytes);
            char *volatile block = malloc(3 * MIB);
            free(block);
            CHECK(write(ready[1], "", 1) == 1);
            for (;;) {
                // Nothing is touched, so that the time is spent in malloc itself.
                for (int i = 0; i < 50; i++) {
                    block = malloc(THRESHOLD + random_word(&state) % (3 * MIB));
                    char *volatile other = malloc(THRESHOLD);
                    free(block);
                    free(other);
                }
                block = calloc(1, 2 * MIB);
                block = realloc(block, 5 * MIB);
                free(block);
            }
        }
        char byte;
        CHECK(read(ready[0], &byte, 1) == 1);
        close(ready[0]);
        close(ready[1]);
        struct timespec time = {0, (long)(random_word(&state) % 5000000)};
        nanosleep(&time, NULL);
        kill(child, SIGTERM);
        uint64_t start = now_ns();
        int status;
        pid_t gone;
        while ((gone = waitpid(child, &status, WNOHANG)) == 0 && now_ns() < start + 3000000000u) sleep_ms(1);
        if (gone == 0) {
            fprintf(stderr, "%s: round %d: the process hangs in _exit in a signal handler\n", name, round);
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            wrong++;
        } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 5) {
            fprintf(stderr, "%s: round %d: status %#x\n", name, round, (unsigned)status);
            wrong++;
        }
        if (wrong >= 3) break;
    }
    failures += wrong > 0;
}

int main(void) {
    at_a_high_rate(ITIMER_REAL, SIGALRM);
    at_a_high_rate(ITIMER_PROF, SIGPROF);
    by_waiting();
    printf("%zu signals\n", atomic_load(&delivered));
    CHECK(atomic_load(&to_helpers) == 0);
    quitting_at_any_instant(0, 150, "small process");
    quitting_at_any_instant(400 * MIB, 40, "large process");
    return failures > 0;
}
