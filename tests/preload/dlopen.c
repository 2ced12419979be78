// Libraries that come and go, allocate in their constructors and destructors, and threads with large thread-local storage. The
// argument is the library.
#include "check.h"

static __thread char large_storage[3 * 1024 * 1024];
static const char *library;

static void open_and_close(void) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) fprintf(stderr, "%s\n", dlerror());
    CHECK(handle);
    char *(*work)(size_t) = (char *(*)(size_t))dlsym(handle, "plugin_work");
    CHECK(work);
    char *block = work(5 * MIB);
    CHECK(dlclose(handle) == 0);
    // What a library allocated outlives it.
    CHECK(holds(block, 5 * MIB, 5 * MIB, false));
    free(block);
}

static void *in_thread(void *argument) {
    uint64_t state = (uintptr_t)argument;
    memset(large_storage, (int)state, sizeof large_storage);
    for (int i = 0; i < 20; i++) {
        size_t bytes = THRESHOLD + random_word(&state) % (6 * MIB);
        char *block = calloc(1, bytes);
        CHECK(block && is_zero(block, bytes, false));
        fill(block, bytes, state, false);
        free(block);
    }
    for (size_t i = 0; i < sizeof large_storage; i += PAGE) CHECK(large_storage[i] == (char)(uintptr_t)argument);
    return NULL;
}

static void *exit_here(void *argument) {
    in_thread(argument);
    large_and_live(400 * MIB);
    exit(9);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    library = arguments[1];
    for (int i = 0; i < 30; i++) open_and_close();
    void *handle = dlopen(library, RTLD_LAZY);
    CHECK(handle);
    for (int round = 0; round < 3; round++) {
        pthread_t threads[24];
        for (uintptr_t i = 0; i < 24; i++) CHECK(pthread_create(&threads[i], NULL, in_thread, (void *)(i + 1)) == 0);
        open_and_close();
        for (int i = 0; i < 24; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    }
    // A thread with large thread-local storage, on a large stack, ends the process.
    for (int round = 0; round < 3; round++) {
        pid_t child = fork();
        if (child == 0) {
            pthread_attr_t attributes;
            pthread_t thread;
            alarm(20 * patience());
            CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 64 * MIB) == 0);
            CHECK(pthread_create(&thread, &attributes, exit_here, (void *)5) == 0);
            for (;;) pause();
        }
        CHECK(wait_for(child) == 9);
    }
    CHECK(dlclose(handle) == 0);
    return 0;
}
