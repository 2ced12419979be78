// Runs a program as Docker's default profile of system calls lets it run in a container: sandbox docker PROGRAM...; or on a kernel that
// has no restartable sequences: sandbox no-rseq PROGRAM... What the profile does not allow fails with EPERM, clone3 with ENOSYS.
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#else
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#endif
#ifndef __NR_clone3
#define __NR_clone3 435
#endif

// The calls that the profile's documentation names as blocked, and that this processor has. Those of NUMA policy take CAP_SYS_NICE.
static const unsigned blocked[] = {
    __NR_acct, __NR_add_key, __NR_bpf, __NR_clock_adjtime, __NR_clock_settime, __NR_delete_module, __NR_finit_module, __NR_get_mempolicy,
    __NR_init_module, __NR_kcmp, __NR_kexec_load, __NR_keyctl, __NR_mbind, __NR_migrate_pages, __NR_mount, __NR_move_pages,
    __NR_name_to_handle_at, __NR_nfsservctl, __NR_open_by_handle_at, __NR_perf_event_open, __NR_personality, __NR_pivot_root,
    __NR_quotactl, __NR_reboot, __NR_request_key, __NR_set_mempolicy, __NR_setns, __NR_settimeofday, __NR_swapoff, __NR_swapon,
    __NR_umount2, __NR_unshare, __NR_userfaultfd, __NR_vhangup,
#if defined(__x86_64__)
    __NR_ioperm, __NR_iopl, __NR_modify_ldt, __NR_uselib, __NR_ustat, __NR_sysfs,
#endif
};

#define LIMIT 128
static struct sock_filter code[LIMIT];
static unsigned short length;

static void add(struct sock_filter instruction) { code[length++] = instruction; }
static void load(size_t offset) { add((struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)offset)); }
static void answer(unsigned value) { add((struct sock_filter)BPF_STMT(BPF_RET | BPF_K, value)); }

static void fail_with(unsigned number, unsigned error) {
    add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
    answer(SECCOMP_RET_ERRNO | error);
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    load(offsetof(struct seccomp_data, arch));
    add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0));
    answer(SECCOMP_RET_ERRNO | EPERM);
    load(offsetof(struct seccomp_data, nr));
    if (!strcmp(arguments[1], "no-rseq")) {
        fail_with(__NR_rseq, ENOSYS);
    } else if (!strcmp(arguments[1], "docker")) {
        for (size_t i = 0; i < sizeof blocked / sizeof *blocked; i++) fail_with(blocked[i], EPERM);
        fail_with(__NR_clone3, ENOSYS);
        // clone makes threads and processes, and no namespaces.
        add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 3));
        load(offsetof(struct seccomp_data, args[0]));
        add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K,
                                         CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP, 0, 1));
        answer(SECCOMP_RET_ERRNO | EPERM);
    } else {
        return 2;
    }
    answer(SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = length, .filter = code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("sandbox");
        return 1;
    }
    execvp(arguments[2], arguments + 2);
    perror(arguments[2]);
    return 127;
}
