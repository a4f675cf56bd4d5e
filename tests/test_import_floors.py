"""Who may import whom: imports go down only, rooms side by side do not know each other, heavy imports have one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "d3s_megatron"
TOP = 5  # the only floor whose parts may import one another: it wires

FLOORS = {
    "types": 0,
    "ragged": 0,
    "ops": 1,
    "algorithms": 2,
    "convert": 2,
    "data": 3,
    "rollout": 3,
    "rewards": 3,
    "actor": 3,
    "weight_sync": 4,
    **dict.fromkeys(
        (
            "config",
            "build",
            "stages",
            "learner",
            "train",
            "evaluate",
            "report",
            "doctor",
            "checkpointing",
            "resume",
            "audit",
            "replay",
            "stopping",
            "plan",
            "probe",
            "ablate",
            "launch",
            "watch",
            "ahead",
            "sync_probe",
        ),
        TOP,
    ),
}

# What floors 0 to 2 may import beside the standard library and the floors below.
LIBRARIES = {
    "types": {"torch"},
    "ragged": {"torch"},
    "ops": {"torch", "numpy"},
    "algorithms": {"torch"},
    "convert": {"torch", "numpy", "safetensors", "psutil"},
}

# Module -> the files that may import it, as prefixes of their path in the package.
DOORS = {
    "megatron": ("actor/",),
    "vllm": ("rollout/vllm",),
    f"{PACKAGE}._ext": ("ops/extension.py",),
}


def imports(source: str, module: str) -> set[str]:
    """Full names of what a module imports, anywhere in its code, import_module("...") and type checking included.

    `from a import b` counts as a and a.b, since b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return found


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def complaints(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one file; its path counts from the package folder."""
    parts = path.removesuffix(".py").split("/")
    part = parts[0]
    if part == "__init__":
        return [f"{path} imports {name}" for name in imports(source, f"{PACKAGE}.__init__") if PACKAGE in name]
    if part not in FLOORS:
        return [f"{path}: give {part!r} a floor in tests/test_import_floors.py"]
    names = imports(source, ".".join([PACKAGE, *parts]))
    bad = []
    for name in sorted(names):
        if is_within(name, PACKAGE):
            target = name.removeprefix(PACKAGE).lstrip(".").split(".")[0]
            if target in FLOORS and target != part and FLOORS[target] >= FLOORS[part] and FLOORS[part] != TOP:
                bad.append(f"{path} (floor {FLOORS[part]}) imports {name} (floor {FLOORS[target]})")
        elif part in LIBRARIES and name.split(".")[0] not in LIBRARIES[part] | sys.stdlib_module_names:
            bad.append(f"{path} imports {name}: {part} uses {', '.join(sorted(LIBRARIES[part]))} only")
        for module, doors in DOORS.items():
            if is_within(name, module) and not path.startswith(doors):
                bad.append(f"{path} imports {name}, which is for {', '.join(doors)} only")
    if part == "algorithms" and "torch.distributed" in source:
        bad.append(f"{path} speaks of torch.distributed: it is given its reductions")
    return bad


FILES = sorted(p.relative_to(ROOT / PACKAGE).as_posix() for p in (ROOT / PACKAGE).rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_imports_go_down(path):
    assert complaints(path, (ROOT / PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("ops/x.py", "from d3s_megatron.algorithms import recipes"),
        ("ops/x.py", "from d3s_megatron import convert"),
        ("algorithms/x.py", "from d3s_megatron.convert.shape import ModelShape"),
        ("algorithms/x.py", "from ..rollout import engine"),
        ("algorithms/x.py", "import torch.distributed as dist"),
        ("algorithms/x.py", "def f():\n    import transformers"),
        ("convert/deep/x.py", "from ...actor import model"),
        ("data/x.py", "import d3s_megatron.rollout"),
        ("rewards/x.py", "from d3s_megatron.evaluate import pass_at_k"),
        ("rollout/x.py", "from d3s_megatron.weight_sync import bridge"),
        ("rollout/x.py", "import vllm"),
        ("weight_sync/x.py", "from megatron.core import parallel_state"),
        ("train.py", "import megatron.core"),
        ("ops/x.py", "from d3s_megatron import _ext"),
        ("ops/x.py", 'importlib.import_module("d3s_megatron._ext")'),
        ("cellar/x.py", ""),
    ],
)
def test_a_wrong_import_is_found(path, line):
    assert complaints(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("algorithms/x.py", "from d3s_megatron import ops\nfrom d3s_megatron.types import Sample\nimport math"),
        ("algorithms/x.py", "from .schedules import Amounts"),
        ("actor/x.py", "from megatron.core import parallel_state\nfrom d3s_megatron.convert import read_shape"),
        ("rollout/vllm_engine.py", "import vllm"),
        ("ops/extension.py", 'importlib.import_module("d3s_megatron._ext")'),
        ("stages.py", "from d3s_megatron.evaluate import rank_share\nfrom d3s_megatron.actor import model"),
    ],
)
def test_a_right_import_passes(path, line):
    assert complaints(path, line) == []


def modules_up_to(floor: int) -> list[str]:
    parts = [path.removesuffix(".py").removesuffix("/__init__") for path in FILES]
    names = [part.replace("/", ".") for part in parts if FLOORS.get(part.split("/")[0], TOP) <= floor]
    return [f"{PACKAGE}.{name}" for name in names if not name.endswith("__main__")]


PROBE = """
import importlib, sys
import torch, torch.distributed.checkpoint  # beyond torch: its lazy parts are its own
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_the_lower_floors_import_nothing_heavy():
    """Every module of floors 0 to 2, after torch: a fraction of a second, as long as none of these comes with it."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules_up_to(2)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "d3s_megatron" in loaded
    assert not {"megatron", "transformers", "vllm", "jsonargparse", "pyarrow", "matplotlib", "tensorboard"} & loaded
