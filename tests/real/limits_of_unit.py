#!/usr/bin/env python3
"""Runs a program with the limits of a systemd unit, where no systemd runs.

    limits_of_unit.py UNIT [--kill] -- PROGRAM [ARGUMENT ...]       the unit's command, with this program in the place of its own
    limits_of_unit.py UNIT [--kill] --instead -- PROGRAM ...        any other command
    limits_of_unit.py UNIT --bounding                               the capabilities that the unit leaves, as /proc/PID/status has them

--kill: a system call that SystemCallFilter refuses ends the program (SIGSYS). So nothing that is refused goes unnoticed.

The limits are read from the unit file. Each line of its [Service] is applied, or is in NOT_APPLIED; any other line is an error, so that
no limit is in the unit and untried. Filters are what systemd makes of the unit (systemd.exec(5)), one for each setting.
Status 77 where this machine can't do it: no kernel headers, an unknown architecture.
"""

import ctypes
import os
import platform
import re
import resource
import struct
import sys

# What systemd's groups have on 64-bit machines (systemd 252; later versions add calls): systemd-analyze syscall-filter.
GROUPS = {
    "@default": """
        arch_prctl brk cacheflush clock_getres clock_gettime clock_nanosleep execve exit exit_group futex futex_waitv
        get_robust_list get_thread_area getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getrandom getresgid
        getresuid getrlimit getsid gettid gettimeofday getuid membarrier mmap mprotect munmap nanosleep pause prlimit64
        restart_syscall rseq rt_sigreturn sched_getaffinity sched_yield set_robust_list set_thread_area set_tid_address time
    """,
    "@basic-io": "close close_range dup dup2 dup3 lseek pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readv write writev",
    "@chown": "chown fchown fchownat lchown",
    "@file-system": """
        access chdir chmod close creat faccessat faccessat2 fallocate fchdir fchmod fchmodat fcntl fgetxattr flistxattr
        fremovexattr fsetxattr fstat fstatfs ftruncate futimesat getcwd getdents getdents64 getxattr inotify_add_watch
        inotify_init inotify_init1 inotify_rm_watch lgetxattr link linkat listxattr llistxattr lremovexattr lsetxattr lstat mkdir
        mkdirat mknod mknodat newfstatat open openat openat2 readlink readlinkat removexattr rename renameat renameat2 rmdir
        setxattr stat statfs statx symlink symlinkat truncate unlink unlinkat utime utimensat utimes
    """,
    "@io-event": """
        epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2
        poll ppoll pselect6 select
    """,
    "@network-io": """
        accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto
        setsockopt shutdown socket socketpair
    """,
    "@process": """
        capget clone clone3 execveat fork getrusage kill pidfd_open pidfd_send_signal prctl rt_sigqueueinfo rt_tgsigqueueinfo
        setns tgkill times tkill unshare vfork wait4 waitid
    """,
    "@signal": "rt_sigaction rt_sigpending rt_sigprocmask rt_sigsuspend rt_sigtimedwait sigaltstack signalfd signalfd4",
}

# What systemd does outside the process, what the list of calls and the capabilities refuse anyway, and what would hide the program under
# test and nothing that it uses.
NOT_APPLIED = """
    Type ExecReload Restart RestartSec RestartPreventExitStatus KillMode TimeoutStopSec OOMPolicy CPUWeight
    DevicePolicy IPAddressAllow IPAddressDeny KeyringMode
    ProtectClock ProtectControlGroups ProtectHostname ProtectKernelLogs ProtectKernelModules
    PrivateDevices PrivateTmp ProtectHome RuntimeDirectory
""".split()

CAPABILITIES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN
    NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON
    BPF CHECKPOINT_RESTORE
""".split()

# The kernel's number of the architecture (AUDIT_ARCH_*), and where its headers have the numbers of system calls.
ARCHITECTURES = {
    "x86_64": (0xC000003E, ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"]),
    "aarch64": (
        0xC00000B7,
        ["/usr/include/aarch64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"],
    ),
}

ERRNO = {"EPERM": 1, "ENOSYS": 38, "EAFNOSUPPORT": 97}
ALLOW, KILL = 0x7FFF0000, 0x80000000
SYS_RESOURCE = 1 << CAPABILITIES.index("SYS_RESOURCE")

libc = ctypes.CDLL(None, use_errno=True)


def cannot(reason):
    print(reason)
    sys.exit(77)


def checked(result, what):
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def prctl(*arguments):
    checked(libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments + (0,) * (5 - len(arguments)))), f"prctl {arguments[0]}")


def read_unit(path):
    """The lines of [Service]: {setting: [value, ...]}."""
    section, settings = None, {}
    for line in open(path, encoding="utf-8").read().replace("\\\n", " ").splitlines():
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[":
            section = line
        elif section == "[Service]":
            name, _, value = line.partition("=")
            settings.setdefault(name.strip(), []).append(value.strip())
    return settings


def bounding(settings):
    names = " ".join(settings["CapabilityBoundingSet"]).split()
    return sum(1 << CAPABILITIES.index(name.removeprefix("CAP_")) for name in names)


def call_numbers():
    """{name: number}, of this machine's kernel headers."""
    found = next((path for path in architecture()[1] if os.path.exists(path)), None)
    if found is None:
        cannot("there are no kernel headers")
    defined = dict(re.findall(r"^#define __NR_?(\w+)\s+(\w+)", open(found, encoding="utf-8").read(), re.MULTILINE))

    def number(text):
        return int(text) if text.isdigit() else number(defined[re.sub("^__NR_?", "", text)])

    return {name: number(text) for name, text in defined.items() if text.isdigit() or re.sub("^__NR_?", "", text) in defined}


def architecture():
    if platform.machine() not in ARCHITECTURES:
        cannot(f"the system calls of {platform.machine()} are not known here")
    return ARCHITECTURES[platform.machine()]


def allowed_calls(lists):
    """The names that SystemCallFilter lists; systemd adds @default to any list of what is allowed."""
    names, known = [], call_numbers()
    for word in ["@default"] + " ".join(lists).split():
        assert word[0] != "~", "a list of what is not allowed"
        # A group has calls of other architectures. What the unit names itself is to exist.
        assert word[0] == "@" or word in known, f"there is no call {word}"
        names += GROUPS[word].split() if word[0] == "@" else [word]
    return names


class Filter:
    """A program for the kernel (classic BPF over struct seccomp_data): rules in a row, the first that applies counts."""

    LOAD, AND, JUMP_EQUAL, JUMP_ABOVE, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x06

    def __init__(self, default=ALLOW):
        self.numbers = call_numbers()
        self.default = default
        # Another architecture's calls, 32-bit ones and those of x32 among them: SystemCallArchitectures=native.
        self.code = [(self.LOAD, 0, 0, 4), (self.JUMP_EQUAL, 1, 0, architecture()[0]), (self.RETURN, 0, 0, KILL)]
        self.code += [(self.LOAD, 0, 0, 0), (self.JUMP_AT_LEAST, 0, 1, 0x40000000), (self.RETURN, 0, 0, KILL)]

    def rule(self, name, action, argument=None, mask=0xFFFFFFFF, equal=None, other_than=None, above=None):
        """`action` for the call `name`, if the argument of this index, masked, is as said: one value, none of several, or above one. Calls that this machine hasn't are left out."""
        if name not in self.numbers:
            return
        body = [(self.RETURN, 0, 0, action)]
        if argument is not None:
            if equal is not None:
                jumps = [(self.JUMP_EQUAL, 0, 1, equal)]
            elif above is not None:
                jumps = [(self.JUMP_ABOVE, 0, 1, above)]
            else:
                # Each of them leads past the action.
                jumps = [(self.JUMP_EQUAL, len(other_than) - index, 0, value) for index, value in enumerate(other_than)]
            # The next rule wants the number of the call again.
            body = [(self.LOAD, 0, 0, 16 + 8 * argument), (self.AND, 0, 0, mask)] + jumps + body + [(self.LOAD, 0, 0, 0)]
        self.code += [(self.JUMP_EQUAL, 0, len(body), self.numbers[name])] + body

    def install(self):
        code = b"".join(struct.pack("=HBBI", *line) for line in self.code + [(self.RETURN, 0, 0, self.default)])
        buffer = ctypes.create_string_buffer(code, len(code))
        program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
        prctl(22, 2, ctypes.addressof(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def refused(name):
    return 0x50000 | ERRNO[name]


def restrict_address_families(value):
    known = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
    rules = Filter()
    families = [known[word] for word in value.split() if word != "none"]
    if families:
        rules.rule("socket", refused("EAFNOSUPPORT"), 0, other_than=families)
    else:
        rules.rule("socket", refused("EAFNOSUPPORT"))
    return rules


def restrict_namespaces(value):
    assert value == "yes"
    rules = Filter()
    # Its flags are in memory, where a filter can't look. The C library does without it.
    rules.rule("clone3", refused("ENOSYS"))
    rules.rule("setns", refused("EPERM"))
    # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        rules.rule("unshare", refused("EPERM"), 0, mask=flag, equal=flag)
        if flag != 0x80:  # In clone() that is a part of the signal's number.
            rules.rule("clone", refused("EPERM"), 0, mask=flag, equal=flag)
    return rules


def restrict_realtime(value):
    assert value == "yes"
    rules = Filter()
    for policy in (1, 2, 4):
        rules.rule("sched_setscheduler", refused("EPERM"), 1, equal=policy)
    rules.rule("sched_setscheduler", refused("EPERM"), 1, above=5)
    return rules


def restrict_suid_sgid(value):
    assert value == "yes"
    rules = Filter()
    for bit in (0o4000, 0o2000):
        for name, argument in [("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2), ("mknod", 1), ("mknodat", 2)]:
            rules.rule(name, refused("EPERM"), argument, mask=bit, equal=bit)
        for name, argument in [("creat", 1), ("open", 2), ("openat", 3)]:
            rules.rule(name, refused("EPERM"), argument, mask=bit, equal=bit)
    rules.rule("openat2", refused("ENOSYS"))
    rules.rule("fchmodat2", refused("ENOSYS"))
    return rules


def lock_personality(value):
    assert value == "yes"
    rules = Filter()
    rules.rule("personality", refused("EPERM"), 0, other_than=[0])
    return rules


def memory_deny_write_execute(value):
    assert value == "yes"
    rules = Filter()
    write_execute, execute, shared_execute = 6, 4, 0o100000
    rules.rule("mmap", refused("EPERM"), 2, mask=write_execute, equal=write_execute)
    rules.rule("mprotect", refused("EPERM"), 2, mask=execute, equal=execute)
    rules.rule("pkey_mprotect", refused("EPERM"), 2, mask=execute, equal=execute)
    rules.rule("shmat", refused("EPERM"), 2, mask=shared_execute, equal=shared_execute)
    return rules


FILTERS = {
    "RestrictAddressFamilies": restrict_address_families,
    "RestrictNamespaces": restrict_namespaces,
    "RestrictRealtime": restrict_realtime,
    "RestrictSUIDSGID": restrict_suid_sgid,
    "LockPersonality": lock_personality,
    "MemoryDenyWriteExecute": memory_deny_write_execute,
}

# Setting: resource, and the kernel's number for a value.
LIMITS = {
    "LimitNOFILE": (resource.RLIMIT_NOFILE, int),
    "LimitMEMLOCK": (resource.RLIMIT_MEMLOCK, lambda text: resource.RLIM_INFINITY if text == "infinity" else int(text)),
    "LimitNICE": (getattr(resource, "RLIMIT_NICE", 13), lambda text: 20 - int(text)),
}


def may_raise_limits():
    text = open("/proc/self/status", encoding="ascii").read()
    return bool(int(re.search(r"^CapEff:\s*(\w+)", text, re.MULTILINE)[1], 16) & SYS_RESOURCE)


def limit(which, value):
    _, most = resource.getrlimit(which)
    unlimited = resource.RLIM_INFINITY
    lower = most == unlimited or (value != unlimited and value <= most)
    if lower or may_raise_limits():
        resource.setrlimit(which, (value, value))


def adjust_oom_score(value):
    if value >= 0 or may_raise_limits():
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(value))


def mount_points():
    lines = open("/proc/self/mountinfo", encoding="utf-8").read().splitlines()
    return [re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines]


def is_below(path, *tops):
    return any(path == top or path.startswith(top + "/") for top in tops)


def protect_files(strict, tunables):
    """Mounts of its own, read-only ones as ProtectSystem=strict and ProtectKernelTunables=yes make them."""
    private, recursive, bind, remount, read_only = 1 << 18, 1 << 14, 1 << 12, 1 << 5, 1
    flags_kept = {os.ST_NOSUID: 2, os.ST_NODEV: 4, os.ST_NOEXEC: 8, os.ST_NOATIME: 1 << 10, os.ST_NODIRATIME: 1 << 11, os.ST_RELATIME: 1 << 21}

    def mount(source, target, flags):
        return libc.mount(source and source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)

    checked(libc.unshare(0x20000), "unshare")
    checked(mount(None, "/", private | recursive), "making mounts private")
    if tunables and os.path.isdir("/proc/sys"):
        checked(mount("/proc/sys", "/proc/sys", bind), "binding /proc/sys")
    for point in mount_points():
        kernel = is_below(point, "/dev", "/proc", "/sys")
        read = strict and not kernel
        if tunables and (is_below(point, "/sys", "/proc/sys") and not is_below(point, "/sys/fs/cgroup", "/sys/fs/selinux")):
            read = True
        if not read:
            continue
        try:
            has = os.statvfs(point).f_flag
        except OSError:
            continue  # Below another mount, or another user's.
        kept = sum(flag for bit, flag in flags_kept.items() if has & bit)
        if mount(None, point, bind | remount | read_only | kept) != 0:
            error = ctypes.get_errno()
            if error != 22:  # Something is mounted over it.
                raise OSError(error, f"making {point} read-only: {os.strerror(error)}")


def set_capabilities(mask):
    last = int(open("/proc/sys/kernel/cap_last_cap", encoding="ascii").read())
    for number in range(last + 1):
        if not mask >> number & 1:
            prctl(24, number)  # PR_CAPBSET_DROP
    prctl(47, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = struct.pack("=Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    checked(libc.capset(header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset")


def apply(settings, kill):
    """Takes the rights away from this process. What takes rights itself comes first, the list of system calls last."""
    rest = {name: values[-1] for name, values in settings.items() if name not in NOT_APPLIED + ["ExecStart", "SystemCallFilter"]}
    for name, (which, number) in LIMITS.items():
        if name in rest:
            limit(which, number(rest.pop(name)))
    if "OOMScoreAdjust" in rest:
        adjust_oom_score(int(rest.pop("OOMScoreAdjust")))
    os.umask(int(rest.pop("UMask"), 8))
    strict, tunables = rest.pop("ProtectSystem", "no") == "strict", rest.pop("ProtectKernelTunables", "no") == "yes"
    if strict or tunables:
        protect_files(strict, tunables)
    set_capabilities(bounding(settings))
    rest.pop("CapabilityBoundingSet")
    assert rest.pop("NoNewPrivileges") == "yes" and rest.pop("SystemCallArchitectures") == "native"
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    calls = Filter(KILL if kill else refused(rest.pop("SystemCallErrorNumber")))
    rest.pop("SystemCallErrorNumber", None)
    for name in allowed_calls(settings["SystemCallFilter"]):
        calls.rule(name, ALLOW)
    filters = [FILTERS[name](rest.pop(name)) for name in list(rest) if name in FILTERS]
    if rest:
        sys.exit(f"not known here: {' '.join(rest)}")
    for rules in filters + [calls]:
        rules.install()


def main():
    unit, *words = sys.argv[1:]
    settings = read_unit(unit)
    if words == ["--bounding"]:
        print(f"{bounding(settings):016x}")
        return
    split = words.index("--")
    options, command = words[:split], words[split + 1 :]
    if "--instead" not in options:
        command[1:1] = settings["ExecStart"][-1].split()[1:]
    apply(settings, "--kill" in options)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
