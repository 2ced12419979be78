# The machines of guests.sh. Each is a function that sets what differs from the plain one (see `boot`):
#   architecture, release, kernel_package, cpus, memory, append (the kernel's command line), options (QEMU's), userland (whole, or bare:
#   without compiler and Python), swap, limit (seconds), tests, short_tests (those of `guests.sh --short`).
# Sourced by guests.sh.
# shellcheck shell=bash disable=SC2034,SC2054

machines=(debian13 debian12 nodes small arm64 arm64-16k container)
short_machines=(debian13 debian12)

# What does not depend on what a program allocates with.
of_run=(family/glibc family/nobody storm/glibc forks/daemon/glibc forks/little/glibc forks/descriptors/glibc forks/protect/glibc
    forks/handlers/glibc forks/streams/glibc forks/growing/glibc forks/quiet/glibc forks/storm/glibc exit dlopen/glibc signals/glibc
    advice ends stragglers moves mappings huge-pages invalid pairs output peak limits oom)
of_pool=(pool/heap pool/filling pool/tenants pool/pressure pool/example pool/kills)
everything=(feature unit sequences "${of_run[@]}" trim "${of_pool[@]}")

machine_debian13() {
    cpus=4 swap=yes append="psi=1"
    options=(-object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G
        -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1)
    tests=("${everything[@]}")
    short_tests=(feature sequences family/glibc trim/hold)
}

machine_debian12() {
    release=bookworm-amd64 append="psi=1"
    tests=("${everything[@]}")
    short_tests=(feature sequences family/glibc exit/glibc)
}

# Node 2 has no memory, node 3 no CPU.
machine_nodes() {
    cpus=8 memory=6G append="psi=1"
    options=(-object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G -object memory-backend-ram,id=m3,size=2G
        -numa node,nodeid=0,cpus=0-2,memdev=m0 -numa node,nodeid=1,cpus=3-5,memdev=m1 -numa node,nodeid=2,cpus=6-7
        -numa node,nodeid=3,memdev=m3
        -numa dist,src=0,dst=1,val=20 -numa dist,src=0,dst=2,val=20 -numa dist,src=0,dst=3,val=30
        -numa dist,src=1,dst=2,val=12 -numa dist,src=1,dst=3,val=30 -numa dist,src=2,dst=3,val=30)
    tests=("${everything[@]}")
}

machine_small() {
    release=bookworm-amd64 memory=512M userland=bare append="psi=0 transparent_hugepage=never"
    tests=(feature unit sequences "${of_run[@]}" pool/heap)
}

machine_arm64() {
    architecture=aarch64 release=trixie-arm64 kernel_package=linux-image-cloud-arm64 cpus=4 append="psi=1"
    tests=("${everything[@]}")
}

machine_arm64_16k() {
    architecture=aarch64 release=trixie-arm64 kernel_package=linux-image-arm64-16k append="psi=1"
    tests=(feature)
}

machine_container() {
    cpus=4 append="psi=1"
    tests=(feature unit sequences "${of_run[@]}" trim "${of_pool[@]}")
}
