// Programs whose memory has to be on the node that was asked for, by what the kernel says of every page (move_pages).
// numa spans | policy MODE NODE... | hotplug SECONDS
#include "check.h"

#include <dirent.h>
#include <sched.h>

#define NODES 64
#define CPUS 1024
#define DEFAULT 0
#define PREFERRED 1
#define BIND 2
#define INTERLEAVE 3

static int nodes_with_memory[NODES], memory_nodes;
static int node_of_cpu[CPUS], home_of_node[NODES];

// The numbers of a kernel list such as 0-3,8.
static int numbers(const char *path, int *into, int most) {
    char text[4096];
    if (read_file(path, text, sizeof text) <= 0) return 0;
    int count = 0;
    for (char *at = text; *at >= '0' && *at <= '9';) {
        long first = strtol(at, &at, 10), last = first;
        if (*at == '-') last = strtol(at + 1, &at, 10);
        for (; first <= last && count < most; first++) into[count++] = (int)first;
        if (*at == ',') at++;
    }
    return count;
}

static void read_machine(void) {
    int online[NODES], cpus[CPUS];
    memory_nodes = numbers("/sys/devices/system/node/has_memory", nodes_with_memory, NODES);
    int count = numbers("/sys/devices/system/node/online", online, NODES);
    for (int cpu = 0; cpu < CPUS; cpu++) node_of_cpu[cpu] = -1;
    for (int index = 0; index < count; index++) {
        int node = online[index];
        char path[128], text[4096];
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
        int own = numbers(path, cpus, CPUS);
        for (int at = 0; at < own; at++) node_of_cpu[cpus[at]] = node;
        // The nearest node with memory; the columns are the online nodes.
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/distance", node);
        CHECK(read_file(path, text, sizeof text) > 0);
        char *at = text;
        long best = 1000;
        for (int column = 0; column < count; column++) {
            long distance = strtol(at, &at, 10);
            for (int other = 0; other < memory_nodes; other++) {
                if (nodes_with_memory[other] == online[column] && distance < best) {
                    best = distance;
                    home_of_node[node] = online[column];
                }
            }
        }
    }
}

static bool go_to_cpu(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
}

static void go_everywhere(void) {
    cpu_set_t set;
    memset(&set, 0xff, sizeof set);
    CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
}

static int home_of_cpu(int cpu) { return home_of_node[node_of_cpu[cpu]]; }

static size_t looked_at, elsewhere, absent;

// Looks where each page of a block lies. Pages that were never touched don't count.
static void look(const char *what, void *block, size_t bytes, int node) {
    static void *pages[512];
    static int status[512];
    uintptr_t start = (uintptr_t)block & ~(PAGE - 1), end = (uintptr_t)block + bytes;
    size_t wrong = 0;
    int other = -1;
    for (uintptr_t at = start; at < end;) {
        int count = 0;
        for (; count < 512 && at < end; at += PAGE) pages[count++] = (void *)at;
        CHECK(syscall(SYS_move_pages, 0, (long)count, pages, NULL, status, 0) == 0);
        for (int index = 0; index < count; index++) {
            if (status[index] < 0) {
                absent++;
            } else {
                looked_at++;
                if (status[index] != node) {
                    wrong++;
                    other = status[index];
                }
            }
        }
    }
    if (wrong) fprintf(stderr, "%s: %zu of %zu pages are on node %d instead of %d\n", what, wrong, bytes / PAGE, other, node);
    elsewhere += wrong;
}

static void touch(char *block, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE) block[at] = (char)(at / PAGE + 1);
    block[bytes - 1] = 1;
}

static const size_t sizes[] = {64 * KIB, 100 * KIB, 256 * KIB, MIB, 3 * MIB, 8 * MIB, 24 * MIB, 40 * MIB};
#define SIZES (sizeof sizes / sizeof *sizes)

// Another CPU, of another home if there is one.
static int other_cpu(int cpu) {
    int same = cpu;
    for (int other = 0; other < CPUS; other++) {
        if (node_of_cpu[other] < 0 || other == cpu) continue;
        if (home_of_cpu(other) != home_of_cpu(cpu)) return other;
        same = other;
    }
    return same;
}

static void *free_there(void *block) {
    free(block);
    return NULL;
}

// Frees a block in another thread, on another CPU.
static void free_on(void *block, int cpu) {
    pthread_t thread;
    pthread_attr_t attributes;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    CHECK(!pthread_attr_init(&attributes) && !pthread_attr_setaffinity_np(&attributes, sizeof set, &set));
    CHECK(!pthread_create(&thread, &attributes, free_there, block));
    CHECK(!pthread_join(thread, NULL));
    pthread_attr_destroy(&attributes);
}

// All that a thread on `cpu` takes is on its home, whoever had it before and whoever touches it first.
static void spans_of(int cpu) {
    int node = home_of_cpu(cpu), other = other_cpu(cpu);
    for (size_t size = 0; size < SIZES; size++) {
        size_t bytes = sizes[size];
        for (int round = 0; round < 4; round++) {
            CHECK(go_to_cpu(cpu));
            char *block = malloc(bytes);
            CHECK(block);
            // Asked for here and touched there, as by a thread that was moved.
            if (round % 2) CHECK(go_to_cpu(other));
            touch(block, bytes);
            look("malloc", block, bytes, node);
            CHECK(go_to_cpu(cpu));
            char *zeroes = calloc(1, bytes);
            CHECK(zeroes && is_zero(zeroes, bytes, false));
            touch(zeroes, bytes);
            look("calloc", zeroes, bytes, node);
            // Freed there, and asked for there and here.
            free_on(block, other);
            CHECK(go_to_cpu(other));
            block = malloc(bytes);
            CHECK(block);
            touch(block, bytes);
            look("malloc after a free elsewhere", block, bytes, home_of_cpu(other));
            CHECK(go_to_cpu(cpu));
            char *mine = malloc(bytes);
            CHECK(mine);
            touch(mine, bytes);
            look("malloc again", mine, bytes, node);
            free(block);
            free(zeroes);
            free(mine);
        }
    }
}

// A block that grows by moves has all of its pages on one node: where it was taken, or where it was copied to.
static void moves_of(int cpu) {
    int node = home_of_cpu(cpu), other = other_cpu(cpu);
    void *stops[16];
    CHECK(go_to_cpu(cpu));
    char *block = malloc(4 * MIB);
    CHECK(block);
    touch(block, 4 * MIB);
    for (int step = 0; step < 6; step++) {
        // Something behind it, so that it can't grow in place.
        CHECK(stops[step] = malloc(4 * MIB));
        block = realloc(block, (size_t)(step + 2) * 4 * MIB);
        CHECK(block);
        touch(block, (size_t)(step + 2) * 4 * MIB);
        look("realloc", block, (size_t)(step + 2) * 4 * MIB, node);
    }
    CHECK(go_to_cpu(other));
    block = realloc(block, 40 * MIB);
    CHECK(block);
    touch(block, 40 * MIB);
    // By the page tables it stays on its node; a copy is on the node of who asked.
    int now[1];
    void *first[1] = {block};
    CHECK(syscall(SYS_move_pages, 0, 1L, first, NULL, now, 0) == 0);
    CHECK(now[0] == node || now[0] == home_of_cpu(other));
    look("realloc elsewhere", block, 40 * MIB, now[0]);
    free(block);
    for (int step = 0; step < 6; step++) free(stops[step]);
    // And what they were is as good as new.
    CHECK(go_to_cpu(other));
    for (int step = 0; step < 6; step++) {
        CHECK(stops[step] = malloc(8 * MIB));
        touch(stops[step], 8 * MIB);
        look("malloc after moves", stops[step], 8 * MIB, home_of_cpu(other));
    }
    for (int step = 0; step < 6; step++) free(stops[step]);
}

// Zeroed ahead by helpers, wherever they run.
static void zeroes_of(int cpu) {
    CHECK(go_to_cpu(cpu));
    for (int round = 0; round < 20; round++) {
        char *block = calloc(1, 16 * MIB);
        CHECK(block && is_zero(block, 16 * MIB, false));
        touch(block, 16 * MIB);
        look("calloc again", block, 16 * MIB, home_of_cpu(cpu));
        free(block);
        sleep_ms(30);
    }
}

static void in_a_child(void (*what)(int), int cpu) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        elsewhere = 0;
        what(cpu);
        CHECK(elsewhere == 0);
        exit(0);
    }
    CHECK(wait_for(child) == 0);
}

static void spans(void) {
    for (int cpu = 0; cpu < CPUS; cpu++) {
        // One CPU of each node.
        bool first = node_of_cpu[cpu] >= 0;
        for (int before = 0; before < cpu; before++) first = first && node_of_cpu[before] != node_of_cpu[cpu];
        if (!first) continue;
        size_t before = looked_at;
        spans_of(cpu);
        moves_of(cpu);
        zeroes_of(cpu);
        CHECK(go_to_cpu(cpu));
        in_a_child(spans_of, cpu);
        go_everywhere();
        printf("CPU %d of node %d: %zu pages, %zu not on node %d\n", cpu, node_of_cpu[cpu], looked_at - before, elsewhere, home_of_cpu(cpu));
    }
    // What was touched and has gone again says nothing of the others.
    CHECK(elsewhere == 0 && looked_at > 100000 && absent < looked_at / 100);
}

// A policy of the program's own is the last word: all is where it says.
static void policy(int argc, char **argv) {
    int mode = atoi(argv[0]);
    unsigned long mask = 0;
    for (int index = 1; index < argc; index++) mask |= 1ul << atoi(argv[index]);
    // Taken before it, and free.
    for (int cpu = 0; cpu < CPUS && mode != DEFAULT; cpu++) {
        if (node_of_cpu[cpu] < 0) continue;
        CHECK(go_to_cpu(cpu));
        void *before = malloc(8 * MIB);
        CHECK(before);
        touch(before, 8 * MIB);
        free(before);
    }
    if (mode != DEFAULT) CHECK(syscall(SYS_set_mempolicy, mode, &mask, 64ul) == 0);
    size_t on[NODES] = {0}, all = 0;
    for (int cpu = 0; cpu < CPUS; cpu++) {
        if (node_of_cpu[cpu] < 0) continue;
        CHECK(go_to_cpu(cpu));
        for (size_t size = 0; size < SIZES; size++) {
            char *block = malloc(sizes[size]);
            CHECK(block);
            touch(block, sizes[size]);
            for (size_t at = 0; at < sizes[size]; at += PAGE) {
                void *page[1] = {block + at};
                int status[1];
                CHECK(syscall(SYS_move_pages, 0, 1L, page, NULL, status, 0) == 0);
                CHECK(status[0] >= 0 && status[0] < NODES);
                on[status[0]]++;
                all++;
            }
            free(block);
        }
    }
    size_t allowed = 0, used = 0;
    for (int node = 0; node < NODES; node++) {
        if (on[node]) printf("node %d: %zu pages\n", node, on[node]);
        for (int index = 1; index < argc; index++) {
            if (atoi(argv[index]) == node) {
                allowed += on[node];
                used += on[node] > 0;
            }
        }
    }
    CHECK(allowed == all);
    if (mode == INTERLEAVE) CHECK(used == (size_t)(argc - 1));
}

static atomic_bool over;
static atomic_size_t pairs;

static void *storm(void *seed_of_thread) {
    uint64_t seed = (uint64_t)(uintptr_t)seed_of_thread;
    char *blocks[16] = {0};
    size_t bytes[16] = {0};
    uint64_t seeds[16] = {0};
    while (!atomic_load(&over)) {
        unsigned slot = random_word(&seed) % 16;
        if (blocks[slot]) CHECK(holds(blocks[slot], bytes[slot], seeds[slot], false));
        free(blocks[slot]);
        bytes[slot] = 64 * KIB + random_word(&seed) % (random_word(&seed) % 8 ? 512 * KIB : 6 * MIB);
        seeds[slot] = seed;
        bool zeroes = random_word(&seed) % 4 == 0;
        blocks[slot] = zeroes ? calloc(1, bytes[slot]) : malloc(bytes[slot]);
        CHECK(blocks[slot] && (!zeroes || is_zero(blocks[slot], bytes[slot], false)));
        fill(blocks[slot], bytes[slot], seeds[slot], false);
        atomic_fetch_add(&pairs, 1);
    }
    for (int slot = 0; slot < 16; slot++) free(blocks[slot]);
    return NULL;
}

static bool set_online(int cpu, bool on) {
    char path[128];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/online", cpu);
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0) return false;
    bool done = write(file, on ? "1" : "0", 1) == 1;
    close(file);
    return done;
}

// Whether Pagecrew's watcher, which is started when there is work, may run on the CPU.
static bool watcher_may_use(int cpu) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    bool may = false;
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        bool watcher = fgets(name, sizeof name, file) && !strcmp(name, "pagecrew/watch\n");
        fclose(file);
        cpu_set_t set;
        if (watcher && !sched_getaffinity(atoi(task->d_name), sizeof set, &set)) may |= CPU_ISSET(cpu, &set);
    }
    closedir(tasks);
    return may;
}

// CPUs go and come back while all others allocate. What waits on a CPU that is gone is not lost, and a CPU that was offline when the program
// began belongs to its own node.
static void hotplug(unsigned seconds, int late) {
    uint64_t end = now_ns() + seconds * 1000000000ull, seed = 1;
    pthread_t threads[8];
    for (uintptr_t thread = 0; thread < 8; thread++) CHECK(!pthread_create(&threads[thread], NULL, storm, (void *)(thread + 1)));
    unsigned changes = 0;
    while (now_ns() < end) {
        int cpu = 1 + (int)(random_word(&seed) % 8);
        if (cpu == late || !set_online(cpu, false)) continue;
        sleep_ms(20 + random_word(&seed) % 100);
        CHECK(set_online(cpu, true));
        changes++;
    }
    atomic_store(&over, true);
    for (int thread = 0; thread < 8; thread++) CHECK(!pthread_join(threads[thread], NULL));
    CHECK(changes > 0);
    printf("%u times a CPU went and came back, %zu blocks\n", changes, atomic_load(&pairs));
    if (late > 0) {
        CHECK(set_online(late, true));
        read_machine();
        CHECK(node_of_cpu[late] >= 0);
        spans_of(late);
        printf("CPU %d came later: %zu pages, %zu not on node %d\n", late, looked_at, elsewhere, home_of_cpu(late));
        CHECK(elsewhere == 0);
        go_everywhere();
        if (under_pagecrew()) CHECK(watcher_may_use(late));
    }
    // What is free on CPUs that are gone can be had by others.
    go_everywhere();
    CHECK(go_to_cpu(1));
    void *blocks[64];
    for (int index = 0; index < 64; index++) {
        CHECK(blocks[index] = malloc(MIB));
        touch(blocks[index], MIB);
    }
    for (int index = 0; index < 64; index++) free(blocks[index]);
    go_everywhere();
    CHECK(set_online(1, false));
    sleep_ms(100);
    malloc_trim(0);
    sleep_ms(1500);
    malloc_trim(0);
    size_t left = resident();
    CHECK(set_online(1, true));
    printf("%zu MiB resident after a trim\n", left / MIB);
    if (under_pagecrew()) CHECK(left < 48 * MIB);
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    // Lines in the order in which they happen.
    setvbuf(stdout, NULL, _IOLBF, 0);
    read_machine();
    if (!strcmp(argv[1], "spans")) spans();
    else if (!strcmp(argv[1], "policy") && argc > 3) policy(argc - 2, argv + 2);
    else if (!strcmp(argv[1], "hotplug") && argc > 3) hotplug((unsigned)atoi(argv[2]), atoi(argv[3]));
    else return 2;
    return 0;
}
