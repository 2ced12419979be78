"""Drives `pagecrew top` on a terminal of its own: what is on the screen is compared with what the kernel says.

Usage: top.py PAGECREW DIRECTORY [cost]
"""

import fcntl
import json
import mmap
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

PAGECREW, WORK = sys.argv[1], sys.argv[2]
# An emulated machine takes ten times as long.
SLOW = int(os.environ.get("patience") or 1)
PATIENCE = 20 * SLOW


class Screen:
    """As much of a terminal as is needed to know what is on it."""

    def __init__(self, columns, lines):
        self.resize(columns, lines)
        self.pending = ""
        self.cursor = True
        self.alternate = False
        self.colours = 0

    def resize(self, columns, lines):
        self.columns, self.lines = columns, lines
        self.cells = [[" "] * columns for _ in range(lines)]
        self.x = self.y = 0

    def put(self, character):
        if self.x < self.columns and self.y < self.lines:
            self.cells[self.y][self.x] = character
        self.x += 1

    def feed(self, data):
        text = self.pending + data.decode(errors="replace")
        self.pending = ""
        at = 0
        while at < len(text):
            character = text[at]
            if character == "\x1b":
                sequence = re.compile(r"\x1b\[([?]?)([0-9;]*)([A-Za-z])|\x1b[^\[]").match(text, at)
                if not sequence:
                    self.pending = text[at:]
                    return
                at = sequence.end()
                if sequence.group(3):
                    self.control(sequence.group(1), sequence.group(2), sequence.group(3))
                continue
            if character == "\r":
                self.x = 0
            elif character == "\n":
                self.y += 1
                if self.y == self.lines:
                    self.y -= 1
                    self.cells = self.cells[1:] + [[" "] * self.columns]
            elif character >= " ":
                self.put(character)
            at += 1

    def control(self, private, parameters, final):
        numbers = [int(number) if number else 0 for number in parameters.split(";")]
        if private:
            if numbers[0] == 25:
                self.cursor = final == "h"
            elif numbers[0] == 1049:
                self.alternate = final == "h"
        elif final == "H":
            self.y = min(max(numbers[0], 1), self.lines) - 1
            self.x = max(numbers[1] if len(numbers) > 1 else 1, 1) - 1
        elif final == "J":
            if numbers[0] == 2:
                self.cells = [[" "] * self.columns for _ in range(self.lines)]
            elif numbers[0] == 0 and self.y < self.lines:
                self.cells[self.y][self.x :] = [" "] * (self.columns - self.x)
                for line in range(self.y + 1, self.lines):
                    self.cells[line] = [" "] * self.columns
        elif final == "K" and self.y < self.lines:
            self.cells[self.y][self.x :] = [" "] * (self.columns - self.x)
        elif final == "m":
            # Anything but a reset of the colours.
            self.colours += any(30 <= number < 39 or 40 <= number < 49 for number in numbers)

    def text(self):
        return "\n".join("".join(line).rstrip() for line in self.cells)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *command, columns=80, lines=24, environment=None):
        self.master, self.slave = pty.openpty()
        self.screen = Screen(columns, lines)
        self.size(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        settings = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(environment or {})}
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR",)}

        def own():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, preexec_fn=own, env={**inherited, **settings}
        )

    def size(self, columns, lines):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns, lines):
        # What was drawn for the old size comes first.
        self.read(0.3)
        self.screen.resize(columns, lines)
        self.size(columns, lines)

    def press(self, keys):
        os.write(self.master, keys.encode())

    def read(self, seconds):
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.screen.feed(os.read(self.master, 65536))

    def wait_for(self, *texts, gone=()):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.read(0.05)
            shown = self.screen.text()
            if all(text in shown for text in texts) and not any(text in shown for text in gone):
                return shown
        raise AssertionError(f"{texts} is not on the screen:\n{self.screen.text()}")

    def end(self, status):
        """Checks how it ends, and that the terminal is as it was."""
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            self.read(0.05)
        assert self.process.poll() == status, f"status {self.process.poll()}, not {status}\n{self.screen.text()}"
        self.read(0.2)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal's mode is not what it was"
        assert self.screen.cursor and not self.screen.alternate, "the cursor or the screen is not what it was"
        self.close()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def top(*arguments, **options):
    return Terminal(PAGECREW, "top", *arguments, **options)


def vmstat():
    with open("/proc/vmstat") as file:
        return {name: int(value) for name, value in map(str.split, file)}


def meminfo(path="/proc/meminfo"):
    with open(path) as file:
        lines = [line.split(":") for line in file]
    # A node's file has "Node 0 " before each name.
    return {name.split()[-1]: int(value.split()[0]) * 1024 for name, value in lines}


def watermarks():
    """The sums over the zones of each node, in bytes."""
    nodes, zone = {}, None
    with open("/proc/zoneinfo") as file:
        for line in file:
            if found := re.match(r"Node (\d+), zone", line):
                node, zone = int(found[1]), {}
                continue
            words = line.split()
            if zone is not None and len(words) == 2 and words[0] in ("min", "low", "high", "managed"):
                zone[words[0]] = int(words[1])
                if words[0] == "managed" and zone["managed"] > 0:
                    sums = nodes.setdefault(node, [0, 0, 0])
                    for index, name in enumerate(("min", "low", "high")):
                        sums[index] += zone[name] * 4096
    return nodes


def size(text):
    """Bytes as they are shown: '1.5 GiB'."""
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


def once():
    output = subprocess.run([PAGECREW, "top", "--once", "--json", "--interval", "300ms"], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def figures():
    """What is printed is what the kernel says."""
    names = {
        "stalls": lambda v: sum(value for name, value in v.items() if name.startswith("allocstall")),
        "direct_scanned_bytes": lambda v: v["pgscan_direct"] * 4096,
        "direct_reclaimed_bytes": lambda v: v["pgsteal_direct"] * 4096,
        "background_reclaimed_bytes": lambda v: 4096
        * sum(v.get("pgsteal_" + by, 0) for by in ("kswapd", "khugepaged", "proactive")),
        "swapped_in_bytes": lambda v: v.get("pswpin", 0) * 4096,
        "swapped_out_bytes": lambda v: v.get("pswpout", 0) * 4096,
        "refaulted_file_bytes": lambda v: v["workingset_refault_file"] * 4096,
    }
    # Memory in huge pages, where the kernel gives some.
    sparse = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(sparse, "madvise"):
        sparse.madvise(14)
    for place in range(0, len(sparse), 4096):
        sparse[place] = 1
    before = vmstat()
    document = once()
    after = vmstat()
    for key, of in names.items():
        assert of(before) <= (document["counters"][key] or 0) <= of(after), f"{key}: {of(before)}, {document['counters'][key]}, {of(after)}"
    assert document["memory"]["total_bytes"] == meminfo()["MemTotal"]
    expected = watermarks()
    for node in document["nodes"]:
        assert [node["min_bytes"], node["low_bytes"], node["high_bytes"]] == expected[node["node"]], node
    # The nodes' own files: what a machine's host has taken for a while may count as free in /proc/meminfo, and is on no node.
    free = sum(meminfo(f"/sys/devices/system/node/node{node['node']}/meminfo")["MemFree"] for node in document["nodes"])
    assert abs(sum(node["free_bytes"] for node in document["nodes"]) - free) < 256 << 20
    with open("/proc/sys/vm/watermark_scale_factor") as file:
        assert document["watermark_scale_factor"] == int(file.read())
    with open("/proc/self/smaps_rollup") as file:
        huge = next(int(line.split()[1]) * 1024 for line in file if line.startswith("AnonHugePages"))
    own = [candidate for candidate in document["huge_pages"]["candidates"] if candidate["pid"] == os.getpid()]
    if document["huge_pages"]["waiting"] == 0:
        assert [candidate["anon_huge_bytes"] for candidate in own] == [huge] * (huge > 0), f"{own}, {huge}"
    sparse.close()


def views():
    """All views at 80 by 24, with figures that are the kernel's; other sizes; the help; q."""
    terminal = top("--interval", "300ms")
    shown = terminal.wait_for("[1 Overview]", "memory", "stalls", "reclaimed", "swap", "pool", "q quit")
    assert all(len(line) <= 80 for line in shown.split("\n")) and len(shown.split("\n")) == 24
    terminal.wait_for("/s in the background")
    for key, texts in (
        ("2", ("[2 Nodes]", "vm.watermark_scale_factor", "m min, l low, h high")),
        ("3", ("[3 Stalls]", "stalls (allocstall)", "kswapd busy", "swapped in")),
        ("4", ("[4 Programs]", "programs")),
        ("5", ("[5 Trim]", "huge pages")),
        ("6", ("[6 Pool]", "pool")),
        ("7", ("[7 Reclaim]", "reclaim", "by tasks")),
        ("\x1b[D", ("[6 Pool]",)),
        ("\t", ("[7 Reclaim]",)),
        ("\x1b[C", ("[1 Overview]",)),
        ("?", ("Ctrl-Z", "goes back")),
        ("2", ("[2 Nodes]", "total")),
    ):
        terminal.press(key)
        shown = terminal.wait_for(*texts)
        assert all(len(line) <= 80 for line in shown.split("\n"))
    terminal.wait_for("total", "free")
    row = next(line for line in terminal.screen.text().split("\n") if re.match(r"0 +\d", line))
    cells = re.findall(r"[\d.]+ (?:B|KiB|MiB|GiB|TiB)", row)
    total, free, low = size(cells[0]), size(cells[1]), size(cells[3])
    assert abs(total - node_total()) <= node_total() / 50, row
    assert abs(low - watermarks()[0][1]) <= watermarks()[0][1] / 20 + 1024, row
    assert free <= total, row
    for columns, lines in ((40, 10), (200, 60), (12, 3), (80, 24)):
        terminal.resize(columns, lines)
        shown = terminal.wait_for("[2 N" if columns < 40 else "[2 Nodes]")
        if lines >= 10:
            terminal.wait_for("q quit")
            assert "q quit" in terminal.screen.text().split("\n")[-1], terminal.screen.text()
    assert terminal.screen.colours > 0
    terminal.press("q")
    terminal.end(0)


def node_total():
    path = "/sys/devices/system/node/node0/meminfo"
    return meminfo(path if os.path.exists(path) else "/proc/meminfo")["MemTotal"]


def colours():
    for environment, arguments in (({"NO_COLOR": "1"}, ()), ({}, ("--no-color",)), ({"TERM": "vt100"}, ())):
        terminal = top("--interval", "200ms", *arguments, environment=environment)
        terminal.wait_for("[1 Overview]", "q quit")
        terminal.press("3")
        terminal.wait_for("[3 Stalls]")
        assert terminal.screen.colours == 0, f"colours with {environment} {arguments}"
        terminal.press("\x03")
        terminal.end(0)
    terminal = top("--interval", "200ms", environment={"TERM": "dumb"})
    terminal.wait_for("memory", "reclaimed")
    assert terminal.screen.cursor and not terminal.screen.alternate
    terminal.process.terminate()
    terminal.end(-signal.SIGTERM)


def ends():
    """The terminal is as it was, whatever the end is."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        terminal = top("--interval", "200ms")
        terminal.wait_for("[1 Overview]", "q quit")
        assert not terminal.screen.cursor and terminal.screen.alternate
        assert termios.tcgetattr(terminal.slave) != terminal.before
        terminal.process.send_signal(number)
        terminal.end(-number)
    # Stopped from outside, and gone on.
    terminal = top("--interval", "200ms")
    terminal.wait_for("[1 Overview]", "q quit")
    terminal.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    terminal.screen.resize(80, 24)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for("[1 Overview]", "q quit")
    terminal.press("q")
    terminal.end(0)
    # The terminal goes away.
    terminal = top("--interval", "200ms")
    terminal.wait_for("[1 Overview]", "q quit")
    os.close(terminal.slave)
    os.close(terminal.master)
    terminal.process.wait(PATIENCE)


def stands_still():
    """A terminal that takes nothing any more holds up no signal."""
    terminal = top("--interval", "100ms", columns=200, lines=60)
    terminal.wait_for("[1 Overview]", "q quit")
    for _ in range(20):
        for key in "2345671":
            terminal.press(key)
            time.sleep(0.02)
    begin = time.monotonic()
    terminal.process.terminate()
    terminal.process.wait(PATIENCE)
    assert time.monotonic() - begin < 5 * SLOW, "it did not end"
    assert termios.tcgetattr(terminal.slave) == terminal.before
    terminal.close()


def job():
    """Ctrl-Z and fg, as in a shell."""
    shell = Terminal("bash", "--norc", "-i", environment={"PS1": "shell$ "})
    shell.wait_for("shell$")
    shell.press(f"{PAGECREW} top --interval 200ms\n")
    shell.wait_for("[1 Overview]", "q quit")
    shell.press("5")
    shell.wait_for("[5 Trim]")
    shell.press("\x1a")
    shell.wait_for("Stopped", "shell$")
    shell.press("stty -a\n")
    shell.wait_for(" icanon", " echo ")
    assert shell.screen.cursor and not shell.screen.alternate
    shell.press("fg\n")
    shell.wait_for("[5 Trim]", "q quit")
    assert not shell.screen.cursor and shell.screen.alternate
    shell.press("q")
    # What is typed before it has ended is the program's.
    until = time.monotonic() + PATIENCE
    while shell.screen.alternate and time.monotonic() < until:
        shell.read(0.05)
    shell.read(0.3)
    shell.press("echo status=$?\n")
    shell.wait_for("status=0")
    shell.press("exit\n")
    until = time.monotonic() + PATIENCE
    while shell.process.poll() is None and time.monotonic() < until:
        shell.read(0.05)
    shell.close()


def services():
    """A service that hangs holds up nothing; one that runs is shown."""
    path = os.path.join(WORK, "silent")
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(path)
    silent.listen(1)
    # One that says what it serves.
    served = os.path.join(WORK, "served")
    server = socket.socket(socket.AF_UNIX)
    server.bind(served)
    server.listen(8)
    body = "pagecrew_trim_members 4711\npagecrew_trim_gone_bytes_total 1048576\n# EOF\n"
    answer = (
        "HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    )
    child = os.fork()
    if child == 0:
        while True:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(answer.encode())
            connection.close()
    try:
        config = os.path.join(WORK, "pagecrew.toml")
        with open(config, "w") as file:
            file.write(f'[reclaim]\nmetrics = "{path}"\n[trim]\nmetrics = "{served}"\n')
        terminal = top("--interval", "200ms", "--config", config)
        if not os.path.exists("/run/pagecrew/serve/trim.metrics"):
            terminal.wait_for("4711 processes, 1 MiB gone so far")
        if not os.path.exists("/run/pagecrew/serve/reclaim.metrics"):
            terminal.wait_for("it does not answer")
        begin = time.monotonic()
        terminal.press("7")
        terminal.wait_for("[7 Reclaim]")
        assert time.monotonic() - begin < 2 * SLOW, "keys wait for a service"
        terminal.press("q")
        terminal.end(0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def programs():
    """What a program under run publishes is on the screen."""
    code = "import sys; b = bytearray(300 << 20); print(flush=True); sys.stdin.read()"
    program = subprocess.Popen(
        [PAGECREW, "run", "--", sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        program.stdout.readline()
        found = next(p for p in once()["programs"] if p["in_use_bytes"] >= 300 << 20)
        stats = subprocess.run([PAGECREW, "stats", str(found["pid"]), "--json"], check=True, stdout=subprocess.PIPE).stdout
        stats = json.loads(stats)
        assert found["in_use_bytes"] == sum(zone["in_use_bytes"] for zone in stats["zones"])
        assert found["counters"]["allocations"] == stats["counters"]["allocations"]
        terminal = top("--interval", "200ms", "--view", "programs")
        terminal.wait_for(str(found["pid"]), "in use ▾", found["name"])
        terminal.press("s")
        terminal.wait_for("zeroed ▾")
        terminal.press("r")
        terminal.wait_for("zeroed ▴")
        program.stdin.close()
        program.wait()
        terminal.wait_for("no program", gone=(found["name"],))
        terminal.press("q")
        terminal.end(0)
    finally:
        program.kill()
        program.wait()


def cost():
    """CPU time of a look each second, with 300 processes more."""
    sleepers = [subprocess.Popen(["sleep", "120"]) for _ in range(300)]
    try:
        terminal = top()
        terminal.wait_for("[1 Overview]", "q quit")
        # What the first looks at all processes took is not what it costs from then on.
        terminal.read(5)

        def ticks():
            with open(f"/proc/{terminal.process.pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        def run_seconds():
            total = 0
            for task in os.listdir(f"/proc/{terminal.process.pid}/task"):
                with open(f"/proc/{terminal.process.pid}/task/{task}/schedstat") as file:
                    total += int(file.read().split()[0])
            return total / 1e9

        begin, before, counted = time.monotonic(), run_seconds(), ticks()
        terminal.read(20)
        passed = time.monotonic() - begin
        used, counted = run_seconds() - before, ticks() - counted
        with open(f"/proc/{terminal.process.pid}/status") as file:
            resident = next(line.split()[1] for line in file if line.startswith("VmRSS"))
        share = used / passed
        terminal.press("q")
        terminal.end(0)
        processes = sum(name.isdigit() for name in os.listdir("/proc"))
        print(f"{share:.2%} of a CPU ({counted} ticks in {passed:.0f} s), {resident} KiB, {processes} processes")
        assert share < 0.01, f"{share:.2%} of a CPU"
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


if sys.argv[3:] == ["cost"]:
    cost()
else:
    for test in (figures, views, colours, ends, stands_still, job, services, programs):
        test()
    print("figures, views, colours, ends, a terminal that stands still, jobs, services, programs")
