"""What else a release carries: man page, krew manifest, notes, and the chart that names its image by digest."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from typing import Any

import pytest
import typer
import yaml

from hack.images.catalogue import ROOT
from hack.release import krew, man, notes
from tangramctl.__main__ import app

WANTED = "some-name==1.2.3"
DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_the_man_page_has_every_command_option_and_example() -> None:
    plain = man.page(0).replace("\\-", "-")
    program: Any = typer.main.get_command(app)
    found = list(man.commands(program, man.NAME))
    assert len(found) > 10
    for name, command in found:
        section = re.search(rf"(?ms)^\.SS {re.escape(man.usage(name, command))}\n(.*?)(?=^\.S[SH] )", plain)
        assert section, name
        options = [one.opts[0] for one in command.params if one.param_type_name == "option" and not one.hidden]
        assert re.findall(r"^\\fB(--[a-z-]+)", section[1], re.MULTILINE) == options, name
        for line in (command.help or "").splitlines():
            if line.startswith("  tangramctl "):
                assert line in section[1]


def test_the_man_page_is_of_the_day_that_is_given() -> None:
    assert man.page(1_764_201_600).startswith('.TH TANGRAMCTL 1 "2025-11-27" ')
    assert man.page(7) == man.page(7)


def test_a_text_is_no_macro_and_keeps_its_characters() -> None:
    assert man.text(".SH a\\b --c") == "\\&.SH a\\eb \\-\\-c"
    assert man.text("'x") == "\\&'x"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_warning() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8"], input=man.page(0), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_krews_manifest_names_the_archive_by_its_digest_and_what_is_in_it() -> None:
    packed = krew.archive(WANTED)
    assert packed == krew.archive(WANTED)
    spec = yaml.safe_load(krew.manifest(packed, WANTED))["spec"]
    (platform,) = spec["platforms"]
    assert platform["sha256"] == hashlib.sha256(packed).hexdigest()
    assert platform["uri"].endswith(f"/{spec['version']}/{krew.file_name()}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        modes = {member.name: member.mode for member in tar}
    assert {row["from"] for row in platform["files"]} == set(modes)
    assert modes[platform["bin"]] == 0o755
    assert len(spec["shortDescription"]) <= 50, "krew's own limit"


def test_no_plugin_runs_what_is_another_projects_on_pypi() -> None:
    assert krew.requirement({"name": "some-name", "version": "1.2.3"}) == WANTED
    with pytest.raises(LookupError, match="another project's"):
        krew.requirement({"name": "tangram", "version": "1.2.3"})


def test_the_plugin_runs_this_version_with_what_is_there(tmp_path: Any) -> None:
    script = tmp_path / "kubectl-tangram"
    script.write_text(krew.SCRIPT.format(requirement=WANTED))
    alone = subprocess.run(
        ["/bin/sh", str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert alone.returncode == 127
    assert "needs uv or pipx" in alone.stderr
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@"\n')
    uv.chmod(0o755)
    with_uv = subprocess.run(
        ["/bin/sh", str(script), "gpus", "a b"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert with_uv.stdout == f"tool run --from {WANTED} kubectl-tangram gpus a b\n"


def test_notes_are_the_section_of_the_version() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2027-01-01\n\n- two\n\n### More\n\n- three\n\n## [0.1.0]\n\n"
    assert notes.notes("0.2.0", text) == "- two\n\n### More\n\n- three\n"
    for missing in ("0.1.0", "0.3.0", "0.2"):
        with pytest.raises(LookupError, match="no section"):
            notes.notes(missing, text)


def test_the_released_chart_names_its_image_by_digest() -> None:
    values = (ROOT / "deploy/helm/tangram/values.yaml").read_text()
    before, after = yaml.safe_load(values), yaml.safe_load(notes.pinned(DIGEST, values))
    assert after["image"].pop("digest") == DIGEST
    assert before["image"].pop("digest") == ""
    assert after == before


@pytest.mark.parametrize("wrong", ["", "sha256:", DIGEST[:-1], DIGEST.upper(), f"{DIGEST}\n"])
def test_what_is_no_digest_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        notes.pinned(wrong, 'image:\n  digest: ""\n')
