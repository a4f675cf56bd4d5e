"""Builds the optional extension with CMake and Ninja; everything else about the package is in pyproject.toml.

The build never fails an installation: without a compiler, or with a broken one, the package installs with the torch
references, one line says what is off and how to get it, and `python -m d3s_megatron.ops` says it again later.
D3S_CUDA=auto (default: CUDA kernels where nvcc works), 1 (fail over to C++ only, loudly, where it does not), 0 (never).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NOTE = "_ext_build.txt"  # beside the package's modules; read by d3s_megatron/ops/extension.py


def interface() -> str:
    source = (ROOT / "d3s_megatron/ops/extension.py").read_text()
    return re.search(r"^INTERFACE = (\d+)", source, re.M).group(1)


def run(command: list[str], log: Path) -> None:
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        subprocess.run(command, check=True, stdout=out, stderr=subprocess.STDOUT)


def reason(error: Exception, log: Path) -> str:
    """One line that says what went wrong, from the log of CMake and the compiler."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is missing"
    text = log.read_text(errors="replace") if log.exists() else ""
    if "No CMAKE_CXX_COMPILER could be found" in text or "is not a full path to an existing compiler" in text:
        return "no C++ compiler was found"
    if "is not able to compile a simple test program" in text:
        return "the C++ compiler cannot compile a simple program"
    lines = [line.strip() for line in text.splitlines() if re.search(r"\berror\b", line, re.I)]
    return lines[0][:200] if lines else f"{type(error).__name__}: {error}"


class CMakeBuild(build_ext):
    """Runs CMake; a failure leaves a note in place of the module."""

    def run(self) -> None:
        self.for_this_tree = bool(self.inplace or self.editable_mode)  # setuptools turns `inplace` off while it builds
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        note = target.parent / NOTE
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in (note, target, *([ROOT / "d3s_megatron" / NOTE] if self.for_this_tree else [])):
            old.unlink(missing_ok=True)
        work = Path(self.build_temp).resolve() / "ext"
        shutil.rmtree(work, ignore_errors=True)  # a cache of another compiler or another pip's CMake is worse than none
        work.mkdir(parents=True)
        log = work / "build.log"
        cuda = os.environ.get("D3S_CUDA", "auto")
        attempts = [cuda] if cuda == "0" else [cuda, "0"]  # a CUDA kit that does not work must not cost the CPU kernels
        problem = None
        for attempt in attempts:
            try:
                self.cmake(work, target, attempt, log, problem[1] if problem else "")
                break
            except (subprocess.CalledProcessError, OSError, ImportError) as error:
                problem = problem or (attempt, reason(error, log))
                target.unlink(missing_ok=True)
        if target.exists() and (problem is None or cuda == "auto"):
            return
        what = "CUDA kernels" if target.exists() else "extension"
        line = f"{what} off: {problem[1]} (full log: {log})"
        print(f"d3s_megatron: {line}", file=sys.stderr)
        note.write_text(line + "\n")
        if self.for_this_tree:
            (ROOT / "d3s_megatron" / NOTE).write_text(line + "\n")
            if not target.exists():  # an earlier build's module must not pass for this one's
                (ROOT / "d3s_megatron" / target.name).unlink(missing_ok=True)

    def cmake(self, work: Path, target: Path, cuda: str, log: Path, cuda_problem: str) -> None:
        import pybind11

        build = work / f"cuda-{cuda}"
        cuda_problem = re.sub(r"[^ \w.,:=+-]", " ", cuda_problem)  # it ends up inside a C++ string
        config = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build}/out",
            f"-DD3S_INTERFACE={interface()}",
            f"-DD3S_CUDA={cuda}",
            f"-DD3S_CUDA_PROBLEM={cuda_problem}",
        ]
        run(["cmake", "-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja", *config], log)
        run(["cmake", "--build", str(build)], log)
        (built,) = (build / "out").glob("_ext*")
        shutil.copyfile(built, target)


setup(
    ext_modules=[Extension("d3s_megatron._ext", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
    package_data={"d3s_megatron": [NOTE], "d3s_megatron.report.page": ["*.html", "*.css", "*.js"]},
)
