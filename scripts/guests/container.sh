#!/usr/bin/env bash
# The machine `container`: an ordinary user in a container as Docker makes it, with namespaces of its own, a control group with a limit,
# /sys and /proc/sys read-only, and the profile's system calls. Runs inside.sh with its arguments there. Run by init, as root.
set -uo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
group=/sys/fs/cgroup/container
mkdir -p "$group"
echo 3G >"$group/memory.max"
echo 4096 >"$group/pids.max"
echo "$$" >"$group/cgroup.procs"
# shellcheck disable=SC2016
exec unshare --mount --pid --fork --ipc --uts --cgroup --kill-child bash -c '
    mount --make-rprivate /
    mount -t proc proc /proc
    mount -t cgroup2 -o ro cgroup2 /sys/fs/cgroup
    mount -o remount,bind,ro /sys
    mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys
    mount --bind /dev/null /proc/kcore && mount --bind /dev/null /proc/timer_list
    exec setpriv --reuid 1000 --regid 1000 --clear-groups env HOME=/tmp unshare --user --map-user=1000 --map-group=1000 \
        target/tests/sandbox docker bash scripts/guests/inside.sh "$@"
' container "$@"
