"""C programs, compiled against NVIDIA's cuda.h and linked with the fake libcuda, run as on a real driver."""

from __future__ import annotations

import os
import subprocess

import pytest


def run(program, driver, *words) -> None:
    done = subprocess.run([program, *words], env=driver.env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"


@pytest.mark.parametrize("path", ["plain", "vmm", "pools", "arrays", "graphs", "graph_time", "handles"])
def test_every_way_to_memory_is_counted(path, program, fake_driver):
    run(program("paths"), fake_driver("gpu h200 memory_mib=1000 context_mib=0"), path)


def test_functions_are_found_linked_by_dlsym_and_by_version(program, fake_driver):
    run(program("lookup"), fake_driver())


CONTAINER = """
mount --bind {root}/run /run
mkdir -p {dev}
mount -t tmpfs none {dev} && mknod {dev}/null c 1 3 && mkdir {dev}/shm {dev}/nvidia-caps
for node in {nodes}; do mknod {dev}/$node c 195 0; done
mount --bind {dev} /dev
LD_LIBRARY_PATH={root}/lib {root}/bin/nvidia-smi -L
"""


@pytest.mark.parametrize(
    ("nodes", "seen"),
    [
        ([], []),
        (["nvidia1"], ["GPU 0: NVIDIA A10"]),
        (["nvidia0", "nvidia2"], ["GPU 0: NVIDIA H200", "GPU 1: NVIDIA A100-SXM4-40GB"]),
        # Instance 1g.5gb of GPU 2 is GPU instance 13: capabilities 3 + 135 * 2 + 9 * 13 = 390 and 391.
        (["nvidia2", "nvidia-caps/nvidia-cap390"], ["GPU 0: NVIDIA A100-SXM4-40GB"]),
        (
            ["nvidia2", "nvidia-caps/nvidia-cap390", "nvidia-caps/nvidia-cap391"],
            ["GPU 0: NVIDIA A100-SXM4-40GB", "MIG 1g.5gb      Device  0:"],
        ),
    ],
)
def test_a_container_sees_the_gpus_whose_device_nodes_it_has(nodes, seen, fake_driver, tmp_path):
    """The driver root of install.sh, and /dev as a container runtime would fill it, in a mount namespace."""
    driver = fake_driver("gpu h200\ngpu a10\ngpu a100-40\nmig 2 1g.5gb 2g.10gb")
    root = install(driver, tmp_path, gpus=3)
    (root / "run" / "nvidia-persistenced" / "socket").symlink_to(driver.socket)
    script = CONTAINER.format(root=root, dev=tmp_path / "dev", nodes=" ".join(nodes))
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["unshare", "-m", "sh", "-ec", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(" (UUID")[0].strip() for line in done.stdout.splitlines()] == seen


def install(driver, folder, gpus: int):
    script = driver.libraries.parents[2] / "shim" / "fake" / "install.sh"
    root = folder / "root"
    subprocess.run([script, driver.libraries, root, str(gpus), "390", "391"], check=True, capture_output=True)
    return root


def test_the_driver_root_is_laid_out_as_a_real_one(fake_driver, tmp_path):
    driver = fake_driver()
    root = install(driver, tmp_path, gpus=2)
    install(driver, tmp_path, gpus=2)
    for name in ("libcuda", "libnvidia-ml"):
        assert (root / "lib" / f"{name}.so.1").resolve().name == f"{name}.so.580.65.06"
        assert (root / "lib" / f"{name}.so").resolve().is_file()
    nodes = {path.relative_to(root / "dev").as_posix() for path in (root / "dev").rglob("nvidia*")}
    assert nodes >= {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps/nvidia-cap390"}
    assert "nvidia2" not in nodes
    assert os.access(root / "bin" / "nvidia-smi", os.X_OK)
    assert os.major((root / "dev" / "nvidia0").stat().st_rdev) == 195
