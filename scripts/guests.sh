#!/usr/bin/env bash
# The machines that users have, one after the other under QEMU: boots each with Debian's own kernel and programs, and runs the tests
# that make sense there. KVM is used where there is any, and emulation otherwise, so nothing here says how fast something is.
#
# Usage: guests.sh [--short] [--get | --no-build] [MACHINE [TEST ... | -- COMMAND]]
#        guests.sh --table | --list
#   MACHINE   only this one; TEST ... only these of its tests, by the names or their beginnings as in test-real.sh
#   COMMAND   a line for the shell in the guest, instead of tests: to look at something there by hand
#   --short   the machines and tests of `make test`, at once, below five minutes
#   --get     downloads and unpacks what the machines need, and boots none
#   --no-build  with what was built for guests before
#   --table   makes docs/platforms.md of the last whole run of every machine, here or as docs/platforms.json keeps it, and boots none
#   --list    prints the machines
#
# One line a test, as test-real.sh prints them, behind the name of the machine. The output of a machine's last whole run is in
# target/guests/NAME.log, that of single tests that ran again since in NAME.again.log, and that of --short in NAME.short.log.
# Status 1 if a test failed or a machine hung; with COMMAND, its own.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
target=${CARGO_TARGET_DIR:-$checkout/target}
results=$target/guests
# shellcheck source=scripts/guests/packages.sh
. scripts/guests/packages.sh
# shellcheck source=scripts/guests/build.sh
. scripts/guests/build.sh
# shellcheck source=scripts/guests/machines.sh
. scripts/guests/machines.sh

usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

short=no table=no get=no build=yes wanted=() command=''
while [ "$#" -gt 0 ]; do
    argument=$1
    shift
    case $argument in
    --)
        command=$*
        break
        ;;
    --short) short=yes ;;
    --get) get=yes ;;
    --no-build) build=no ;;
    --table) table=yes ;;
    --list)
        printf '%s\n' "${machines[@]}"
        exit 0
        ;;
    -h | --help)
        usage
        exit
        ;;
    -*)
        usage >&2
        exit 2
        ;;
    *) wanted+=("$argument") ;;
    esac
done
if [ "$table" = yes ]; then
    # shellcheck disable=SC2154
    exec python3 scripts/guests/table.py "$results" docs/platforms.md "${machines[@]}"
fi
chosen=("${machines[@]}")
if [ "$short" = yes ]; then chosen=("${short_machines[@]}"); fi
if [ "${#wanted[@]}" -gt 0 ]; then
    chosen=("${wanted[0]}")
    if ! declare -F "machine_${wanted[0]//-/_}" >/dev/null; then
        echo "there is no machine called ${wanted[0]}; --list prints them" >&2
        exit 2
    fi
fi
# The guests are made of Debian's packages, so there are none without Debian's tools, nor on another processor.
cannot=
for program in apt-get dpkg-deb python3 xz; do
    if ! command -v "$program" >/dev/null; then cannot="there is no $program"; fi
done
if [ "$(uname -m)" != x86_64 ]; then cannot="this is no x86-64 machine"; fi
if [ -z "$(mirror)" ]; then cannot="no mirror of Debian is configured"; fi
if [ -n "$cannot" ]; then
    echo "guests.sh: no guest can be made here: $cannot" >&2
    if [ "$get" = no ]; then echo "0 passed, 0 failed, ${#chosen[@]} skipped"; fi
    [ "$short" = yes ]
    exit
fi

# QEMU, with the libraries and the loader that it was built with, whatever this machine has. In the place of this shell, so that whoever ends that
# ends it.
qemu() {
    local libraries=$cache/qemu/usr/lib/x86_64-linux-gnu
    QEMU_MODULE_DIR=$libraries/qemu exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" \
        "$cache/qemu/usr/bin/qemu-system-$1" -L "$cache/qemu/usr/share/qemu" -L "$cache/qemu/usr/share/seabios" "${@:2}"
}

# Lines of the console, as they come, without what terminals understand.
plain() {
    sed -u -e 's/\r//g' -e 's/\x1b\[[0-9;?!]*[a-zA-Z]//g' -e 's/\x1b\][^\x1b\x07]*\(\x1b\\\|\x07\)//g' -e 's/\x1b[c\\]//g'
}

# boot NAME TEST...: one machine from its power button to its end. How many passed, failed and were skipped is then in $results/NAME.counts.
boot() {
    local name=$1 log=$results/$1.log console=$results/$1.console status=0 line counts unknown p f s
    shift
    rm -f "$results/$name.counts" "$results/$name.status"
    if [ "$short" = yes ]; then
        log=$results/$name.short.log
    elif [ "$#" -gt 0 ]; then
        log=$results/$name.again.log
    elif [ -z "$command" ] && [ "$get" = no ]; then
        rm -f "$log" "$results/$name.again.log"
    fi
    # What a machine is; see machines.sh.
    local about='' left='' architecture=x86_64 release=trixie-amd64 kernel_package=linux-image-cloud-amd64 cpus=2 sockets=1 memory=4G append='' userland=whole
    local swap=no limit=7200 patience=10 options=() tests=() short_tests=()
    "machine_${name//-/_}"
    kernel "kernel-$release-$kernel_package" "$release" "$kernel_package"
    programs
    if [ "$get" = yes ]; then return; fi
    if [ "$short" = yes ]; then
        tests=("${short_tests[@]}") limit=1200
        rm -f "$log"
    fi
    if [ "$#" -gt 0 ]; then tests=("$@"); fi
    initramfs "$name" "${tests[@]}"
    local accelerate=(-accel "tcg,thread=multi")
    if [ "$architecture" = x86_64 ]; then
        # With five levels of page tables, PAGEMAP_SCAN has double-faulted in emulation.
        options+=(-cpu "max,-la57")
        append="console=ttyS0 $append"
        if [ -w /dev/kvm ] && [ "$(uname -m)" = x86_64 ] && grep -qE 'vmx|svm' /proc/cpuinfo; then
            accelerate=(-accel kvm)
            options+=(-cpu "host,-la57")
            patience=2
        fi
    else
        options+=(-machine virt -cpu "max,sve=off,pauth-impdef=on")
        append="console=ttyAMA0 $append"
    fi
    local commit
    # The table that is made of this (--table) is no part of what is tried.
    commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD -- . ':!docs/platforms.*' 2>/dev/null || echo ' and changes')
    local attempt
    for attempt in 1 2; do
        status=0
        truncate --size 2G "$results/$name.disk"
        truncate --size 1G "$results/$name.swap"
        timeout --foreground "$limit" bash -c "$(declare -f qemu); cache=$cache; qemu \"\$@\"" qemu "$architecture" \
            "${accelerate[@]}" -smp "$cpus,sockets=$sockets" -m "$memory" "${options[@]}" -nodefaults -nographic -serial stdio -no-reboot \
            -drive "file=$results/$name.disk,format=raw,if=none,id=disk,cache=unsafe" -device virtio-blk-pci,drive=disk \
            -drive "file=$results/$name.swap,format=raw,if=none,id=swap,cache=unsafe" -device virtio-blk-pci,drive=swap \
            -kernel "$cache/kernel-$release-$kernel_package/vmlinuz" -initrd "$results/$name.initramfs" \
            -append "$append quiet loglevel=3 panic=-1 oops=panic" </dev/null 2>&1 | plain | tee "$console" |
            while IFS= read -r line; do
                if [ -n "$command" ]; then
                    printf '%s\n' "$line"
                    continue
                fi
                case $line in
                guest:* | *' ok       '* | *' FAILED   '* | *' skipped  '* | '    '*) printf '%-12s %s\n' "$name" "$line" ;;
                esac
            done || status=$?
        # Emulated CPUs that change their memory at once have aborted QEMU itself (iotlb_to_section). That says nothing of what runs there.
        if [ "$attempt" = 2 ] || ! grep -q '^qemu-system-.* Assertion ' "$console"; then break; fi
        echo "$name: QEMU itself was aborted; once more" >&2
    done
    if [ -n "$command" ]; then
        sed -n 's/^guest: over with status //p' "$console" | tail -n 1 >"$results/$name.status"
        return
    fi
    {
        echo "machine: $name"
        echo "about: $about"
        echo "left: $left"
        echo "date: $(date --utc +%Y-%m-%d)"
        echo "commit: $commit"
        cat "$console"
    } >>"$log"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$console" | tail -n 1) || true
    if unknown=$(grep -m 1 '^there is no test called' "$console"); then
        echo "$name: ${unknown%%;*} here; $results/$name.log of a whole run has their names" >&2
        counts='0 passed, 1 failed, 0 skipped'
    elif [ -z "$counts" ] || ! grep -q '^guest: over' "$console"; then
        echo "$name did not come to its end (status $status, limit $limit s); its last lines:" >&2
        tail -n 30 "$console" | sed 's/^/    /' >&2
        counts='0 passed, 1 failed, 0 skipped'
    fi
    read -r p _ f _ s _ <<<"${counts//,/}"
    echo "$p $f $s" >"$results/$name.counts"
}

unpacked qemu trixie-amd64 busybox-static qemu-system-x86 qemu-system-arm
mkdir -p "$results"
at_once=no
if [ "$short" = yes ] && [ "$get" = no ] && [ "${#chosen[@]}" -gt 1 ] && [ "$(nproc)" -ge 2 ]; then
    # What these are asked has time enough, and for most of it one CPU each. What they need is got and built before.
    get=yes
    for name in "${chosen[@]}"; do boot "$name"; done
    get=no
    if [ "$build" = yes ]; then product x86_64 "$target/guest-x86_64"; fi
    build=no
    at_once=yes
fi
# Each in a process group of its own, which ends as a whole with this shell. What they boot from goes when they have ended.
booting=()
end_all() {
    kill -TERM -- "${booting[@]/#/-}" 2>/dev/null || true
    for name in "${chosen[@]}"; do rm -f "$results/$name.disk" "$results/$name.swap" "$results/$name.initramfs"; done
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
set -m
for name in "${chosen[@]}"; do
    boot "$name" "${wanted[@]:1}" &
    booting+=("$!")
    if [ "$at_once" = no ]; then
        wait "$!"
        booting=()
        end_all
    fi
done
set +m
wait
booting=()
if [ "$get" = yes ]; then exit; fi
if [ -n "$command" ]; then
    for name in "${chosen[@]}"; do
        # Without a status, the machine did not come to its end.
        read -r status <"$results/$name.status" || status=1
        if [ "$status" -ne 0 ]; then exit "$status"; fi
    done
    exit
fi
passed=0 failed=0 skipped=0
for name in "${chosen[@]}"; do
    # Without counts, whatever ended it was not its tests.
    if ! read -r p f s 2>/dev/null <"$results/$name.counts"; then p=0 f=1 s=0; fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
