"""The layout changes nothing: kept ids, kept tokens, loss, grad norm and updated weights, with real processes."""

import pytest
import torch
from builders import tiny_model
from helpers import ROOT, run_python

WORKER = ROOT / "tests" / "distributed" / "layout_worker.py"
LAYOUTS = {
    "tp2": (2, ["tensor_model_parallel_size=2"]),
    "tp2-sp": (2, ["tensor_model_parallel_size=2", "sequence_parallel=true"]),
    "pp2": (2, ["pipeline_model_parallel_size=2"]),
    "dp2": (2, []),
    "dp2-distributed-optimizer": (2, ["use_distributed_optimizer=true"]),
    "tp2-pp2": (4, ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"]),
    "tp2-dp2-sp": (4, ["tensor_model_parallel_size=2", "sequence_parallel=true", "use_distributed_optimizer=true"]),
    "small-microbatches": (1, ["max_tokens_per_microbatch=16", "max_logits_mb=1"]),
}
MODELS = {"qwen2": {"tie_word_embeddings": True}, "llama": {"tie_word_embeddings": False}}


def one_update(model, out, num_processes, settings, algorithm="d3s"):
    done = run_python([WORKER, model, out, algorithm, *settings], num_processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(scope="module", params=MODELS)
def reference(request, tmp_path_factory):
    """The model folder, and what one process makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(folder / "model", request.param, **MODELS[request.param])
    return model, one_update(model, folder / "one.pt", 1, [])


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def assert_same_update(got, want):
    assert torch.equal(got["kept_ids"], want["kept_ids"])
    assert torch.equal(got["kept_tokens"], want["kept_tokens"])
    assert relative(got["loss"], want["loss"]) < 1e-4
    assert relative(got["grad_norm"], want["grad_norm"]) < 1e-4
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        assert relative(got["weights"][name], weight) < 1e-4, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_makes_the_update_of_a_single_process(layout, reference, tmp_path):
    model, want = reference
    num_processes, settings = LAYOUTS[layout]
    assert_same_update(one_update(model, tmp_path / "got.pt", num_processes, settings), want)


def test_the_update_moves_every_weight(reference):
    """Guards the test above: weights that stand still would agree on every layout."""
    from safetensors.torch import load_file

    model, want = reference
    before = load_file(model / "model.safetensors")
    for name, weight in want["weights"].items():
        assert not torch.equal(weight, before[name]), name


def test_sequence_ratio_is_the_same_under_tp_and_pp(tmp_path):
    model = tiny_model(tmp_path / "model")
    want = one_update(model, tmp_path / "one.pt", 1, [], "gspo+d3s")
    settings = ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"]
    assert_same_update(one_update(model, tmp_path / "got.pt", 4, settings, "gspo+d3s"), want)
