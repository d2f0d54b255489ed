#!/bin/bash
# mechanism.sh [FOLDER] - the cases of mechanism.cu on the first GPU. Needs nvcc, and root for huge pages. The figures go to FOLDER/mechanism.txt, too.
cd "$(dirname "$0")" || exit 1
out=${1:-.}
program=$(mktemp -d)/mechanism
mkdir -p "$out"
nvcc -O2 -arch=native -Xlinker -export-dynamic -o "$program" mechanism.cu -lcuda || exit 1
[ "$(id -u)" = 0 ] && echo 12288 >/proc/sys/vm/nr_hugepages
go() {
    echo "== $*"
    timeout 150 "$program" "$@" 2>&1
    echo "rc $?"
}
{
    echo "# driver $(nvidia-smi --query-gpu=driver_version,name --format=csv,noheader | head -1), $(date -u +%F), commit ${TANGRAM_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}"
    go idle 4 512 0
    go work 4 512 0
    go work 4 512 4
    go work 4 512 24
    go work 4 512 24 1
    go flag 4 512 4
    go flag 4 512 24 1
    go meet 4 512 4
    go queue 4 512 4
    go queue 4 512 0 1
    go copying 8 512 0
    go copying 8 512 0 1
    go work 4 2 4
    go work 4 20 4
    go work 16 16384 0 0 1
    go work 16 20 24 0
    go work 16 512 24 0
} | tee "$out/mechanism.txt"
