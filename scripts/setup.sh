#!/usr/bin/env bash
# Sets up what `make demo`, `make bench` and `make test` use besides Rust, gcc and python3: Debian packages, a private Python
# environment in .venv and a guest's kernel in .cache. May be run any number of times; what is there already costs nothing.
#
# As root it installs what is missing. Without root it says what is missing and goes on: what needs it is then left out.
set -euo pipefail
cd "$(dirname "$0")/.."

# One package a line, or alternatives of which the first known one is taken: some names differ between releases of Debian.
packages=(
    # The programs that the demo runs.
    redis-server
    fasttext
    "default-jdk-headless openjdk-17-jdk-headless openjdk-21-jdk-headless openjdk-25-jdk-headless"
    nodejs
    # The programs that `pagecrew bench run` runs besides.
    ffmpeg
    git
    imagemagick
    postgresql
    r-base-core
    # The mallocs that the benches compare with.
    libjemalloc2
    "libmimalloc2.0 libmimalloc3"
    "libtcmalloc-minimal4t64 libtcmalloc-minimal4"
    # What the tests build and run.
    gcc
    g++
    make
    musl-tools
    python3-venv
    shellcheck
    sqlite3
    strace
    stress-ng
    util-linux
    xz-utils
    zstd
)
if [ "$(uname -m)" = x86_64 ]; then
    # For the test with a 32-bit program. Not gcc-multilib: it conflicts with every cross compiler.
    packages+=(libc6-dev-i386 "lib32gcc-12-dev lib32gcc-13-dev lib32gcc-14-dev")
    # What takes memory from a pool.
    packages+=(qemu-system-x86)
fi

# Versions that have wheels for Python 3.11 to 3.13.
requirements=(numpy==2.2.6 pandas==2.2.3 polars==1.33.1 duckdb==1.3.2 pyarrow==21.0.0 scikit-learn==1.7.2 pytest==8.4.2 hypothesis==6.140.2)

say() {
    printf 'setup: %s\n' "$*" >&2
}

installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

any_installed() {
    local name
    for name in "$@"; do
        if installed "$name"; then return 0; fi
    done
    return 1
}

# Prints the first of the alternatives that this release has, or the first one where it has none.
choose() {
    local name
    for name in "$@"; do
        if apt-cache show --no-all-versions "$name" >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    echo "$1"
}

# Packages with a service.
services=(redis-server postgresql)

# Installs packages, never at the price of one that is there, and without starting the services in them: nothing here uses the
# machine's own Redis or PostgreSQL.
install() {
    local policy=/usr/sbin/policy-rc.d status=0 service new=()
    for service in "${services[@]}"; do
        if ! installed "$service"; then new+=("$service"); fi
    done
    if [ -e "$policy" ]; then
        policy=
    else
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-remove --no-install-recommends "$@" >&2 || status=$?
    if [ -n "$policy" ]; then rm -f "$policy"; fi
    for service in "${new[@]}"; do
        if installed "$service" && command -v systemctl >/dev/null; then
            systemctl disable --now "$service" >/dev/null 2>&1 || true
        fi
    done
    return "$status"
}

debian_packages() {
    local entry missing=() chosen=() alternatives
    for entry in "${packages[@]}"; do
        read -ra alternatives <<<"$entry"
        if ! any_installed "${alternatives[@]}"; then missing+=("$entry"); fi
    done
    if [ "${#missing[@]}" -eq 0 ]; then return; fi
    if [ "$(id -u)" -ne 0 ]; then
        say "not root, so these packages are not installed, and what needs them is left out: ${missing[*]%% *}"
        return
    fi
    apt-get update --quiet >&2 || say "the package lists could not be brought up to date; going on with those that are here"
    for entry in "${missing[@]}"; do
        read -ra alternatives <<<"$entry"
        chosen+=("$(choose "${alternatives[@]}")")
    done
    say "installing ${chosen[*]}"
    if install "${chosen[@]}"; then return; fi
    # One package that can't be had must not keep out the others.
    for entry in "${chosen[@]}"; do
        install "$entry" || say "$entry could not be installed; what needs it is left out"
    done
}

python_environment() {
    local python=.venv/bin/python wanted="${requirements[*]}"
    if [ -x "$python" ] && [ "$(cat .venv/requirements 2>/dev/null)" = "$wanted" ]; then return; fi
    if ! command -v python3 >/dev/null; then
        say "no python3; what needs NumPy and pandas is left out"
        return
    fi
    say "making .venv with $wanted"
    # The pip in a broken environment may be what broke it, so a new one replaces it.
    if ! python3 -m venv --clear .venv >&2; then
        say "python3 -m venv failed (package python3-venv); what needs NumPy and pandas is left out"
        return
    fi
    if ! "$python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "${requirements[@]}" >&2; then
        say "pip could not install $wanted; what needs them is left out"
        return
    fi
    printf '%s\n' "$wanted" >.venv/requirements
}

# Downloads the package with the kernel that one of these stands for, the smallest first, into the directory.
download_kernel() {
    local directory=$1 name package
    for name in linux-image-cloud-amd64 linux-image-amd64; do
        package=$(apt-cache depends "$name" 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }')
        if [ -z "$package" ]; then continue; fi
        if (cd "$directory" && apt-get download --quiet --option APT::Sandbox::User=root "$package" >&2); then return; fi
    done
    return 1
}

# The kernel that a guest starts in the tests, taken out of its package: nothing is installed, /boot stays as it is.
guest_kernel() {
    local directory=.cache/guest
    if [ -e "$directory/vmlinuz" ] || [ "$(uname -m)" != x86_64 ]; then return; fi
    say "getting $directory/vmlinuz"
    rm -rf "$directory"
    mkdir -p "$directory"
    if ! download_kernel "$directory"; then
        # What the lists of a machine that was set up long ago name may be gone.
        if [ "$(id -u)" -eq 0 ]; then apt-get update --quiet >&2 || true; fi
        download_kernel "$directory" || true
    fi
    if dpkg-deb --fsys-tarfile "$directory"/*.deb 2>/dev/null |
        tar --extract --to-stdout --wildcards './boot/vmlinuz-*' >"$directory/unfinished" 2>/dev/null; then
        mv "$directory/unfinished" "$directory/vmlinuz"
    else
        say "no guest kernel can be had from Debian's packages; the test that starts one is left out"
    fi
    rm -f "$directory"/*.deb "$directory/unfinished"
}

if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
    debian_packages
    guest_kernel
else
    say "no apt-get here; install by hand what these packages hold: ${packages[*]%% *}"
fi
python_environment
