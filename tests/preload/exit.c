// The many ways in which a process ends, with 1 GiB live: status, handlers, destructors and output are as they always are.
#include "check.h"
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#define LIVE GIB

extern char **environ;

static int note_file = -1;
static int failures;

static void note(const char *text) {
    if (note_file >= 0) CHECK(write(note_file, text, strlen(text)) == (ssize_t)strlen(text));
}

static void first_handler(void) { note("atexit;"); }
static void quick_handler(void) { note("quick;"); }

// Allocates and frees what is large in a handler, as destructors of C++ objects do.
static char *kept_for_handler;
static void freeing_handler(void) {
    CHECK(kept_for_handler && kept_for_handler[100] == 42);
    free(kept_for_handler);
    char *block = calloc(1, 8 * MIB);
    CHECK(block && all_zero(block, 8 * MIB));
    free(block);
    note("freeing;");
}

static void on_exit_handler(int status, void *argument) {
    char text[64];
    snprintf(text, sizeof text, "on_exit(%d,%s);", status, (const char *)argument);
    note(text);
}

static void __attribute__((destructor)) destructor(void) { note("destructor;"); }

// Runs `body` in a child and checks its status and what it noted (anything, where `notes` is null). A child that hangs is killed.
static void in_child(const char *name, void (*body)(void), int status, const char *notes) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    uint64_t start = now_ns();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(ends[0]);
        note_file = ends[1];
        atexit(first_handler);
        at_quick_exit(quick_handler);
        alarm(20 * patience());
        body();
        CHECK(!"reached");
    }
    close(ends[1]);
    char text[4096];
    size_t filled = 0;
    ssize_t count;
    while ((count = read(ends[0], text + filled, sizeof text - 1 - filled)) > 0) filled += (size_t)count;
    text[filled] = 0;
    close(ends[0]);
    int result = wait_for(child);
    printf("%-28s %5.0f ms\n", name, (double)(now_ns() - start) / 1e6);
    fflush(stdout);
    if (result != status || (notes && strcmp(text, notes))) {
        fprintf(stderr, "%s: status %d instead of %d, noted '%s' instead of '%s'\n", name, result, status, text, notes ? notes : "");
        failures++;
    }
}

static void by_exit(void) {
    large_and_live(LIVE);
    on_exit(on_exit_handler, "x");
    exit(7);
}

static void by_exit_256(void) {
    large_and_live(LIVE);
    exit(256 + 9);
}

static void by_underscore_exit(void) {
    large_and_live(LIVE);
    _exit(8);
}

static void by_capital_exit(void) {
    large_and_live(LIVE);
    _Exit(9);
}

static void by_quick_exit(void) {
    large_and_live(LIVE);
    quick_exit(10);
}

static void by_abort(void) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    large_and_live(LIVE);
    abort();
}

static void by_kill(void) {
    large_and_live(LIVE);
    raise(SIGKILL);
}

static void freeing_in_handler(void) {
    kept_for_handler = large_and_live(LIVE);
    kept_for_handler[100] = 42;
    atexit(freeing_handler);
    exit(11);
}

static void *exit_here(void *argument) {
    large_and_live(LIVE);
    exit((int)(uintptr_t)argument);
}

static void in_thread_of(size_t stack, int status) {
    pthread_t thread;
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, stack) == 0);
    CHECK(pthread_create(&thread, &attributes, exit_here, (void *)(uintptr_t)status) == 0);
    for (;;) pause();
}

static void from_thread(void) { in_thread_of(8 * MIB, 12); }
static void from_small_thread(void) { in_thread_of((size_t)PTHREAD_STACK_MIN, 13); }
static void from_64k_thread(void) { in_thread_of(64 * KIB, 14); }
static void from_large_thread(void) { in_thread_of(512 * MIB, 15); }

// The main thread has ended by itself, the process goes on and ends later.
static void *exit_later(void *argument) {
    sleep_ms(50);
    return exit_here(argument);
}

static void after_main_thread(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, exit_later, (void *)16) == 0);
    pthread_exit(NULL);
}

static void *last_thread(void *argument) {
    (void)argument;
    sleep_ms(20);
    large_and_live(LIVE);
    return NULL;
}

static void by_end_of_last_thread(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, last_thread, NULL) == 0);
    pthread_exit(NULL);
}

static void *last_after_helpers(void *argument) {
    (void)argument;
    sleep_ms(20);
    for (int round = 0; round < 3; round++) {
        char *block = malloc(LIVE / 4);
        memset(block, 1, LIVE / 4);
        free(block);
    }
    return NULL;
}

// As above where there are helpers: whoever ends last, the program's own thread runs the handlers.
static void by_end_of_last_thread_with_helpers(void) {
    pthread_t thread;
    last_after_helpers(NULL);
    CHECK(pthread_create(&thread, NULL, last_after_helpers, NULL) == 0);
    pthread_exit(NULL);
}

static void *busy(void *argument) {
    uint64_t state = (uintptr_t)argument;
    for (;;) {
        size_t size = THRESHOLD + random_word(&state) % (8 * MIB);
        char *block = random_word(&state) % 2 ? malloc(size) : calloc(1, size);
        CHECK(block);
        uint64_t seed = random_word(&state);
        fill(block, size, seed, false);
        CHECK(holds(block, size, seed, false));
        if (random_word(&state) % 4 == 0) block = realloc(block, size / 2);
        free(block);
    }
    return NULL;
}

// Reads what is live all the time: it must never see it go.
static void *watching(void *argument) {
    char *block = argument;
    for (;;) {
        for (size_t at = 0; at < LIVE; at += 512 * PAGE) CHECK(block[at] == (char)(at / PAGE + 1));
    }
    return NULL;
}

static void with_busy_threads(void) {
    char *block = large_and_live(LIVE);
    pthread_t thread;
    for (uintptr_t i = 1; i <= 3; i++) CHECK(pthread_create(&thread, NULL, busy, (void *)i) == 0);
    CHECK(pthread_create(&thread, NULL, watching, block) == 0);
    sleep_ms(30);
    exit(17);
}

static void underscore_with_busy_threads(void) {
    char *block = large_and_live(LIVE);
    pthread_t thread;
    for (uintptr_t i = 1; i <= 3; i++) CHECK(pthread_create(&thread, NULL, busy, (void *)i) == 0);
    CHECK(pthread_create(&thread, NULL, watching, block) == 0);
    sleep_ms(30);
    _exit(18);
}

// Blocks every signal there is, past libc, so that nothing short of the end of the process stops it.
static void *deaf(void *argument) {
    uint64_t all = UINT64_MAX;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, sizeof all);
    return watching(argument);
}

static void with_deaf_threads(void) {
    char *block = large_and_live(LIVE);
    pthread_t thread;
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, deaf, block) == 0);
    sleep_ms(30);
    exit(19);
}

static void *blocking(void *argument) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    return watching(argument);
}

static void with_blocking_threads(void) {
    char *block = large_and_live(LIVE);
    pthread_t thread;
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, blocking, block) == 0);
    sleep_ms(30);
    exit(20);
}

static void *exiting(void *argument) {
    exit((int)(uintptr_t)argument);
}

static void two_at_once(void) {
    large_and_live(LIVE);
    pthread_t thread;
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&thread, NULL, exiting, (void *)21) == 0);
    _exit(21);
}

static void while_forking(void) {
    large_and_live(LIVE);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, busy, (void *)1) == 0);
    pid_t child = fork();
    if (child == 0) _exit(3);
    CHECK(wait_for(child) == 3);
    exit(22);
}

// A parent in vfork does not run until its child has called exec, which takes a while here.
static void *in_vfork(void *argument) {
    (void)argument;
    pid_t child = vfork();
    if (child == 0) {
        struct timespec time = {0, 200000000};
        syscall(SYS_nanosleep, &time, NULL);
        execl("/bin/true", "true", (char *)NULL);
        _exit(127);
    }
    return NULL;
}

static void with_thread_in_vfork(void) {
    large_and_live(LIVE);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, in_vfork, NULL) == 0);
    sleep_ms(30);
    exit(23);
}

// A handler on a stack of its own ends the process, as those that report crashes do.
static void end_process(int signal) {
    (void)signal;
    _exit(24);
}

static void from_signal_stack(void) {
    stack_t stack = {.ss_sp = malloc((size_t)SIGSTKSZ), .ss_size = (size_t)SIGSTKSZ};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = end_process, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    large_and_live(LIVE);
    raise(SIGSEGV);
}

// The smallest stack that a handler can have, in front of it a page that nobody may touch.
static void from_guarded_signal_stack(void) {
    size_t size = (size_t)sysconf(_SC_MINSIGSTKSZ) + PAGE;
    size = (size + PAGE - 1) & ~(PAGE - 1);
    char *place = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(place != MAP_FAILED && mprotect(place, PAGE, PROT_NONE) == 0);
    stack_t stack = {.ss_sp = place + PAGE, .ss_size = size};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = end_process, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    large_and_live(LIVE);
    raise(SIGUSR1);
}

static void ignoring(int signal) { (void)signal; }

static void with_children_of_vfork(void) {
    char *block = large_and_live(LIVE);
    signal(SIGCHLD, ignoring);
    for (int i = 0; i < 20; i++) {
        pid_t child = vfork();
        if (child == 0) _exit(i);
        CHECK(wait_for(child) == i);
        CHECK(posix_spawnp(&child, "/bin/true", NULL, NULL, (char *[]){"true", NULL}, environ) == 0);
        CHECK(wait_for(child) == 0);
    }
    for (size_t at = 0; at < LIVE; at += PAGE) CHECK(block[at] == (char)(at / PAGE + 1));
    exit(25);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    in_child("exit", by_exit, 7, "on_exit(7,x);atexit;destructor;");
    in_child("exit(265)", by_exit_256, 9, "atexit;destructor;");
    in_child("_exit", by_underscore_exit, 8, "");
    in_child("_Exit", by_capital_exit, 9, "");
    in_child("quick_exit", by_quick_exit, 10, "quick;");
    in_child("abort", by_abort, -SIGABRT, "");
    in_child("SIGKILL", by_kill, -SIGKILL, "");
    in_child("free in a handler", freeing_in_handler, 11, "freeing;atexit;destructor;");
    in_child("from a thread", from_thread, 12, "atexit;destructor;");
    in_child("from a thread, 16K stack", from_small_thread, 13, "atexit;destructor;");
    in_child("from a thread, 64K stack", from_64k_thread, 14, "atexit;destructor;");
    in_child("from a thread, 512M stack", from_large_thread, 15, "atexit;destructor;");
    in_child("after the main thread", after_main_thread, 16, "atexit;destructor;");
    in_child("end of the last thread", by_end_of_last_thread, 0, "atexit;destructor;");
    in_child("the same with helpers", by_end_of_last_thread_with_helpers, 0, "atexit;destructor;");
    in_child("busy threads", with_busy_threads, 17, "atexit;destructor;");
    in_child("_exit, busy threads", underscore_with_busy_threads, 18, "");
    in_child("deaf threads", with_deaf_threads, 19, "atexit;destructor;");
    in_child("threads that block signals", with_blocking_threads, 20, "atexit;destructor;");
    in_child("_exit and exit at once", two_at_once, 21, NULL);
    in_child("after a fork", while_forking, 22, "atexit;destructor;");
    in_child("a thread in vfork", with_thread_in_vfork, 23, "atexit;destructor;");
    in_child("on a signal stack", from_signal_stack, 24, "");
    in_child("on a small signal stack", from_guarded_signal_stack, 24, "");
    in_child("children of vfork", with_children_of_vfork, 25, "atexit;destructor;");
    return failures > 0;
}
