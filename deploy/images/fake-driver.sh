#!/bin/sh
# Lay out a driver root on the node and play the kernel driver for it. The root is mounted at its own path.
set -eu
root=$FAKE_DRIVER_ROOT
description=${FAKE_DRIVER_GPUS:-/etc/fake-driver/gpus.conf}
here=$(dirname "$0")

# Device nodes: one for each GPU, and two for each GPU instance that it can have (15 at most), also before its MIG mode is switched on.
gpus=$(awk '$1 == "gpu" { n = 1; for (i = 3; i <= NF; i++) if (sub(/^count=/, "", $i)) n = $i; sum += n } END { print sum + 0 }' "$description")
caps=$(awk -v gpus="$gpus" 'BEGIN { for (at = 0; at < gpus; at++) for (i = 0; i < 15; i++) { cap = 3 + 135 * at + 9 * i; print cap, cap + 1 } }')
# shellcheck disable=SC2086 # a list of numbers
"$here/install.sh" "$here/files" "$root" "$gpus" $caps > /dev/null

exec "$here/files/nvidia-fake-driverd" --config "$description" --socket "$root/run/nvidia-persistenced/socket" --bus "$root/sys/bus/pci/drivers/nvidia"
