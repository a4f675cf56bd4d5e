"""The layout changes nothing: kept ids, kept tokens, loss, grad norm and updated weights, with real processes."""

import json

import pytest
import torch
from builders import tiny_model
from helpers import ROOT, run_python
from safetensors.torch import load_file

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, SPLIT_OPTIMIZER = {"sequence_parallel": True}, {"use_distributed_optimizer": True}
LAYOUTS = {  # name: (processes, actor settings); what TP and PP leave over is data parallel
    "one": (1, {}),
    "one-small-microbatches": (1, {"max_tokens_per_microbatch": 16}),
    "tp2": (2, TP2),
    "tp2-sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "dp2": (2, {}),
    "dp2-split-optimizer": (2, SPLIT_OPTIMIZER),
    "tp2-pp2": (4, TP2 | PP2),
    "tp2-pp2-sp-small-microbatches": (4, TP2 | PP2 | SP | {"max_tokens_per_microbatch": 16}),
    "tp2-sp-dp2-split-optimizer": (4, TP2 | SP | SPLIT_OPTIMIZER),
}
MODELS = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
}
RUNS = [(model, "d3s") for model in MODELS] + [("qwen2-tied", "gspo+d3s")]


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """One update per (model, algorithm, layout), and the models before; all layouts of a size share their processes."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {name: tiny_model(folder / name, family, **rest) for name, (family, rest) in MODELS.items()}
    jobs: dict[int, list[dict]] = {}
    for model, algorithm in RUNS:
        for layout, (num_processes, actor) in LAYOUTS.items():
            out = folder / f"{model}.{algorithm}.{layout}.pt"
            job = {"model": str(models[model]), "out": str(out), "algorithm": algorithm, "actor": actor}
            jobs.setdefault(num_processes, []).append(job)
    for num_processes, batch in jobs.items():
        file = folder / f"jobs{num_processes}.json"
        file.write_text(json.dumps(batch))
        done = run_python([ROOT / "tests" / "distributed" / "layout_worker.py", file], num_processes)
        assert done.returncode == 0, done.stderr[-3000:]
    results = {
        (model, algorithm, layout): torch.load(folder / f"{model}.{algorithm}.{layout}.pt")
        for model, algorithm in RUNS
        for layout in LAYOUTS
    }
    return results, {name: load_file(path / "model.safetensors") for name, path in models.items()}


def relative(got, want):
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
@pytest.mark.parametrize(("model", "algorithm"), RUNS)
def test_a_layout_makes_the_update_of_a_single_process(model, algorithm, layout, updates):
    got, want = updates[0][model, algorithm, layout], updates[0][model, algorithm, "one"]
    assert torch.equal(got["kept_ids"], want["kept_ids"])
    assert torch.equal(got["kept_tokens"], want["kept_tokens"])
    assert relative(got["loss"], want["loss"]) < 1e-4
    assert relative(got["grad_norm"], want["grad_norm"]) < 1e-4
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        assert relative(got["weights"][name], weight) < 1e-4, name


@pytest.mark.parametrize(("model", "algorithm"), RUNS)
def test_the_update_moves_every_weight(model, algorithm, updates):
    """Guards the test above: weights that stand still would agree on every layout."""
    results, before = updates
    want = results[model, algorithm, "one"]
    assert 0 < int((want["kept_tokens"] == 2).sum()) < int((want["kept_tokens"] == 1).sum())
    for name, weight in want["weights"].items():
        assert not torch.equal(weight, before[model][name]), name
