"""Makes docs/platforms.md of what the machines of guests.sh have printed: table.py RESULTS OUTPUT MACHINE...

A run of all machines takes hours, so they may run on several days, and on several computers: what each said last is kept in platforms.json beside
the table, and a machine that has no output in RESULTS is shown as it stands there.
"""

import json
import pathlib
import re
import sys

LINE = re.compile(r"^(\S+)\s+(ok|FAILED|skipped)\s+[\d.]+ s\s*(.*)$")
# Beginnings of tests' names, and what they are about.
PARTS = [
    ("what `doctor` says", ("feature/",)),
    ("unit and integration tests", ("unit/",)),
    ("stacks of the CPUs", ("sequences",)),
    ("trim", ("trim/",)),
    ("pool", ("pool/",)),
    ("services with the rights of their units", ("units/",)),
    ("units under systemd itself", ("systemd/",)),
    ("NUMA", ("numa/",)),
    ("reclaim", ("reclaim/",)),
    ("serve and top", ("serve/", "top/")),
    ("run", ("",)),
]
FEATURES = {
    "page-size": "page size",
    "doctor": "`pagecrew doctor`",
    "huge-pages": "run: huge pages for what is used whole",
    "guards": "run: guard pages (`--guards on`)",
    "stragglers": "run: nobody waits for a helper that was stopped",
    "group-limit": "run: room is made at the control group's limit",
    "trim-own": "run: a program trims itself (`--trim on`)",
    "trim": "trim: other processes",
    "pool": "pool",
    "reclaim": "reclaim",
}


def tests_of(text):
    """The last result of each test, and what it said."""
    text = re.sub(r"/tmp/tmp\.\w+[^\s:,]*", "DIR", text)
    return {match[1]: [match[2], match[3]] for match in map(LINE.match, text.splitlines()) if match}


def whole_run(name, text):
    """What a machine's run of all its tests said, as it is kept."""
    fields = dict(re.findall(r"^(\w+): (.*)$", text.split("\nguest:")[0], re.MULTILINE))
    # One that was cut short says nothing of what it did not come to.
    if "\nguest: over" not in text:
        sys.exit(f"not at its end: {name}: run scripts/guests.sh {name} again")
    return {
        "about": fields.get("about", ""),
        "left": fields.get("left", ""),
        "date": fields["date"],
        "commit": fields["commit"],
        "kernel": re.search(r"^guest: \S+, (.*)$", text, re.MULTILINE)[1],
        "tests": tests_of(text),
        "checks": checks_of(text),
        "again": {},
    }


def run_again(kept, text):
    """Adds what single tests said that ran again since: the commits at which they did, by test."""
    for part in re.split(r"^machine: .*$", text, flags=re.MULTILINE):
        commit = re.search(r"^commit: (.*)$", part, re.MULTILINE)
        if commit:
            # What somebody looked at by hand that this machine is not asked says nothing of it.
            tests = {test: said for test, said in tests_of(part).items() if test in kept["tests"]}
            kept["tests"] |= tests
            kept["again"] |= dict.fromkeys(tests, commit[1])
            kept["checks"] |= checks_of(part)


def checks_of(text):
    """State of each of doctor's checks."""
    found = re.search(r"^doctor: (\{.*\})$", text, re.MULTILINE)
    return {check["name"]: check["state"] for check in json.loads(found[1])["checks"]} if found else {}


class Machine:
    """What one machine has said, as it is kept."""

    def __init__(self, name, kept):
        self.name = name
        self.about, self.left, self.date, self.commit = kept["about"], kept["left"], kept["date"], kept["commit"]
        self.kernel, self.tests, self.checks, self.again = kept["kernel"], kept["tests"], kept["checks"], kept["again"]

    def part(self, number):
        """Results of the tests that belong to a part and to none before it."""

        def of(name):
            return next(i for i, (_, begins) in enumerate(PARTS) if name.startswith(begins))

        return [result for name, (result, _) in self.tests.items() if of(name) == number]


def row(cells):
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def table(head, rows):
    return row(head) + "|" + "---|" * len(head) + "\n" + "".join(row(cells) for cells in rows)


def counts(results):
    if not results:
        return "-"
    words = {"ok": "passed", "FAILED": "FAILED", "skipped": "skipped"}
    return ", ".join(f"{results.count(key)} {word}" for key, word in words.items() if key in results)


def verdict(machine, test):
    result, text = machine.tests.get(f"feature/{test}", (None, ""))
    if result is None:
        return "-"
    if result != "ok":
        return result
    word = re.match(r"(works|degrades to [^:]*|refused|ready|not ready|not tried)", text)
    return word[1].strip() if word else text


def page(machines):
    names = [machine.name for machine in machines]
    text = "# Platforms\n\nWhat works on the kernels, nodes and processors that `make test-guests` boots under QEMU"
    text += " (`scripts/guests.sh`): made by `scripts/guests.sh --table` of\nthe last whole run of each machine, which `platforms.json` keeps. Emulation says nothing about speed.\n\n"
    text += table(
        ["machine", "what it is", "kernel", "tests", "date", "commit"],
        [
            [m.name, m.about, m.kernel, counts([result for result, _ in m.tests.values()]), m.date, m.commit]
            for m in machines
        ],
    )
    text += "\n## Feature by machine\n\n"
    rows = [[title, *(verdict(machine, test) for machine in machines)] for test, title in FEATURES.items()]
    checks = dict.fromkeys(name for machine in machines for name in machine.checks)
    text += table(["", *names], rows)
    text += "\n## Tests by machine\n\n"
    text += table(["", *names], [[title, *(counts(m.part(i)) for m in machines)] for i, (title, _) in enumerate(PARTS)])
    text += "\n## What `pagecrew doctor` finds\n\nok, off (can be turned on there) or missing (not on that kernel).\n\n"
    text += table(["", *names], [[name, *(m.checks.get(name, "-") for m in machines)] for name in checks])
    text += "\n## In its own words\n\nWhat each feature's test said where it is not simply \"works\".\n\n"
    for machine in machines:
        for test, title in FEATURES.items():
            result, said = machine.tests.get(f"feature/{test}", (None, ""))
            if said and (result != "ok" or not said.startswith(("works", "ready"))):
                text += f"- {machine.name}, {title}: {said}\n"
    if any(machine.again for machine in machines):
        text += "\n## Run again\n\nSingle tests that ran again after a machine's whole run, and what was mended meanwhile.\n\n"
        for machine in machines:
            if machine.again:
                commits = {}
                for test, commit in machine.again.items():
                    commits.setdefault(commit, []).append(test)
                text += "".join(f"- {machine.name}, {commit}: {', '.join(tests)}\n" for commit, tests in commits.items())
    text += "\n## Not asked, and why\n\n"
    text += "".join(f"- {m.name}: {m.left}\n" for m in machines if m.left)
    text += "\n## Skipped, and why\n\n"
    for machine in machines:
        reasons = {}
        for name, (result, reason) in machine.tests.items():
            if result == "skipped":
                reasons.setdefault(reason, []).append(name)
        for reason, tests in reasons.items():
            text += f"- {machine.name}: {', '.join(tests)}: {reason}\n"
    return text


def main():
    results, output, names = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]

    def read(name):
        log = results / name
        return log.read_text(errors="replace") if log.exists() else ""

    kept_at = output.with_suffix(".json")
    kept = json.loads(kept_at.read_text()) if kept_at.exists() else {}
    for name in names:
        if text := read(f"{name}.log"):
            kept[name] = whole_run(name, text)
        if name in kept:
            run_again(kept[name], read(f"{name}.again.log"))
    kept = {name: kept[name] for name in names if name in kept}
    kept_at.write_text(json.dumps(kept, indent=1) + "\n")
    if missing := [name for name in names if name not in kept]:
        sys.exit(f"no whole run yet of {', '.join(missing)}: run scripts/guests.sh {missing[0]}")
    machines = [Machine(name, record) for name, record in kept.items()]
    output.write_text(page(machines))
    print(f"{output}: {len(machines)} machines", file=sys.stderr)


if __name__ == "__main__":
    main()
