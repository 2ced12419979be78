// Works under limits as any program would: the arguments say how much memory it uses and which limit it sets itself.
#include "check.h"
#include <signal.h>
#include <sys/resource.h>

static void limit_to(int resource, size_t bytes) {
    struct rlimit limit = {bytes, bytes};
    CHECK(setrlimit(resource, &limit) == 0);
}

static void *in_thread(void *argument) {
    char *block = malloc(2 * MIB);
    CHECK(block);
    memset(block, 1, 2 * MIB);
    free(block);
    return argument;
}

// A program that uses up to `bytes`: in one block, in several, growing, with small blocks between them, and with threads.
static void use(size_t bytes) {
    for (int round = 0; round < 3; round++) {
        char *block = malloc(bytes);
        CHECK(block);
        fill(block, bytes, 1, false);
        CHECK(holds(block, bytes, 1, false));
        free(block);
        block = calloc(1, bytes);
        CHECK(block && all_zero(block, bytes));
        free(block);
        char *parts[8];
        for (int i = 0; i < 8; i++) {
            parts[i] = malloc(bytes / 8);
            CHECK(parts[i]);
            fill(parts[i], bytes / 8, (uint64_t)i, false);
        }
        for (int i = 0; i < 8; i++) {
            CHECK(holds(parts[i], bytes / 8, (uint64_t)i, false));
            free(parts[i]);
        }
        // Doubling by realloc needs no more than the last size where it can move pages.
        size_t size = 64 * KIB;
        block = malloc(size);
        while (size < bytes / 4) {
            block = realloc(block, size *= 2);
            CHECK(block);
            block[size - 1] = 1;
        }
        free(block);
        char *small[1000];
        for (int i = 0; i < 1000; i++) CHECK((small[i] = malloc(1000)));
        for (int i = 0; i < 1000; i++) free(small[i]);
    }
}

static void use_threads(void) {
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 256 * KIB) == 0);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], &attributes, in_thread, NULL) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

// Until the limit is reached malloc works, then it says so, and what is live stays as it is.
static void use_up(size_t expected) {
    enum { MOST = 4096 };
    static char *blocks[MOST];
    size_t count = 0, each = 4 * MIB;
    while (count < MOST && (blocks[count] = malloc(each))) {
        fill(blocks[count], each, count, false);
        count++;
    }
    printf("%zu MiB until the limit\n", count * each / MIB);
    CHECK(count < MOST && errno == ENOMEM);
    CHECK(count * each >= expected);
    for (size_t i = 0; i < count; i++) {
        CHECK(holds(blocks[i], each, i, false));
        free(blocks[i]);
    }
    // And then again.
    char *block = malloc(expected / 2);
    CHECK(block);
    memset(block, 1, expected / 2);
    free(block);
}

// The same by mappings of its own, in a program that has large memory as well.
static void map_up(size_t expected) {
    enum { MOST = 4096 };
    static char *places[MOST];
    size_t count = 0, each = 4 * MIB;
    char *block = malloc(10 * MIB);
    CHECK(block);
    fill(block, 10 * MIB, 1, false);
    while (count < MOST) {
        places[count] = mmap(NULL, each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (places[count] == MAP_FAILED) break;
        places[count][each - 1] = 1;
        count++;
    }
    printf("%zu MiB mapped until the limit\n", count * each / MIB);
    CHECK(count < MOST && errno == ENOMEM);
    CHECK(count * each >= expected);
    CHECK(holds(block, 10 * MIB, 1, false));
    for (size_t i = 0; i < count; i++) CHECK(munmap(places[i], each) == 0);
    free(block);
}

static void *once_begun(void *mutex) {
    CHECK(pthread_mutex_lock(mutex) == 0 && pthread_mutex_unlock(mutex) == 0);
    return NULL;
}

// Threads with stacks of 4 MiB until none is granted any more: at least as many as fit into `expected` bytes.
static void thread_up(size_t expected) {
    enum { MOST = 4096 };
    static pthread_t threads[MOST];
    size_t count = 0, each = 4 * MIB;
    char *block = malloc(10 * MIB);
    CHECK(block);
    fill(block, 10 * MIB, 1, false);
    pthread_mutex_t begun = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, each) == 0);
    CHECK(pthread_mutex_lock(&begun) == 0);
    int error = 0;
    while (count < MOST && !(error = pthread_create(&threads[count], &attributes, once_begun, &begun))) count++;
    printf("%zu threads until the limit\n", count);
    CHECK(count < MOST && error == EAGAIN);
    CHECK(count * each >= expected);
    CHECK(pthread_mutex_unlock(&begun) == 0);
    for (size_t i = 0; i < count; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(holds(block, 10 * MIB, 1, false));
    free(block);
}

// All mappings that a process may have are there when a block is freed that may have to be mapped anew, which the kernel refuses then. Nobody
// waits for that one for ever: not those who are refused memory later, and not those who trim.
static void no_mapping_left(void) {
    size_t size = 64 * MIB, pages = 80000;
    char *blocks[3];
    for (int i = 0; i < 3; i++) {
        CHECK((blocks[i] = malloc(size)));
        fill(blocks[i], size, (uint64_t)i, false);
    }
    // What was locked once is mapped as its neighbours are, and still nothing that another owner should get as it is.
    char *inside = (char *)(((uintptr_t)blocks[1] + PAGE) & ~(PAGE - 1));
    if (mlock(inside, PAGE) == 0) CHECK(munlock(inside, PAGE) == 0);
    char *many = mmap(NULL, pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(many != MAP_FAILED);
    size_t apart = 1;
    while (apart < pages && mprotect(many + apart * PAGE, PAGE, PROT_READ) == 0) apart += 2;
    CHECK(apart < pages && errno == ENOMEM);
    free(blocks[1]);
    uint64_t begin = now_ns();
    for (int i = 0; i < 3; i++) {
        char *volatile refused = malloc(GIB << 16);
        CHECK(!refused && errno == ENOMEM);
        malloc_trim(0);
    }
    CHECK(munmap(many, pages * PAGE) == 0);
    struct rlimit before, tight;
    CHECK(getrlimit(RLIMIT_AS, &before) == 0);
    tight = (struct rlimit){GIB, before.rlim_max};
    CHECK(setrlimit(RLIMIT_AS, &tight) == 0);
    for (int i = 0; i < 3; i++) {
        char *volatile refused = malloc(2 * GIB);
        CHECK(!refused && errno == ENOMEM);
    }
    CHECK(setrlimit(RLIMIT_AS, &before) == 0);
    printf("refused after %.3f s\n", (double)(now_ns() - begin) / 1e9);
    CHECK(now_ns() - begin < 2500000000u);
    for (int i = 0; i < 3; i += 2) {
        CHECK(holds(blocks[i], size, (uint64_t)i, false));
        free(blocks[i]);
    }
    use(300 * MIB);
}

static void close_all(void) {
    for (int file = 3; file < 1024; file++) close(file);
}

// Another program's descriptors are the lowest free ones, whatever happens in the background, and stay open.
static void lowest_descriptor(void) {
    uint64_t end = now_ns() + 3000000000u;
    size_t round = 0;
    while (now_ns() < end) {
        if (round++ % 20000 == 0) {
            char *block = calloc(1, 200 * MIB);
            memset(block, 1, 200 * MIB);
            free(block);
        }
        close(0);
        int file = open("/dev/null", O_RDONLY);
        CHECK(file == 0);
        // Everything above 2 is closed, as daemons do; what is opened then stays open.
        CHECK(syscall(SYS_close_range, 3, ~0u, 0) == 0);
        int other = open("/dev/zero", O_RDONLY);
        CHECK(other == 3);
        char byte = 1;
        CHECK(read(other, &byte, 1) == 1 && byte == 0);
        CHECK(read(file, &byte, 1) == 0);
        CHECK(close(other) == 0);
    }
}

int main(int count, char **arguments) {
    CHECK(count >= 2);
    const char *what = arguments[1];
    size_t bytes = count > 2 ? strtoul(arguments[2], NULL, 10) * MIB : 0;
    size_t second = count > 3 ? strtoul(arguments[3], NULL, 10) * MIB : 0;
    alarm(60 * patience());
    if (!strcmp(what, "use")) {
        use(bytes);
        use_threads();
    } else if (!strcmp(what, "use-alone")) {
        use(bytes);
        CHECK(status_field("Threads") == 1);
    } else if (!strcmp(what, "use-up")) {
        use_up(bytes);
    } else if (!strcmp(what, "map-up")) {
        map_up(bytes);
    } else if (!strcmp(what, "thread-up")) {
        thread_up(bytes);
    } else if (!strcmp(what, "no-mapping-left")) {
        no_mapping_left();
    } else if (!strcmp(what, "own-as")) {
        // The limit comes after large memory was used.
        use(bytes);
        limit_to(RLIMIT_AS, second);
        use(bytes);
        use_threads();
    } else if (!strcmp(what, "own-data")) {
        use(bytes);
        limit_to(RLIMIT_DATA, second);
        use(bytes);
        use_threads();
    } else if (!strcmp(what, "closed")) {
        close_all();
        use(bytes);
        close(0);
        close(1);
        close(2);
        use(bytes);
        // Nothing of ours took their numbers.
        CHECK(open("/dev/null", O_RDWR) == 0 && open("/dev/null", O_RDWR) == 1 && open("/dev/null", O_RDWR) == 2);
    } else if (!strcmp(what, "few-descriptors")) {
        use(bytes / 2);
        limit_to(RLIMIT_NOFILE, 3);
        CHECK(open("/dev/null", O_RDONLY) < 0 && errno == EMFILE);
        use(bytes);
    } else if (!strcmp(what, "lowest-descriptor")) {
        lowest_descriptor();
    } else if (!strcmp(what, "too-much")) {
        // More than the machine has: with the kernel's usual heuristic, refused at once and not when it is touched.
        char mode[16];
        CHECK(read_file("/proc/sys/vm/overcommit_memory", mode, sizeof mode) > 0);
        if (*mode == '1') return 0;
        size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * PAGE;
        char *volatile block = malloc(4 * machine);
        CHECK(!block && errno == ENOMEM);
        block = calloc(4, machine);
        CHECK(!block && errno == ENOMEM);
        block = malloc(4 * MIB);
        block = realloc(block, 4 * machine);
        CHECK(!block && errno == ENOMEM);
    } else {
        return 2;
    }
    return 0;
}
