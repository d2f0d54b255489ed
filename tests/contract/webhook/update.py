"""Write every x.output.yaml anew: `python -m tests.contract.webhook.update`.

It records what the webhook does, right or wrong: read the diff before committing it.
"""

from __future__ import annotations

import yaml

from tests.contract.webhook.pairs import FOLDER, INPUTS, answer, load, output_of


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, _data: object) -> bool:
        return True


def main() -> None:
    kept = {output_of(path) for path in INPUTS}
    for orphan in set(FOLDER.glob("*.output.yaml")) - kept:
        orphan.unlink()
    for path in INPUTS:
        documents = answer(*load(path))
        output_of(path).write_text(yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=1000))


if __name__ == "__main__":
    main()
