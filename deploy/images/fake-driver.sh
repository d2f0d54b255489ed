#!/bin/sh
# Lay out a driver root on the node and play the kernel driver for it. The root is mounted at its own path.
set -eu
root=${FAKE_DRIVER_ROOT:-/var/lib/tangram-fake-driver}
cards=${FAKE_DRIVER_CARDS:-/etc/fake-driver/cards.conf}

/opt/fake-driver/install.sh /opt/fake-driver/files "$root"
mkdir -p "$root/run/nvidia-persistenced"
rm -f "$root/run/nvidia-persistenced/socket"
exec /opt/fake-driver/files/nvidia-fake-driverd --config "$cards" --socket "$root/run/nvidia-persistenced/socket"
