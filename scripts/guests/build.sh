# What runs in a guest: the project's binaries and tests for its processor, and Debian's programs around them. Sourced by guests.sh.
# shellcheck shell=bash disable=SC2154

# A cpio archive of the directory, owned by root.
archive() {
    (cd "$1" && find . | "$cache/qemu/usr/bin/busybox" cpio -o -H newc -R 0:0 2>/dev/null)
}

# One /usr for all: packages of bookworm have files in /bin and in /usr/bin.
merge_usr() {
    local root=$1 directory
    for directory in bin sbin lib lib64; do
        if [ -d "$root/$directory" ] && [ ! -L "$root/$directory" ]; then
            mkdir -p "$root/usr/$directory"
            cp -a "$root/$directory/." "$root/usr/$directory/"
            rm -rf "${root:?}/$directory"
        fi
        if [ -d "$root/usr/$directory" ]; then ln -sfn "usr/$directory" "$root/$directory"; fi
    done
}

# userland NAME RELEASE PACKAGE...: Debian's programs as $cache/NAME.cpio, once.
userland() {
    local name=$1 root=$cache/$1
    if [ "$(cat "$root.cpio.packages" 2>/dev/null)" = "${*:2}" ]; then return; fi
    unpacked "$@"
    merge_usr "$root"
    # What no test reads.
    rm -rf "$root"/usr/share/{doc,man,locale,info,i18n,lintian,bug,zoneinfo,gcc,gdb} "$root"/usr/lib/*/gconv "$root"/usr/lib/*/perl* \
        "$root"/usr/share/perl* "$root"/usr/lib/*/lib{asan,tsan,hwasan,lsan,ubsan,itm,gprofng}* "$root"/usr/bin/*-lto-dump-*
    find "$root" \( -name lto1 -o -name 'lib[a-z]*san*.a' -o -name 'libgprofng*' \) -delete
    archive "$root" >"$root.cpio"
    echo "${*:2}" >"$root.cpio.packages"
    rm -rf "$root"
}

bare_packages=(base-files base-passwd bash busybox-static coreutils dash diffutils findutils grep libc-bin libgcc-s1 mawk mount procps sed util-linux)
whole_packages=("${bare_packages[@]}" e2fsprogs gcc libc6-dev numactl python3 strace)

# The programs of the machine, as $userland_archive.
programs() {
    local name=userland-$release
    case $userland in
    whole) set -- "${whole_packages[@]}" ;;
    bare) name+=-bare && set -- "${bare_packages[@]}" ;;
    systemd) name+=-systemd && set -- "${whole_packages[@]}" systemd ;;
    esac
    userland "$name" "$release" "$@"
    userland_archive=$cache/$name.cpio
}

# The product, the test binaries (in guest-tests, by name) and the C programs (in tests) for the architecture, below the directory.
product() {
    local architecture=$1 directory=$2 file
    if [ "$architecture" != x86_64 ]; then
        cross_product "$directory"
        return
    fi
    cargo build --quiet --workspace --release
    mkdir -p "$directory"
    stripped "$directory" without_debug < <(cargo test --quiet --workspace --profile checked --no-run --message-format=json)
    bash scripts/test-real.sh --build
    # The tree of a guest is memory, of which the smallest has little.
    for file in pagecrew libpagecrew_preload.so; do without_debug "$target/release/$file" "$directory/$file"; done
}

# The same for another processor, in a tree with Debian's cross compiler: the Rust that is installed here builds for this processor only.
# Crates are what this machine's cargo has fetched.
cross_product() {
    local directory=$1 root=$cache/cross triple=aarch64-unknown-linux-gnu built=$target/cross rust=/usr/bin
    local packages=("${bare_packages[@]}" gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    # The version that is installed here, or else Debian's: of that, both processors may not have the same one at the same time.
    if command -v rustup >/dev/null; then
        rust=$(rust_for "$triple")
        unpacked cross trixie-amd64 "${packages[@]}"
    else
        unpacked cross trixie-amd64 "${packages[@]}" --target-release trixie-backports cargo rustc
        unpacked cross-std trixie-arm64 --target-release trixie-backports libstd-rust-dev
        cp -a "$cache/cross-std/usr/lib/rustlib/$triple" "$root/usr/lib/rustlib/"
    fi
    merge_usr "$root"
    ln -sfn gcc "$root/usr/bin/cc"
    cargo fetch --quiet --locked
    mkdir -p "$directory" "$built"
    # shellcheck disable=SC2016
    in_tree "$root" '
        export PATH='"$rust"':$PATH CARGO_HOME='"${CARGO_HOME:-$HOME/.cargo}"' CARGO_TARGET_DIR='"$built"' CARGO_PROFILE_RELEASE_DEBUG=0
        # The same code, built sooner: nobody measures it.
        export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
        cargo="cargo --quiet --offline"
        $cargo build --workspace --release --target '"$triple"'
        $cargo test --workspace --release --target '"$triple"' --no-run --message-format=json >'"$built"'/messages
        CC=aarch64-linux-gnu-gcc bash scripts/test-real.sh --build'
    stripped "$directory" cp <"$built/messages"
    cp "$built/$triple/release/pagecrew" "$built/$triple/release/libpagecrew_preload.so" "$directory/"
}

# rust_for TRIPLE: prints the directory of the Rust of this machine's version that builds for TRIPLE, which is got first, into the cache.
rust_for() {
    local version
    version=$(rustc --version | awk '{ print $2 }')
    RUSTUP_HOME=$cache/rustup rustup --quiet toolchain install "$version" --profile minimal --target "$1" --no-self-update >&2
    echo "$cache/rustup/toolchains/$version-x86_64-unknown-linux-gnu/bin"
}

# in_tree ROOT COMMANDS: runs the commands in the tree, at this checkout, which is mounted in it for the moment.
in_tree() {
    local root=$1 commands=$2 alone=(unshare --mount)
    if [ "$(id -u)" -ne 0 ]; then alone=(unshare --user --map-root-user --mount); fi
    # shellcheck disable=SC2016
    "${alone[@]}" bash -euc '
        root=$1 checkout=$2 home=$3
        for directory in "$checkout" "$home" /dev /proc; do
            mkdir -p "$root$directory"
            mount --rbind "$directory" "$root$directory"
        done
        mkdir -p "$root/tmp"
        exec chroot "$root" /bin/bash -euc "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C; cd \"$checkout\"; $4"
    ' in_tree "$root" "$checkout" "${CARGO_HOME:-$HOME/.cargo}" "$commands"
}

without_debug() {
    strip --strip-debug -o "$2" "$1"
}

# stripped DIRECTORY COPY: the test binaries that cargo's messages on standard input name, without what only debuggers read. Those that
# read the sources are left out.
stripped() {
    local directory=$1 copy=$2 name path
    rm -rf "$directory/guest-tests"
    mkdir -p "$directory/guest-tests"
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable") and message["profile"]["test"]:
        package = message["package_id"].split("#")[0].rsplit("/", 1)[-1]
        name = message["target"]["name"]
        kind = message["target"]["kind"][0]
        print(package + ("" if kind in ("lib", "bin", "rlib") else "-" + name), message["executable"])
' | while read -r name path; do
        case $name in
        bench* | *-golden | *-layers | *-corpus) ;;
        *) "$copy" "$path" "$directory/guest-tests/$name" ;;
        esac
    done
}

# Architectures that were built for in this run.
built=()

# initramfs NAME TEST...: what the machine boots with, as $results/NAME.initramfs: Debian's programs, and over them the checkout, in
# the same place as here, since tests know where they were built.
initramfs() {
    local name=$1 stage=$results/$1.stage inside module
    shift
    if [ "$build" = yes ] && [[ " ${built[*]-} " != *" $architecture "* ]]; then
        product "$architecture" "$target/guest-$architecture"
        built+=("$architecture")
    fi
    if [ ! -d "$target/guest-$architecture" ]; then
        echo "$name: nothing was built for guests on $architecture before; leave --no-build out" >&2
        exit 1
    fi
    rm -rf "$stage"
    inside=$stage$checkout
    mkdir -p "$inside/target/release" "$inside/target/tmp" "$stage/modules"
    cp -r "$target/guest-$architecture/." "$inside/target/release/"
    cp -rp "$([ "$architecture" = x86_64 ] && echo "$target" || echo "$target/cross")/tests" "$inside/target/tests"
    cp -rp --parents scripts tests contrib docs "$inside/"
    mv "$inside/target/release/guest-tests" "$inside/target/guest-tests"
    # Where tests look for the command: where it was built with them.
    if [ "$architecture" = x86_64 ]; then
        ln -s release "$inside/target/checked"
    else
        mkdir -p "$inside/target/cross/$architecture-unknown-linux-gnu"
        ln -s "$checkout/target/release" "$inside/target/cross/$architecture-unknown-linux-gnu/release"
    fi
    cp scripts/guests/init "$stage/init"
    chmod 755 "$stage/init"
    # For the disks, in the order in which they need each other (`loop` for the bench of reclaim); some kernels have most of them built in.
    local number=0 wanted
    for wanted in virtio virtio_ring virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk loop; do
        while IFS= read -r module; do
            number=$((number + 1))
            case $module in
            *.xz) xz --decompress --stdout "$module" >"$stage/modules/$number.ko" ;;
            *) cp "$module" "$stage/modules/$number.ko" ;;
            esac
        done < <(find "$cache/kernel-$release-$kernel_package" -name "$wanted.ko*")
    done
    printf '%s\n' "machine=$name" "checkout=$checkout" "tests='$*'" "patience=$patience" "swap=$swap" >"$stage/guest.env"
    printf '%s' "$command" >"$stage/guest.command"
    cat "$userland_archive" >"$results/$name.initramfs"
    archive "$stage" >>"$results/$name.initramfs"
    rm -rf "$stage"
}
