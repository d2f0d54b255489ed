"""Image archives, the commit that an image reports, and when an image is built again."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hack import previous
from hack.cluster import archive
from hack.images.buildah import Buildah
from hack.images.catalogue import (
    DOCKERFILE,
    FAKE_DRIVER,
    IGNORED,
    IMAGES,
    ROOT,
    TANGRAM,
    WORKLOAD,
    context_files,
    image_key,
    is_ignored,
    patterns,
    previous_image,
)
from hack.images.commit import commit_of
from hack.images.docker import Docker
from hack.images.index import join
from hack.images.names import rename
from hack.images.oci import BadArchive


def _program(folder: Path) -> Path:
    program = folder / "program"
    program.write_bytes(b"\x7fELF and so on")
    return program


def test_an_archive_names_its_image_and_its_digests_are_true(tmp_path: Path) -> None:
    archive.write(tmp_path / "a.tar", "localhost/x:1", {"usr/bin/x": _program(tmp_path)}, ["x"], user="1:1")
    with tarfile.open(tmp_path / "a.tar") as image:
        contents = {member.name: image.extractfile(member).read() for member in image.getmembers()}  # type: ignore[union-attr]
    for name, content in contents.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    (entry,) = json.loads(contents["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "localhost/x:1"
    manifest = json.loads(contents[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"])
    config = json.loads(contents[f"blobs/sha256/{manifest['config']['digest'].removeprefix('sha256:')}"])
    assert config["config"]["Entrypoint"] == ["x"]
    assert manifest["layers"][0]["digest"] == config["rootfs"]["diff_ids"][0]


def test_the_same_program_is_the_same_archive(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        archive.write(tmp_path / name, "localhost/x:1", {"usr/bin/x": _program(tmp_path)}, ["x"])
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


PLATFORMS = ("amd64", "arm64")


def _archives(folder: Path) -> list[Path]:
    for one in PLATFORMS:
        (folder / one).mkdir()
        program = _program(folder / one)
        program.write_bytes(one.encode())
        archive.write(folder / f"{one}.tar", "localhost/x:1", {"usr/bin/x": program}, ["x"], architecture=one)
    return [folder / f"{one}.tar" for one in PLATFORMS]


def _contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as image:
        return {member.name: image.extractfile(member).read() for member in image.getmembers()}  # type: ignore[union-attr]


def test_an_index_has_the_image_of_each_platform(tmp_path: Path) -> None:
    made = _archives(tmp_path)
    assert join(tmp_path / "index.tar", "localhost/x:2", made) == ["linux/amd64", "linux/arm64"]
    contents = _contents(tmp_path / "index.tar")
    for name, content in contents.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    (top,) = json.loads(contents["index.json"])["manifests"]
    assert top["annotations"]["io.containerd.image.name"] == "localhost/x:2"
    index = json.loads(contents[f"blobs/sha256/{top['digest'].removeprefix('sha256:')}"])
    assert [one["platform"]["architecture"] for one in index["manifests"]] == list(PLATFORMS)
    for path, entry in zip(made, index["manifests"], strict=True):
        (own,) = json.loads(_contents(path)["index.json"])["manifests"]
        assert (entry["digest"], entry["size"]) == (own["digest"], own["size"])
        assert {name for name in _contents(path) if name.startswith("blobs/")} <= contents.keys()


def test_the_same_archives_in_any_order_give_the_same_images(tmp_path: Path) -> None:
    made = _archives(tmp_path)
    join(tmp_path / "a", "localhost/x:1", made)
    join(tmp_path / "b", "localhost/x:1", made)
    join(tmp_path / "c", "localhost/x:1", made[::-1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert _contents(tmp_path / "c") == _contents(tmp_path / "a")


def test_what_is_no_archive_or_no_true_one_gives_no_index(tmp_path: Path) -> None:
    first, second = _archives(tmp_path)
    with pytest.raises(BadArchive, match="another archive has an image for linux/amd64"):
        join(tmp_path / "index", "x", [first, first])
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(BadArchive, match="no OCI archive of one image"):
        join(tmp_path / "index", "x", [tmp_path / "text"])
    with tarfile.open(tmp_path / "forged", "w") as forged:
        for name, content in _contents(second).items():
            info = tarfile.TarInfo(name)
            content = (
                content + b" "
                if json.loads(_contents(second)["index.json"])["manifests"][0]["digest"][7:] in name
                else content
            )
            info.size = len(content)
            forged.addfile(info, io.BytesIO(content))
    with pytest.raises(BadArchive, match="has the digest"):
        join(tmp_path / "index", "x", [tmp_path / "forged"])
    assert not (tmp_path / "index").exists()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_package_of_the_image_has_a_wheel_for_each_architecture(machine: str) -> None:
    """And the compiler: then nothing is built from source, which the image has no tools for. Of CPython 3.13, which the Dockerfile's base has."""
    packages = {one["name"]: one for one in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    needed, left = {"ziglang"}, [one["name"] for one in packages["tangram"]["dependencies"]]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += [one["name"] for one in packages[name].get("dependencies", [])]
    serves = re.compile(rf"-(py3|cp313|cp3[0-9]+-abi3|py2\.py3)-.*(any|manylinux[^-]*_{machine}[^-]*)\.whl$")
    lacking = [
        name
        for name in sorted(needed)
        if not any(serves.search(wheel["url"]) for wheel in packages[name].get("wheels", []))
    ]
    assert lacking == []


def _contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as image:
        return {one.name: image.extractfile(one).read() for one in image.getmembers() if one.isfile()}  # type: ignore[union-attr]


def test_an_image_that_takes_the_place_of_others_has_their_names_in_the_archive_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    archive.write(path, "localhost/x:1", {"usr/bin/x": _program(tmp_path)}, ["x"])
    before = _contents(path)
    rename(path, ("docker.io/library/one:1", "quay.io/two:2"))
    after = _contents(path)
    entries = json.loads(after.pop("index.json"))["manifests"]
    assert [one["annotations"]["io.containerd.image.name"] for one in entries] == [
        "docker.io/library/one:1",
        "quay.io/two:2",
    ]
    assert [one["annotations"]["org.opencontainers.image.ref.name"] for one in entries] == [
        "docker.io/library/one:1", "quay.io/two:2",
    ]  # fmt: skip
    assert {one["digest"] for one in entries} == {
        one["digest"] for one in json.loads(before.pop("index.json"))["manifests"]
    }
    assert after == before, "layers and settings are what they were"
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".tar"] == ["a.tar"]


def test_an_archive_of_docker_is_renamed_too(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    text = json.dumps([{"Config": "c.json", "RepoTags": ["localhost/x:1"], "Layers": ["l/layer.tar"]}]).encode()
    with tarfile.open(path, "w") as made:
        for name, content in (("manifest.json", text), ("l/layer.tar", b"layer")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    rename(path, ("docker.io/library/one:1", "quay.io/two:2"))
    after = _contents(path)
    (entry,) = json.loads(after["manifest.json"])
    assert entry == {
        "Config": "c.json", "RepoTags": ["docker.io/library/one:1", "quay.io/two:2"], "Layers": ["l/layer.tar"],
    }  # fmt: skip
    assert after["l/layer.tar"] == b"layer"


def test_no_builder_gives_an_image_the_name_of_a_public_one() -> None:
    assert [image.name for image in IMAGES if not image.name.startswith("localhost/")] == []
    assert {image.target for image in IMAGES if image.names} == {"python", "stand-in"}


def test_every_image_is_a_stage_of_the_dockerfile() -> None:
    text = (ROOT / DOCKERFILE).read_text()
    assert all(f" AS {image.target}\n" in text for image in IMAGES)


def test_what_no_image_needs_is_left_out_of_the_context() -> None:
    left_out = patterns((ROOT / IGNORED).read_text())
    for path in (".git", ".venv", "tests", "shim/tests", "a/b/__pycache__", "hack", "x/y.o"):
        assert is_ignored(path, left_out), path
    for path in ("vgpu", "shim/src/a.c", "uv.lock", "deploy/images/Dockerfile", "examples/workload/gpuview.py"):
        assert not is_ignored(path, left_out), path


def test_an_image_is_built_again_when_what_it_uses_changes_and_only_then(tmp_path: Path) -> None:
    files = ["examples/workload/a.py", "shim/src/a.c", "vgpu/a.py", "deploy/images/Dockerfile"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")

    def keys() -> list[str]:
        images = (replace(image, root=tmp_path) for image in (WORKLOAD, FAKE_DRIVER, TANGRAM))
        return [image_key(image, "base", files) for image in images]

    before = keys()
    for file, changed in zip(files, ([1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 1, 1]), strict=True):
        (tmp_path / file).write_text("2")
        assert [now != then for now, then in zip(keys(), before, strict=True)] == list(map(bool, changed)), file
        (tmp_path / file).write_text("1")
    assert keys() == before


def test_the_context_has_the_packages_of_the_product() -> None:
    files = set(context_files())
    assert {"pyproject.toml", "uv.lock", "vgpu/__init__.py", "deploy/images/Dockerfile"} <= files
    assert not [path for path in files if path.startswith((".git/", ".venv/", "tests/"))]


DOCKER = """#!/bin/sh
echo "$@" >> {folder}/calls
case $1 in
build) cat > {folder}/context.tar ;;
save) [ ! -e {folder}/refuses ] || {{ echo no space left >&2; exit 1; }}; echo saved > $3 ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a docker command leaves its arguments."""
    (tmp_path / "docker").write_text(DOCKER.format(folder=tmp_path))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_docker_gets_the_files_that_the_key_covers_in_a_tar_that_each_of_its_builders_takes(docker: Path) -> None:
    Docker().build(WORKLOAD, docker / "workload.tar")
    build, save = (docker / "calls").read_text().splitlines()
    assert build.split()[-2:] == ["localhost/tangram-workload:dev", "-"]
    assert build.split()[-5:-2] == ["workload", f"--build-arg=COMMIT={commit_of(ROOT)}", "--tag"]
    assert save.split()[-1] == "localhost/tangram-workload:dev"
    assert (docker / "workload.tar").read_text() == "saved\n"
    with tarfile.open(docker / "context.tar") as context:
        members = context.getmembers()
    assert [member.name for member in members] == list(context_files())
    assert {(member.uid, member.gid) for member in members} == {(0, 0)}
    first = (docker / "context.tar").read_bytes()[:512]
    assert tarfile.TarInfo.frombuf(first, "utf-8", "strict").type == tarfile.REGTYPE, (
        "the older builder looks at no more"
    )


def test_the_output_of_docker_is_in_the_error(docker: Path) -> None:
    (docker / "refuses").touch()
    with pytest.raises(RuntimeError, match=r"docker save --output .*: ended with 1\nno space left"):
        Docker().build(WORKLOAD, docker / "workload.tar")


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_an_image_carries_the_commit_and_whether_the_tree_was_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-q", "-m", "a")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_a_tree_without_git_has_an_unknown_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"


def test_buildah_gets_the_commit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "buildah").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "buildah").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    Buildah(tmp_path / "cache").build(TANGRAM, tmp_path / "tangram.tar")
    (build,) = [line for line in (tmp_path / "calls").read_text().splitlines() if " build " in line]
    assert f"--build-arg=COMMIT={commit_of(ROOT)}" in build.split()


def test_every_build_command_of_the_docs_passes_the_commit() -> None:
    for page in (ROOT / "README.md", ROOT / "docs/tasks/install.md", DOCKERFILE):
        builds = [line for line in page.read_text().splitlines() if "docker build" in line]
        assert builds, page
        assert all("--build-arg COMMIT=$(git rev-parse HEAD)" in line for line in builds), page


def test_the_previous_release_is_built_from_its_own_sources_under_a_name_of_its_own(docker: Path) -> None:
    image = previous_image()
    Docker().build(image, docker / "previous.tar")
    build = (docker / "calls").read_text().splitlines()[0].split()
    assert build[-4:-1] == [f"--build-arg=COMMIT={previous.commit()}", "--tag", image.name]
    assert image.name != TANGRAM.name
    with tarfile.open(docker / "context.tar") as context:
        inside = context.extractfile("uv.lock")
        assert inside is not None
        assert inside.read() == (image.root / "uv.lock").read_bytes()
    assert image.root != ROOT
