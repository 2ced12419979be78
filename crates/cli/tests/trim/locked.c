// Runs a command in which whoever reads memory of one process waits, as for a process whose memory is locked, until this program's input
// ends. locked PID COMMAND...
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HELD = 64 };

static pid_t child;

static void pass_on(int number) { kill(child, number); }

static void run(char **command, int to) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) _exit(3);
    int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
    if (listener < 0) _exit(3);
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &listener, sizeof listener);
    if (sendmsg(to, &message, 0) != 1) _exit(3);
    close(listener);
    execvp(command[0], command);
    _exit(3);
}

static int receive(int from) {
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int listener;
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || !CMSG_FIRSTHDR(&message)) exit(3);
    memcpy(&listener, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof listener);
    return listener;
}

static void go_on(int listener, unsigned long long id) {
    struct seccomp_notif_resp answer = {.id = id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
    // Whoever has waited may have been killed.
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
}

int main(int count, char **arguments) {
    if (count < 3) return 3;
    unsigned long long locked = strtoull(arguments[1], NULL, 10), held[HELD];
    int pair[2], holding = 0, open = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return 3;
    child = fork();
    if (child < 0) return 3;
    if (!child) {
        // Its input is this program's own business.
        close(0);
        run(arguments + 2, pair[1]);
    }
    close(pair[1]);
    signal(SIGTERM, pass_on);
    int listener = receive(pair[0]);
    for (;;) {
        struct pollfd wait[] = {{listener, POLLIN, 0}, {open ? 0 : -1, POLLIN, 0}};
        if (poll(wait, 2, -1) < 0 && errno == EINTR) continue;
        char byte;
        if (wait[1].revents && read(0, &byte, 1) <= 0) {
            open = 0;
            while (holding > 0) go_on(listener, held[--holding]);
        }
        if (wait[0].revents & POLLIN) {
            struct seccomp_notif call;
            memset(&call, 0, sizeof call);
            if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call)) continue;
            if (open && call.data.args[0] == locked && holding < HELD) {
                held[holding++] = call.id;
            } else {
                go_on(listener, call.id);
            }
        } else if (wait[0].revents) {
            // Nobody is left.
            int status;
            waitpid(child, &status, 0);
            return WIFEXITED(status) ? WEXITSTATUS(status) : 4;
        }
    }
}
