"""The C++ core under AddressSanitizer with UBSan, under ThreadSanitizer, and compiled for AArch64."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc/kernels"
INCLUDE = [f"-I{ROOT}/csrc/include", f"-I{KERNELS}"]
COMMON = ["-std=gnu++17", "-Wno-psabi", "-ffp-contract=off", *INCLUDE]
X86 = platform.machine() in ("x86_64", "AMD64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
FLAGS = {"isa_avx2": AVX2, "isa_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mbmi2", *AVX2]}


def build_and_run(folder, flags, *arguments):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not on this machine")
    objects = []
    names = ["dispatch", "isa_base", *(FLAGS if X86 else ())]
    defines = ["-DD3S_X86_KERNELS"] if X86 else []
    for source in [ROOT / "tests/cpp/core_test.cpp", *(KERNELS / f"{name}.cpp" for name in names)]:
        out = folder / f"{source.stem}.o"
        command = [compiler, *COMMON, *defines, *flags, *FLAGS.get(source.stem, []), "-c", str(source), "-o", str(out)]
        subprocess.run(command, check=True, timeout=1200)
        objects.append(str(out))
    program = folder / "core_test"
    linked = subprocess.run(
        [compiler, *flags, *objects, "-o", str(program), "-lpthread"], capture_output=True, text=True
    )
    if linked.returncode and "cannot find" in linked.stderr:
        pytest.skip(f"this compiler has no runtime for {flags[0]}")
    assert linked.returncode == 0, linked.stderr
    # Where addresses are drawn from a wide range, a sanitizer's shadow memory meets them now and then.
    fixed = [shutil.which("setarch"), platform.machine(), "-R"] if shutil.which("setarch") else []
    ran = subprocess.run([*fixed, str(program), *arguments], capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0 and "all agree" in ran.stdout, (ran.stdout + ran.stderr)[-4000:]


def test_addresses_and_undefined_behaviour(tmp_path):
    build_and_run(tmp_path, ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1"])


def test_threads(tmp_path):
    build_and_run(tmp_path, ["-fsanitize=thread", "-O1", "-g1"], "threads")


def test_aarch64_compiles(tmp_path):
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no AArch64 compiler (aarch64-linux-gnu-g++) on this machine")
    for name in ("dispatch", "isa_base"):
        out = str(tmp_path / f"{name}.o")
        subprocess.run([compiler, *COMMON, "-O2", "-c", str(KERNELS / f"{name}.cpp"), "-o", out], check=True)
