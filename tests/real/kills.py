"""Kills, stops and upgrades a pool's server, and kills its filler, clients and virtual machines, at random moments, while another user plays tricks
with his files: nobody else is hurt, the books are as the kernel sees it after each round, and nothing is left.

Usage: kills.py PAGECREW HEAP DIRECTORY ROUNDS SEED [OPTION OF SERVE ...]

HEAP (tests/pool/heap.c) stands for a virtual machine: all of its memory is zero when it comes, and its own until it ends. QEMU takes
part where it is installed. Only descendants of this process are killed.
"""

import collections
import ctypes
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
UNUSED = 3
PR_SET_CHILD_SUBREAPER = 36
# Of what the machine has available: other processes use memory as well.
TOLERANCE = 128 * MIB


NOBODY = 65534
# What each user but root may have.
QUOTA = 64 * MIB
FALLOC_FL_KEEP_SIZE = 1
# Checks of HEAP that fail for what was seized before it was opened.
OF_WHAT_GOES = ("file >= 0 failed", "(status.st_mode & 07777) == 0600", "size > 0 ")


class Failure(Exception):
    pass


def trick(path, seed):
    """In a process of another user: takes memory and does to it what comes to mind, until it is killed or has had enough."""
    chance = random.Random(seed)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    kept = []
    for _ in range(chance.randrange(1, 8)):
        try:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            server.connect(path)
            size = chance.choice([2, 4, 8, 16, 32]) * MIB
            server.send(f"take size={size} until={chance.choice(['closed', 'unused'])}".encode())
            answer, files, _, _ = socket.recv_fds(server, 65536, 1)
        except OSError:
            # There is no server at this moment.
            time.sleep(0.02)
            continue
        if not files:
            continue
        name = answer.decode().split("path=")[1]
        for _ in range(chance.randrange(4)):
            try:
                match chance.randrange(9):
                    case 0:
                        os.ftruncate(files[0], chance.choice([0, size // 2, 4 * size]))
                    case 1:
                        libc.fallocate(files[0], FALLOC_FL_KEEP_SIZE, size, size)
                    case 2:
                        os.pwrite(files[0], b"x" * 4096, chance.randrange(2 * size))
                    case 3:
                        kept.append(os.open(name, os.O_PATH))
                    case 4:
                        os.chmod(name, chance.choice([0o666, 0]))
                    case 5:
                        fcntl.fcntl(files[0], fcntl.F_SETLEASE, fcntl.F_WRLCK)
                    case 6:
                        server.send(f"release path={name}".encode())
                        server.recv(65536)
                    case 7:
                        kept.append(os.open(f"/proc/self/fd/{chance.choice(kept or files)}", os.O_RDWR))
                    case 8:
                        chance.choice([os.link, os.rename])(name, name + "-more")
            except OSError:
                pass
        time.sleep(chance.random() * 0.2)
        if chance.random() < 0.7:
            os.close(files[0])
        if chance.random() < 0.7:
            server.close()
        else:
            kept.append(server.detach())


def children_of(pid):
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def descendants_of(pid):
    found = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def names_of_descendants():
    return [name_of(pid) for pid in descendants_of(os.getpid())]


def kill(pid):
    """A descendant, and nobody who has its number since. Whether it was still there."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if pid not in descendants_of(os.getpid()):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failure(f"not so after {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.01)


def memory():
    """Bytes that are available, those of files in memory, and those of free huge pages."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    names = ("MemAvailable", "Shmem", "HugePages_Free")
    available, files, huge = (int(fields.get(name, "0").split()[0]) for name in names)
    return available << 10, files << 10, huge << 21


class Consumer:
    """A process that has memory of the pool, or asks for it, and what it has said."""

    def __init__(self, kind, command):
        self.kind = kind
        self.output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT)
        # Something was killed that it depends on, so it may fail. It must not find wrong bytes all the same.
        self.disturbed = False
        # The client was killed: what it had taken may be seized and go before the machine has opened it. Root can open it until it has gone.
        self.orphaned = False

    def said(self):
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


class Trial:
    def __init__(self, pagecrew, heap, directory, seed, options):
        self.pagecrew, self.heap, self.directory, self.options = pagecrew, heap, directory, options
        self.random = random.Random(seed)
        self.socket = os.path.join(directory, "socket")
        self.log = tempfile.TemporaryFile()
        self.qemu = shutil.which("qemu-system-x86_64")
        self.server = None
        self.consumers = []
        self.killed = {"server": 0, "filler": 0, "client": 0, "machine": 0, "trickster": 0}
        self.stopped = 0
        self.upgraded = 0
        # The server's program, which is replaced now and then, also while it runs.
        self.programs = tempfile.mkdtemp(prefix="pagecrew-kills-")
        self.program = os.path.join(self.programs, "pagecrew")
        shutil.copy2(pagecrew, self.program)
        self.tricksters = []
        self.ended = 0
        self.slowest_start = 0.0

    def pool(self, *arguments):
        return [self.pagecrew, "pool", arguments[0], "--socket", self.socket, *arguments[1:]]

    def status(self):
        answer = subprocess.run(self.pool("status", "--json"), capture_output=True, timeout=30)
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def upgrade(self):
        """Another file under the program's name, as a package manager leaves it. The server goes on with the one that it has."""
        new = self.program + ".new"
        shutil.copy2(self.pagecrew, new)
        os.replace(new, self.program)
        self.upgraded += 1

    def start(self):
        command = [self.program, "pool", "serve", "--directory", self.directory, "--unused", f"{UNUSED}s"]
        command += ["--socket-mode", "0666", "--quota", str(QUOTA), *self.options]
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def serve(self):
        """Returns when there is a server that answers."""

        def answers():
            if self.server.poll() is not None:
                raise Failure(f"the server has ended by itself with status {self.server.returncode}")
            return self.status() is not None

        begin = time.monotonic()
        if self.server is None:
            self.start()
        wait_until(answers, 15, "the server answers")
        self.slowest_start = max(self.slowest_start, time.monotonic() - begin)

    def reap(self):
        """Looks at whoever has ended. Processes that have lost their parents are children of this one."""
        self.tricksters = [pid for pid in self.tricksters if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        known = {consumer.process.pid for consumer in self.consumers} | ({self.server.pid} if self.server else set())
        known |= set(self.tricksters)
        for pid in set(children_of(os.getpid())) - known:
            os.waitpid(pid, os.WNOHANG)
        for consumer in list(self.consumers):
            status = consumer.process.poll()
            if status is None:
                continue
            self.consumers.remove(consumer)
            self.ended += not consumer.disturbed
            said = consumer.said()
            if ".c:" in said and not (consumer.orphaned and any(check in said for check in OF_WHAT_GOES)):
                raise Failure(f"{consumer.kind}{', whose client was killed' if consumer.orphaned else ''}: {said}")
            # 124: QEMU was ended by `timeout`, as planned.
            if not consumer.disturbed and status != (124 if consumer.kind == "qemu" else 0):
                raise Failure(f"{consumer.kind}: status {status}, and nothing of it was killed: {said}")

    def consume(self):
        size = self.random.choice([2, 4, 8, 8, 16, 16, 32, 64, 160]) * MIB
        kind = self.random.choice(["machine", "machine", "machine", "process", "abandoned", "qemu"])
        life = self.random.randrange(50, 1500)
        heap = [str(life), str(self.random.randrange(1 << 30))]
        if kind == "process":
            taken = subprocess.run(self.pool("take", "--size", str(size)), capture_output=True, text=True, timeout=30)
            if taken.returncode != 0:
                raise Failure(f"take: {taken.stderr}")
            command = [self.heap, taken.stdout.strip(), *heap]
        elif kind == "abandoned":
            command = self.pool("take", "--size", str(size))
        elif kind == "qemu" and self.qemu:
            machine = ["-accel", "tcg", "-nodefaults", "-nographic", "-S", "-m", str(size // MIB), "-machine", "memory-backend=m"]
            backend = f"memory-backend-file,id=m,size={size},mem-path={{path}},prealloc=on"
            command = self.pool("exec", "--size", str(size), "--", "timeout", str(life / 1000), self.qemu, *machine, "-object", backend)
        else:
            kind = "machine"
            command = self.pool("exec", "--size", str(size), "--", self.heap, "{path}", *heap)
        self.consumers.append(Consumer(kind, command))

    def disturb(self):
        for consumer in self.consumers:
            # One that has said something has its memory and keeps it. One that was given a path can open it whatever happens.
            if consumer.kind != "process" and not consumer.said():
                consumer.disturbed = True

    def kill_server(self):
        self.disturb()
        self.killed["server"] += kill(self.server.pid)
        self.server.wait()
        self.server = None

    def stop_server(self):
        self.disturb()
        self.stop()
        self.stopped += 1

    def kill_trickster(self):
        if self.tricksters:
            self.killed["trickster"] += kill(self.random.choice(self.tricksters))

    def play_tricks(self):
        seed = self.random.randrange(1 << 30)
        pid = os.fork()
        if pid == 0:
            # A process of its own, and of an ordinary user.
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                trick(self.socket, seed)
            finally:
                os._exit(0)
        self.tricksters.append(pid)

    def kill_filler(self):
        fillers = children_of(self.server.pid)
        if fillers:
            self.killed["filler"] += kill(self.random.choice(fillers))

    def kill_client(self):
        if self.consumers:
            consumer = self.random.choice(self.consumers)
            consumer.disturbed = consumer.orphaned = True
            self.killed["client"] += kill(consumer.process.pid)

    def kill_machine(self):
        machines = []
        for consumer in self.consumers:
            family = [consumer.process.pid, *descendants_of(consumer.process.pid)]
            machines += [(consumer, pid) for pid in family if name_of(pid) in ("heap", "qemu-system-x86")]
        if machines:
            consumer, pid = self.random.choice(machines)
            consumer.disturbed = True
            self.killed["machine"] += kill(pid)

    def round(self):
        self.serve()
        for _ in range(self.random.randrange(1, 4)):
            if len(self.consumers) < 5:
                self.consume()
        time.sleep(self.random.choice([0, 0.002, 0.01, 0.03, 0.1]) * self.random.random())
        if len(self.tricksters) < 3:
            self.play_tricks()
        victims = [self.kill_filler, self.kill_client, self.kill_machine, self.kill_trickster, self.kill_server, self.stop_server]
        if self.random.random() < 0.2:
            self.upgrade()
        for victim in self.random.sample(victims, self.random.randrange(1, 3)):
            if self.server:
                victim()
        if self.server is None and self.random.random() < 0.5:
            # And while it starts.
            self.start()
            time.sleep(0.05 * self.random.random())
            self.kill_server()
        self.reap()
        self.serve()
        wait_until(self.books_are_right, 5, lambda: f"the books are right: {self.books()} {self.larger_files()}")

    def books(self):
        """Who has how much: by the names of files, by what the server says, and by the kernel all together, with what it may be."""
        names = collections.Counter()
        for place in ("taken",):
            for name in os.listdir(os.path.join(self.directory, "mem", place)):
                _, _, size, user, _, _ = name.split("-")
                names[int(user[1:])] += int(size)
        status = self.status()
        if status is None:
            raise Failure("the server does not answer")
        said = {user["user"]: user["taken_bytes"] for user in status["users"]}
        return names, said, self.used(), status["size_bytes"] + status["taken_bytes"]

    def larger_files(self):
        """Those that have more memory, or are longer, than their names say."""
        larger = []
        directory = os.path.join(self.directory, "mem", "taken")
        for name in os.listdir(directory):
            try:
                facts = os.stat(os.path.join(directory, name))
            except FileNotFoundError:
                continue
            if max(facts.st_blocks * 512, facts.st_size) > int(name.split("-")[2]):
                larger.append((name, facts.st_blocks * 512, facts.st_size))
        return larger

    def books_are_right(self):
        names, said, used, most = self.books()
        # Somebody who takes or releases between two of these looks is found right at the next.
        return names == said and used <= most and said.get(NOBODY, 0) <= QUOTA and not self.larger_files()

    def files(self):
        found = []
        for directory, _, names in os.walk(self.directory):
            found += [os.path.join(directory, name) for name in names]
        return found

    def mounts(self):
        with open("/proc/self/mountinfo") as file:
            return [line.split()[4] for line in file if line.split()[4].startswith(self.directory)]

    def used(self):
        """Bytes of all files, also of those without a name."""
        facts = os.statvfs(os.path.join(self.directory, "mem"))
        return (facts.f_blocks - facts.f_bfree) * facts.f_frsize

    def all_ended(self):
        self.reap()
        return not self.consumers and not self.tricksters and set(children_of(os.getpid())) <= {self.server.pid}

    def rest(self):
        """When nobody has memory, nothing is taken, by what the server says and by what is there, whatever was killed."""

        def nothing_taken():
            # What the last client asked for before it was killed may only now be handed out.
            status = self.status()
            return status["taken_bytes"] == 0 and self.used() <= status["size_bytes"] and not any("/taken/" in file for file in self.files())

        self.serve()
        wait_until(self.all_ended, 30, lambda: f"all consumers have ended; there are {names_of_descendants()}")
        wait_until(nothing_taken, UNUSED + 15, lambda: f"nothing is taken; {self.used()} bytes, {self.files()}, {self.status()}")
        if len(self.mounts()) != 1:
            raise Failure(f"mounts: {self.mounts()}")

    def stop(self):
        self.server.terminate()
        status = self.server.wait(30)
        if status != 0:
            raise Failure(f"the server has ended with status {status}")
        self.server = None

    def tell_log(self):
        self.log.seek(0)
        print("".join(self.log.read().decode(errors="replace").splitlines(keepends=True)[-15:]), end="")


def run(trial, rounds):
    before = memory()
    for number in range(rounds):
        trial.round()
        if number % 10 == 9:
            trial.rest()
    trial.rest()
    trial.stop()
    if trial.mounts():
        raise Failure(f"still mounted: {trial.mounts()}")
    left = [file for file in trial.files() if os.path.basename(file) != "lock"]
    if left:
        raise Failure(f"left: {left}")
    wait_until(lambda: not children_of(os.getpid()), 10, lambda: f"no process is left; {names_of_descendants()}")

    def given_back():
        now = memory()
        return now[0] >= before[0] - TOLERANCE and now[1] <= before[1] + 8 * MIB and now[2] >= before[2]

    wait_until(given_back, 30, lambda: f"the memory is back: {before} before, {memory()} after (available, files, huge pages)")
    if not trial.ended or not all(trial.killed.values()):
        raise Failure(f"too little was tried: {trial.killed}, and {trial.ended} ended well")
    killed = ", ".join(f"{name} {count}" for name, count in trial.killed.items())
    print(f"killed: {killed}; stopped: {trial.stopped}, upgraded: {trial.upgraded}; slowest start {trial.slowest_start:.2f} s")


def main():
    pagecrew, heap, directory, rounds, seed = sys.argv[1:6]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trial = Trial(pagecrew, heap, os.path.realpath(directory), int(seed), sys.argv[6:])
    try:
        run(trial, int(rounds))
    except Failure as failure:
        trial.tell_log()
        print(f"seed {seed}: {failure}")
        sys.exit(1)
    finally:
        shutil.rmtree(trial.programs, ignore_errors=True)
        # Whatever is left is a descendant of ours.
        while descendants_of(os.getpid()):
            for pid in descendants_of(os.getpid()):
                kill(pid)
            for pid in children_of(os.getpid()):
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)


main()
