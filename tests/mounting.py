"""A root directory of its own with a grant mounted in it, as the runtime makes it for a container. Needs root.

The directory of the mount is made in a new root and not in the test machine's: the library looks for it there, too.
"""

from __future__ import annotations

from pathlib import Path

_NEW_ROOT = """\
set -e
mount -t tmpfs none /mnt
for one in /* /.[!.]*; do
  if [ -L "$one" ]; then cp -P "$one" /mnt/
  elif [ "$one" != /mnt ] && [ "$one" != /run ] && [ -d "$one" ]; then mkdir "/mnt$one"; mount --rbind "$one" "/mnt$one"
  fi
done
mkdir -p "/mnt$1"
mount --bind -o ro "$0" "/mnt$1"
shift
"""


def with_grant(folder: Path, at: str, *command: str, then: str = ":") -> list[str]:
    """The command, run where `folder` is mounted at a path; `then` is a line of shell before it, in the machine's own root with the new one at /mnt."""
    script = f'{_NEW_ROOT}{then}\nexec chroot /mnt "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(folder), at, *command]
