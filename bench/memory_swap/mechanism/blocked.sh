#!/bin/bash
# blocked.sh [FOLDER] - every case of blocked.c, entered before and after the suspend, on the first GPU. Needs nvcc. The lines go to FOLDER/blocked.txt, too.
cd "$(dirname "$0")" || exit 1
out=${1:-.}
program=$(mktemp -d)/blocked
mkdir -p "$out"
nvcc -O2 -D_GNU_SOURCE -Xcompiler -pthread,-rdynamic -Xlinker -export-dynamic -o "$program" blocked.c -lcuda || exit 1
{
    echo "# driver $(nvidia-smi --query-gpu=driver_version,name --format=csv,noheader | head -1), $(date -u +%F), commit ${TANGRAM_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}"
    for entered in before after; do
        for name in $("$program"); do
            line=$(timeout 45 "$program" "$name" $entered 2>&1)
            rc=$?
            echo "${line:-blocked $name entered $entered printed nothing} # exit $rc"
        done
    done
} | tee "$out/blocked.txt"
