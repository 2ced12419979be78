// The case of "split underutilized THPs": sparse MIB ROUNDS [dense|stay]. One byte every 50 KiB of huge pages, checked and unmapped, again and
// again; or all of them; or checked when SIGUSR1 has come.
#include "check.h"
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

int main(int count, char **arguments) {
    CHECK(count >= 3);
    size_t huge = 2 * MIB, bytes = strtoul(arguments[1], NULL, 10) * MIB;
    int stay = count > 3 && !strcmp(arguments[3], "stay"), signal_number;
    size_t stride = count > 3 && !stay ? PAGE : 50 * KIB;
    sigset_t told;
    sigemptyset(&told);
    sigaddset(&told, SIGUSR1);
    if (stay) sigprocmask(SIG_BLOCK, &told, NULL);
    alarm(100 * patience());
    for (unsigned long round = strtoul(arguments[2], NULL, 10); round > 0; round--) {
        char *mapped = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(mapped != MAP_FAILED);
        char *start = (char *)(((uintptr_t)mapped + huge - 1) & ~(uintptr_t)(huge - 1));
        CHECK(!madvise(start, bytes, MADV_HUGEPAGE));
        for (size_t at = 0; at < bytes; at += stride) start[at] = 'Z';
        if (stay) CHECK(puts("there") >= 0 && !fflush(stdout) && !sigwait(&told, &signal_number));
        for (size_t at = 0; at < bytes; at += stride) CHECK(start[at] == 'Z' && (stride == PAGE || start[at + 1] == 0));
        CHECK(!munmap(mapped, bytes + huge));
    }
    return 0;
}
