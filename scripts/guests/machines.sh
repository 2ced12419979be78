# The machines of guests.sh. Each is a function that sets what differs from the plain one (see `boot`):
#   about (a line), left (which tests it is not asked, and why), architecture, release, kernel_package, cpus, sockets, memory, append (the kernel's command line), options (QEMU's), userland (whole; bare:
#   without compiler and Python; or systemd, which is the first process then), swap, limit (seconds), tests, short_tests (those of `guests.sh --short`).
# Sourced by guests.sh.
# shellcheck shell=bash disable=SC2034,SC2054

machines=(debian13 debian12 nodes small arm64 arm64-16k container systemd)
short_machines=(debian13 debian12)

# What depends on the kernel, not on the malloc below or on the program: emulation takes ten times as long for each page fault.
of_run=(family/glibc family/nobody storm/nobody forks/daemon/glibc forks/descriptors/glibc forks/handlers/glibc forks/growing/glibc
    forks/quiet/glibc exit/glibc signals/glibc advice/glibc ends stragglers/nobody moves mappings/1 mappings/storm huge-pages/never invalid
    output/buffered peak/mixed peak/threads limits/address-space/128 limits/data/128 limits/own-data limits/no-mapping-left
    limits/no-processes limits/no-proc oom)
# Of these, what depends on nodes, processors or rights rather than on the kernel.
few_of_run=(family/glibc family/nobody storm/nobody forks/daemon/glibc forks/handlers/glibc forks/quiet/glibc stragglers/nobody mappings/storm
    limits/own-data limits/no-processes oom)
of_pool=(pool/heap pool/filling pool/tenants pool/example pool/kills)
everything=(feature unit sequences "${of_run[@]}" trim "${of_pool[@]}" reclaim serve units numa)

machine_debian13() {
    about='x86-64, 4 CPUs, 2 nodes, cgroup v2, swap'
    left="of run, what depends on the malloc below or on the program and not on the kernel, since emulation takes ten times as long; of the pool, what needs QEMU or measures; top, which needs a terminal"
    cpus=4 sockets=2 swap=yes append="psi=1"
    options=(-object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G
        -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1)
    tests=("${everything[@]}")
    short_tests=(feature sequences family/glibc trim/hold/killed numa/frames numa/policy)
}

machine_debian12() {
    about='x86-64, 2 CPUs, cgroup v2'
    left='as debian13'
    release=bookworm-amd64 append="psi=1"
    tests=("${everything[@]}")
    short_tests=(feature sequences)
}

# Node 2 has no memory, node 3 no CPU.
machine_nodes() {
    about='x86-64, 8 CPUs, 4 nodes: one without memory, one without CPUs'
    left='as debian13; of run, what does not depend on nodes or processors; serve, which does not'
    cpus=8 sockets=8 memory=6G append="psi=1"
    options=(-object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G -object memory-backend-ram,id=m3,size=2G
        -numa node,nodeid=0,cpus=0-2,memdev=m0 -numa node,nodeid=1,cpus=3-5,memdev=m1 -numa node,nodeid=2,cpus=6-7
        -numa node,nodeid=3,memdev=m3
        -numa dist,src=0,dst=1,val=20 -numa dist,src=0,dst=2,val=20 -numa dist,src=0,dst=3,val=30
        -numa dist,src=1,dst=2,val=12 -numa dist,src=1,dst=3,val=30 -numa dist,src=2,dst=3,val=30)
    tests=(feature unit sequences "${few_of_run[@]}" trim "${of_pool[@]}" reclaim units numa)
}

machine_small() {
    about='x86-64, 2 CPUs, 512 MiB, no huge pages, PSI or restartable sequences'
    left='what takes more memory than it has: most of run, trim, the services, and the tests of the library as a whole'
    release=bookworm-amd64 memory=512M userland=bare append="psi=0 transparent_hugepage=never"
    # Not what takes more memory than it has, as family does.
    tests=(feature unit sequences storm/nobody forks/handlers/glibc forks/quiet/glibc stragglers/nobody mappings/storm limits/address-space/128
        limits/data/128 limits/own-data limits/no-mapping-left limits/no-processes oom peak/mixed pool/heap)
}

machine_arm64() {
    about='aarch64, 4 CPUs, pages of 4 KiB'
    left='as nodes; reclaim, which has nothing of the processor'
    architecture=aarch64 release=trixie-arm64 kernel_package=linux-image-cloud-arm64 cpus=4 append="psi=1"
    tests=(feature unit sequences "${few_of_run[@]}" signals/glibc moves trim "${of_pool[@]}" units numa/hotplug numa/memory-hotplug)
}

machine_arm64_16k() {
    about='aarch64, 2 CPUs, pages of 16 KiB'
    left='all but what says that it is refused'
    architecture=aarch64 release=trixie-arm64 kernel_package=linux-image-arm64-16k append="psi=1"
    tests=(feature)
}

machine_container() {
    about='x86-64, 4 CPUs: an ordinary user in a container as Docker makes it'
    left='as nodes; the services and reclaim, which are not for a container'
    cpus=4 append="psi=1"
    tests=(feature unit sequences "${few_of_run[@]}" trim "${of_pool[@]}")
}

machine_systemd() {
    about='x86-64, 2 CPUs, cgroup v2, systemd'
    left='all but the units under systemd itself'
    userland=systemd append="psi=1 systemd.show_status=0 systemd.log_level=notice"
    tests=(systemd)
}
