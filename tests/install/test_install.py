"""The extension's build: it may fail in every way a machine can make it fail, and the installation still succeeds."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("pybind11")


@pytest.fixture
def tree(tmp_path):
    """A copy of what the build reads, so that the tests never touch the real tree's module."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "d3s_megatron/ops").mkdir(parents=True)
    (tmp_path / "d3s_megatron/__init__.py").touch()
    for name in ("__init__.py", "__main__.py", "extension.py"):
        shutil.copy(ROOT / "d3s_megatron/ops" / name, tmp_path / "d3s_megatron/ops")
    return tmp_path


def tools(folder, *names):
    """A PATH with these programs of this machine and no others."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not on this machine")
        (folder / name).symlink_to(found)
    return str(folder)


def build(tree, **env):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "lib", "--build-temp", "temp"]
    result = subprocess.run(
        command, cwd=tree, env={**os.environ, **env}, capture_output=True, text=True, timeout=1200, check=False
    )
    assert result.returncode == 0, result.stderr
    package = tree / "lib/d3s_megatron"
    note = package / "_ext_build.txt"
    return list(package.glob("_ext.*.so")), note.read_text() if note.exists() else None, result.stderr


def test_no_compiler(tree):
    path = tools(tree / "bin", "cmake", "ninja")
    modules, note, said = build(tree, PATH=path, D3S_CUDA="0", CXX="", CC="")
    assert modules == []
    assert note.startswith("extension off: no C++ compiler was found") and note.count("\n") == 1
    assert f"d3s_megatron: {note}" in said


def test_broken_compiler(tree):
    broken = tree / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'broken: error: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    modules, note, _ = build(tree, CXX=str(broken), D3S_CUDA="0")
    assert modules == [] and note.startswith("extension off: the C++ compiler cannot compile a simple program")


def test_no_cmake(tree):
    (tree / "empty").mkdir()
    modules, note, _ = build(tree, PATH=str(tree / "empty"))
    assert modules == [] and note.startswith("extension off: cmake is missing")


def test_source_that_does_not_compile(tree):
    source = tree / "csrc/bindings.cpp"
    source.write_text("#error a compiler too old\n" + source.read_text())
    modules, note, _ = build(tree, D3S_CUDA="0", CXXFLAGS="-Wfatal-errors", CMAKE_BUILD_TYPE="Debug")
    assert modules == [] and "a compiler too old" in note


def test_without_nvcc_and_with_another_torch(tree):
    """A C++-only build; its module then runs with no torch in the process at all, so no torch version can break it."""
    path = tools(tree / "bin", "cmake", "ninja", "c++", "g++", "gcc", "cc", "as", "ld", "ar", "ranlib", "uname")
    modules, note, _ = build(tree, PATH=path, CUDACXX="", CUDA_PATH="", CUDA_HOME="", CMAKE_BUILD_TYPE="Debug")
    assert len(modules) == 1 and note is None
    script = """
import sys
import _ext

class Tensor:  # what another torch might be: the attributes are all that the module asks for
    layout, device, dtype = "torch.strided", "cpu", "torch.float64"
    def __init__(self, buffer, dtype):
        self.buffer, self.dtype, self.shape = buffer, dtype, (len(buffer),)
    def stride(self): return (1,)
    def is_neg(self): return False
    def data_ptr(self): return self.buffer.buffer_info()[0]

from array import array
values, key = Tensor(array("d", [1, 1, 1, 0, 0, 0, 0, 0]), "torch.float64"), Tensor(array("q", range(8)), "torch.int64")
mask = Tensor(array("b", [9] * 8), "torch.bool")
_ext.max_variance_subset(values, 4, key, None, mask)
assert mask.buffer.tolist() == [1, 1, 0, 0, 0, 0, 1, 1], mask.buffer
assert "torch" not in sys.modules and _ext.state()["CUDA"] == "not built: no working nvcc was found"
"""
    env = {**os.environ, "PYTHONPATH": str(modules[0].parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, timeout=1200)
    if shutil.which("readelf"):
        needed = subprocess.run(["readelf", "-d", str(modules[0])], capture_output=True, text=True, check=True).stdout
        assert "torch" not in needed and "libstdc++" not in needed and "gomp" not in needed


IN_PLACE = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
EDITABLE = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_editable('wheels')"]  # as pip


@pytest.mark.parametrize("command", [IN_PLACE, EDITABLE], ids=["in place", "editable"])
def test_a_failed_build_leaves_no_older_module(tree, command):
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "empty").mkdir()
    older = tree / f"d3s_megatron/_ext{sysconfig.get_config_var('EXT_SUFFIX')}"
    older.write_bytes(b"a module of other sources")
    subprocess.run(command, cwd=tree, env={**os.environ, "PATH": str(tree / "empty")}, check=True, timeout=1200)
    assert not older.exists()
    assert (tree / "d3s_megatron/_ext_build.txt").read_text().startswith("extension off: cmake is missing")


def run_state(folder):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    script = (  # without the finder of an editable installation, which knows the real tree's module
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        "import d3s_megatron.ops.extension as e; print(e.why_missing())"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=folder, check=True
    )


def test_the_note_is_what_the_state_says(tree):
    (tree / "d3s_megatron/ops/__init__.py").write_text("")
    (tree / "d3s_megatron/_ext_build.txt").write_text("extension off: no C++ compiler was found\n")
    assert run_state(tree).stdout.strip() == "extension off: no C++ compiler was found"
    (tree / "d3s_megatron/_ext_build.txt").unlink()
    assert run_state(tree).stdout.strip() == "it was never built"
    (tree / "d3s_megatron/_ext.py").write_text("INTERFACE = 0\n")
    assert "built from other sources (interface 0" in run_state(tree).stdout
    (tree / "d3s_megatron/_ext.py").write_text("raise ImportError('undefined symbol: _ZN2at')\n")
    assert "undefined symbol" in run_state(tree).stdout
