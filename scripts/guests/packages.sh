# Packages of Debian's releases, downloaded and unpacked below .cache/guests, never installed: QEMU, the kernels of the guests, what
# runs in them, and a Rust compiler for another processor. Sourced by scripts/guests.sh.
#
# A release is named SUITE-ARCHITECTURE, such as trixie-arm64.
# shellcheck shell=bash

cache=$PWD/.cache/guests

# The address that this machine's own packages come from. Debian's mirrors have every release and architecture.
mirror() {
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
        awk '/^ *#/ { next }
            /^URIs:/ { print $2 }
            /^deb / { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; break } }' |
        grep -E '/debian/?$' | sed -n 1p
}

# Makes apt's lists of a release, once. They have nothing to do with this machine's own, so no right is needed.
apt_of() {
    local release=$1 suite=${1%-*} architecture=${1##*-} directory=$cache/apt/$1 uri
    export APT_CONFIG=$directory/conf
    if [ -e "$directory/complete" ]; then return; fi
    uri=$(mirror)
    if [ -z "$uri" ]; then
        echo "no Debian mirror is configured on this machine; the guests' packages come from one" >&2
        return 1
    fi
    rm -rf "$directory"
    mkdir -p "$directory/lists/partial" "$directory/archives/partial" "$directory/parts"
    : >"$directory/status"
    echo "deb $uri $suite main" >"$directory/sources.list"
    # The Rust compiler of a stable release is too old for this project.
    if [ "$suite" = trixie ]; then echo "deb $uri $suite-backports main" >>"$directory/sources.list"; fi
    cat >"$directory/conf" <<END
Dir::Etc::sourcelist "$directory/sources.list";
Dir::Etc::sourceparts "$directory/parts";
Dir::Etc::parts "$directory/parts";
Dir::State "$directory";
Dir::State::lists "$directory/lists";
Dir::State::status "$directory/status";
Dir::Cache "$directory";
Dir::Cache::archives "$directory/archives";
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; };
APT::Sandbox::User "root";
APT::Install-Recommends "false";
Debug::NoLocking "true";
Acquire::Languages "none";
Acquire::Retries "3";
END
    apt-get --quiet --quiet update >&2
    touch "$directory/complete"
}

# unpacked NAME RELEASE PACKAGE...: the packages and what they depend on, unpacked into $cache/NAME, once. Options of apt-get may stand
# among the packages.
unpacked() {
    local name=$1 release=$2 directory=$cache/$1 archives
    shift 2
    if [ "$(cat "$directory.packages" 2>/dev/null)" = "$release $*" ]; then return; fi
    echo "guests: getting $name ($release)" >&2
    apt_of "$release"
    archives=$cache/apt/$release/archives
    rm -rf "$directory" "$directory.packages" "${archives:?}"/*.deb
    apt-get --quiet --quiet --yes --download-only install "$@" >&2
    mkdir -p "$directory"
    for package in "$archives"/*.deb; do dpkg-deb --extract "$package" "$directory"; done
    rm -f "$archives"/*.deb
    echo "$release $*" >"$directory.packages"
}

# kernel NAME RELEASE PACKAGE: the kernel that the package PACKAGE stands for, as $cache/NAME/vmlinuz with its modules beside it, once.
kernel() {
    local name=$1 release=$2 directory=$cache/$1 package
    if [ -e "$directory/vmlinuz" ]; then return; fi
    echo "guests: getting $name ($release)" >&2
    apt_of "$release"
    package=$(apt-cache depends "$3" | awk '/Depends: linux-image-/ { print $2; exit }')
    rm -rf "$directory"
    mkdir -p "$directory"
    (cd "$directory" && apt-get --quiet --quiet download "$package" >&2)
    dpkg-deb --extract "$directory"/*.deb "$directory"
    rm -f "$directory"/*.deb
    mv "$directory"/boot/vmlinuz-* "$directory/vmlinuz"
}
