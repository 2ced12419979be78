// A tenant of a pool: tenant SOCKET HAND_OUTS LARGEST_MIB SEED. Takes files of random sizes, searches each whole for a byte that isn't
// zero, leaves a pattern everywhere, and gives them back in every way there is, up to four at a time. What it still has mapped stays
// its own.
#include "../preload/check.h"
#include <stdalign.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define HUGE (2 * MIB)
#define HELD 4

struct hand_out {
    int connection, file;
    size_t size;
    char *start;
    char path[512];
    uint64_t seed;
};

static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    CHECK(strlen(path) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(connection >= 0 && !connect(connection, (struct sockaddr *)&address, sizeof address));
    return connection;
}

// One request and its answer, with the descriptor that came with it, or -1.
static int ask(int connection, const char *request, char *answer, size_t room) {
    CHECK(send(connection, request, strlen(request), MSG_NOSIGNAL) == (ssize_t)strlen(request));
    struct iovec data = {answer, room - 1};
    alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t length = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    CHECK(length > 0 && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)));
    answer[length] = 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header) return -1;
    CHECK(header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)));
    int file;
    memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
}

// Asks until there is memory: what others have given back takes a moment.
static void take(struct hand_out *held, const char *socket, size_t size, bool until_closed, uint64_t seed, size_t *ready) {
    char request[128], answer[4096];
    uint64_t end = now_ns() + 60000000000;
    snprintf(request, sizeof request, "take size=%zu until=%s", size, until_closed ? "closed" : "unused");
    for (;;) {
        held->connection = connect_to(socket);
        held->file = ask(held->connection, request, answer, sizeof answer);
        if (held->file >= 0) break;
        if (strncmp(answer, "error code=no-memory ", 21) && strncmp(answer, "error code=limit ", 17)) fail(__FILE__, __LINE__, answer);
        CHECK(now_ns() < end);
        close(held->connection);
        sleep_ms(20);
    }
    char backing[16];
    unsigned node;
    size_t ready_here;
    CHECK(sscanf(answer, "taken size=%zu ready=%zu node=%u backing=%15s path=%511[^\n]", &held->size, &ready_here, &node, backing,
                 held->path) == 5);
    CHECK(held->size == size && ready_here <= size);
    *ready += ready_here;
    struct stat by_file, by_path;
    CHECK(!fstat(held->file, &by_file) && !stat(held->path, &by_path));
    CHECK(by_file.st_ino == by_path.st_ino && by_file.st_dev == by_path.st_dev && (size_t)by_file.st_size == size);
    CHECK((by_file.st_mode & 07777) == 0600 && by_file.st_uid == geteuid() && by_file.st_nlink == 1);
    held->start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, held->file, 0);
    CHECK(held->start != MAP_FAILED);
    CHECK(all_zero(held->start, size));
    held->seed = seed;
    fill(held->start, size, seed, true);
}

static void give_back(struct hand_out *held, unsigned way) {
    CHECK(holds(held->start, held->size, held->seed, true));
    if (way == 0) {
        // The memory is the tenant's as long as it is mapped, whatever the tenant has said.
        char request[1024], answer[4096];
        snprintf(request, sizeof request, "release path=%s", held->path);
        CHECK(ask(held->connection, request, answer, sizeof answer) == -1);
        if (strncmp(answer, "released size=", 14)) fail(__FILE__, __LINE__, answer);
        // Its name stays as long as that, but nobody else can open it.
        struct stat facts;
        CHECK(!stat(held->path, &facts) && facts.st_uid == 0 && (facts.st_mode & 07777) == 0);
        CHECK(geteuid() == 0 || (open(held->path, O_RDWR) == -1 && errno == EACCES));
        fill(held->start, held->size, held->seed + 1, true);
        close(held->connection);
        close(held->file);
        sleep_ms(5);
        CHECK(holds(held->start, held->size, held->seed + 1, true));
    } else if (way == 1) {
        close(held->connection);
        sleep_ms(5);
        CHECK(holds(held->start, held->size, held->seed, true));
        close(held->file);
    } else {
        close(held->file);
        close(held->connection);
    }
    CHECK(!munmap(held->start, held->size));
    held->start = NULL;
}

int main(int count, char **arguments) {
    CHECK(count == 5);
    const char *socket = arguments[1];
    unsigned long hand_outs = strtoul(arguments[2], NULL, 10), largest = strtoul(arguments[3], NULL, 10) * MIB / HUGE;
    uint64_t random = strtoul(arguments[4], NULL, 10);
    struct hand_out held[HELD] = {{0}};
    size_t bytes = 0, ready = 0;
    for (unsigned long round = 0; round < hand_outs; round++) {
        struct hand_out *one = &held[random_word(&random) % HELD];
        if (one->start) give_back(one, random_word(&random) % 3);
        // Half of them of one size, as it is where machines are alike.
        size_t size = (random_word(&random) % 2 ? 2 : 1 + random_word(&random) % largest) * HUGE;
        take(one, socket, size, random_word(&random) % 2, random_word(&random), &ready);
        bytes += size;
        sleep_ms(random_word(&random) % 4);
    }
    for (unsigned way = 0; way < HELD; way++) {
        if (held[way].start) give_back(&held[way], way % 3);
    }
    printf("%lu %zu %zu\n", hand_outs, bytes / MIB, ready / MIB);
    return 0;
}
