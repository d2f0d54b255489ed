#!/bin/sh
# Lays out a driver root as a real install has it: install.sh BUILT ROOT [GPUS] [INSTANCE-CAPS...]
#   BUILT   folder with what `make fake` made        ROOT   the driver root to fill
#   GPUS    number of /dev/nvidiaN to make (default 8)
#   CAPS    numbers of /dev/nvidia-caps/nvidia-capN to make, for MIG instances: 3 + 135 x GPU + 9 x GPU instance, and that + 1
# The daemon then listens on ROOT/run/nvidia-persistenced/socket. Run again: replaces the libraries, keeps nodes and socket.
set -eu
[ $# -ge 2 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
built=$1 root=$2 gpus=${3:-8}
shift 2; [ $# -eq 0 ] || shift
version=580.65.06

mkdir -p "$root/lib" "$root/bin" "$root/dev/nvidia-caps" "$root/run/nvidia-persistenced" "$root/sys/bus/pci/drivers/nvidia"
place() { # place SOURCE TARGET: written beside and renamed, so that a process that has the old one mapped keeps it
    cp "$1" "$2.new"
    chmod 0755 "$2.new"
    mv -f "$2.new" "$2"
}
for name in libcuda libnvidia-ml; do
    place "$built/$name.so.$version" "$root/lib/$name.so.$version"
    ln -sfn "$name.so.$version" "$root/lib/$name.so.1"
    ln -sfn "$name.so.1" "$root/lib/$name.so"
done
place "$built/libfake-kernel.so" "$root/lib/libfake-kernel.so" # for programs whose channels are to be stopped: LD_PRELOAD
place "$built/nvidia-smi" "$root/bin/nvidia-smi"
place "$built/nvidia-fake-driverd" "$root/bin/nvidia-fake-driverd"

node() { # node PATH MAJOR MINOR
    [ -e "$1" ] && return 0
    if ! mknod -m 0666 "$1" c "$2" "$3" 2>/dev/null; then
        [ -n "${warned:-}" ] || echo "install.sh: no right to mknod here: $1 and the like become plain files; a container runtime will refuse them as devices" >&2
        warned=yes
        : >"$1"
    fi
}
gpu=0
while [ "$gpu" -lt "$gpus" ]; do
    node "$root/dev/nvidia$gpu" 195 "$gpu"
    gpu=$((gpu + 1))
done
node "$root/dev/nvidiactl" 195 255
node "$root/dev/nvidia-modeset" 195 254
node "$root/dev/nvidia-uvm" 511 0
node "$root/dev/nvidia-uvm-tools" 511 1
for cap in 1 2 "$@"; do # 1, 2: MIG config and monitor
    node "$root/dev/nvidia-caps/nvidia-cap$cap" 510 "$cap"
done
echo "$root"
