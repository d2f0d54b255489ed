#!/usr/bin/env bash
# What test_cluster.py needs on a machine that has a GPU and reaches no network.
#
#   tests/gpu/offline.sh pack FOLDER [MIB]   where the images and the cluster's programs are built (make demo does both):
#                                            writes FOLDER/kit.tar.zst.0, .1, ... of at most MIB each (default 50), and FOLDER/debs
#   tests/gpu/offline.sh unpack FOLDER       there, as root: puts them where hack.cluster looks for them, and Debian's programs
#                                            where there are none
#   tests/gpu/offline.sh test [CSV]          there, as root, from the root of this tree: the cluster, the images, the tests. Its
#                                            python3 has pytest, pytest-timeout, msgspec, rich and cryptography
#
# TANGRAM_DRIVER_ROOT, TANGRAM_DRIVER_LIBRARIES and TANGRAM_TORCH_* as in test_cluster.py.
set -euo pipefail

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/tangram
PACKAGES="runc iptables conntrack socat containernetworking-plugins zstd"
LIBRARIES="libip4tc2 libip6tc2 libmnl0 libnetfilter-conntrack3 libnfnetlink0 libnftnl11 libseccomp2 libwrap0 libxtables12 liblz4-1"

pack() {
    local folder=$1 mib=${2:-50}
    [ -e "$CACHE/images/current/tangram.tar" ] || { echo "$0 pack: $CACHE/images/current has no images: run make demo first" >&2; exit 1; }
    mkdir -p "$folder/debs"
    (cd "$folder/debs" && apt-get download -qq $PACKAGES $LIBRARIES)
    # each version of a program is a folder of its own: the newest of each; images are links to the archives built last
    (
        cd "$CACHE"
        for name in kubernetes etcd containerd toolkit pause helm; do ls -dt cluster/"$name"-* | head -1; done
        ls images/current/{kube-scheduler,tangram,tangram-python,tangram-workload}.tar # the first has one of the programs once more
    ) | tar -C "$CACHE" -ch --files-from - | zstd -q -12 --long=29 -T0 | split -b "${mib}M" -d -a 1 - "$folder/kit.tar.zst."
    du -sh "$folder"/*
}

unpack() {
    local folder=$1 scratch
    scratch=$(mktemp -d)
    for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$scratch"; done
    tar -C "$scratch" -c . | tar -C / -x --keep-directory-symlink --skip-old-files
    rm -r "$scratch"
    ldconfig
    mkdir -p "$CACHE"
    cat "$folder"/kit.tar.zst.* | zstd -dc --long=29 | tar -C "$CACHE" -x
    for family in iptables ip6tables; do
        command -v "$family" > /dev/null && continue
        for what in "" -save -restore; do ln -s xtables-nft-multi "/usr/sbin/$family$what"; done
    done
}

run_tests() {
    # containers get the driver's libraries mounted into the machine's own /usr: into a layer over it
    if [ -z "${TANGRAM_TORCH_USR:-}" ]; then
        mkdir -p /run/tangram-usr
        mountpoint -q /run/tangram-usr || mount -t tmpfs tmpfs /run/tangram-usr
        mkdir -p /run/tangram-usr/{upper,work,usr}
        mountpoint -q /run/tangram-usr/usr ||
            mount -t overlay overlay -o lowerdir=/usr,upperdir=/run/tangram-usr/upper,workdir=/run/tangram-usr/work /run/tangram-usr/usr
        export TANGRAM_TORCH_USR=/run/tangram-usr/usr
    fi
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD
    [ -z "$1" ] || export TANGRAM_GPU_CSV=$1
    python3 -m hack.cluster up --provider local
    python3 -m hack.cluster load
    python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -W ignore::pytest.PytestUnknownMarkWarning tests/gpu/test_cluster.py
}

case ${1:-} in
    pack | unpack) [ -n "${2:-}" ] || { echo "$0 $1: which folder?" >&2; exit 2; }; "$@" ;;
    test) run_tests "${2:-}" ;;
    *) sed -n '2,/^set /{/^#/s/^# \?//p}' "$0"; [ "${1:-}" = --help ] || exit 2 ;;
esac
