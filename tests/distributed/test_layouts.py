"""The layout changes nothing: kept ids, kept tokens, loss, grad norm, gradients, updated weights; real processes."""

import pytest
import torch
from builders import tiny_model
from ranks import run_ranks
from safetensors.torch import load_file

from d3s_megatron.doctor.compare import beyond, compare, relative
from d3s_megatron.doctor.parity import run_jobs
from d3s_megatron.doctor.update import Job

TP2, PP2, CP2 = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)
SP, SPLIT_OPTIMIZER, OVERLAP = (
    {"sequence_parallel": True},
    {"use_distributed_optimizer": True},
    {"overlap_grad_reduce": True},
)
VPP2, SMALL, BF16 = (
    {"virtual_pipeline_model_parallel_size": 2},
    {"max_tokens_per_microbatch": 24},
    {"dtype": "bfloat16"},
)
LAYOUTS = {  # name: (processes, actor settings); what TP, PP and CP leave over is data parallel
    "one": (1, {}),
    "one-small": (1, SMALL),
    "one-recompute": (1, {"recompute": "full"}),
    "one-masking": (
        1,
        {"gather_rows": False, "truncate_samples": False, "select_before_scoring": False, "share_prompts": False},
    ),
    "tp2": (2, TP2),
    "tp2-sp": (2, TP2 | SP),
    "tp2-sp-recompute": (2, TP2 | SP | {"recompute": "selective"}),
    "pp2": (2, PP2),
    "pp2-uneven-recompute": (2, PP2 | {"num_layers_in_first_pipeline_stage": 1, "recompute": "selective"}),
    "pp2-vpp2-small": (2, PP2 | VPP2 | SMALL),
    "dp2": (2, {}),
    "dp2-overlap-small": (2, OVERLAP | SMALL | {"select_before_scoring": False}),
    "dp2-split-optimizer": (2, SPLIT_OPTIMIZER),
    "tp2-pp2": (4, TP2 | PP2),
    "tp2-pp2-sp-small": (4, TP2 | PP2 | SP | SMALL),
    "tp2-pp2-vpp2-recompute": (4, TP2 | PP2 | VPP2 | {"recompute": "full"}),
    "pp2-dp2-split-optimizer-overlap": (4, PP2 | SPLIT_OPTIMIZER | OVERLAP),
    "tp2-sp-dp2-split-optimizer": (4, TP2 | SP | SPLIT_OPTIMIZER),
    "cp2-small": (2, CP2 | SMALL),  # chunks of samples shorter than 4 tokens hold padding alone
    "cp2-split-optimizer-recompute": (2, CP2 | SPLIT_OPTIMIZER | OVERLAP | {"recompute": "selective"}),
    "tp2-cp2-sp-small": (4, TP2 | CP2 | SP | SMALL),
    "cp2-pp2-vpp2": (4, CP2 | PP2 | VPP2),
}
MODELS = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
}
SOME = ("one", "one-small", "tp2-sp", "pp2-vpp2-small", "dp2", "tp2-pp2-sp-small", "cp2-small")
RUNS = {  # name: (model, algorithm settings, layouts)
    "qwen2-tied/d3s": ("qwen2-tied", {}, tuple(LAYOUTS)),
    "llama-untied/d3s": ("llama-untied", {}, SOME),
    "qwen2-tied/gspo+d3s": ("qwen2-tied", {"name": "gspo+d3s"}, SOME),
    **{
        f"qwen2-tied/{kind}": ("qwen2-tied", {"loss_normalization": kind}, ("one", "one-small", "dp2"))
        for kind in ("seq_mean_selected", "seq_mean_full", "dr_grpo")
    },
}
CASES = [(run, layout) for run, (_, _, layouts) in RUNS.items() for layout in layouts if layout != "one"]
BF16_LAYOUTS = {"one": (1, BF16), "tp2-sp": (2, TP2 | SP | BF16), "pp2-vpp2": (2, PP2 | VPP2 | BF16)}
BF16_LAYOUTS["cp2"] = (2, CP2 | BF16)


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """Two optimizer steps per run and layout, and the models before; all layouts of a size share their processes."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {
        name: tiny_model(folder / name, family, num_hidden_layers=4, **rest) for name, (family, rest) in MODELS.items()
    }
    jobs = {}

    def add(name: str, model: str, num_processes: int, actor: dict, algorithm: dict) -> None:
        out = str(folder / f"{len(jobs)}.pt")
        # AdamW makes a step of lr out of any gradient; a large eps keeps rounding noise as small as it is.
        optimizer = {"clip_grad": 1.0, "eps": 1e-3}
        jobs[name] = (num_processes, Job(str(models[model]), out, actor, algorithm, optimizer))

    for run, (model, algorithm, layouts) in RUNS.items():
        for layout in layouts:
            add(f"{run}/{layout}", model, *LAYOUTS[layout], {"kl_beta": 0.05, "num_minibatches": 2} | algorithm)
    for layout, (num_processes, actor) in BF16_LAYOUTS.items():
        add(f"bf16/{layout}", "qwen2-tied", num_processes, actor, {"name": "d1s-c"})
    add("bf16/float32", "qwen2-tied", 1, {}, {"name": "d1s-c"})
    before = {name: load_file(path / "model.safetensors") for name, path in models.items()}
    return run_jobs(jobs, folder, run_ranks), before


@pytest.mark.parametrize(("run", "layout"), CASES)
def test_a_layout_makes_the_update_of_a_single_process(run, layout, updates):
    got, want = updates[0][f"{run}/{layout}"], updates[0][f"{run}/one"]
    assert got["spread"] == 0  # copies of a weight on several ranks, the tied embedding's too, bit for bit (fault E10)
    got.setdefault("gradients", want["gradients"])  # with a split optimizer no rank has whole ones
    assert beyond(compare(got, want), 1e-4) == []
    assert relative(got["loss"], want["loss"]) < 1e-4  # the metrics too
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        assert relative(got["weights"][name], weight) < 1e-4, name


@pytest.mark.parametrize("layout", ["cp2-small", "tp2-cp2-sp-small", "cp2-pp2-vpp2"])
def test_context_parallel_ranks_have_the_gradient_of_plain_masking(layout, updates):
    got, want = (updates[0][f"qwen2-tied/d3s/{name}"] for name in (layout, "one-masking"))
    norm = float(want["grad_norm"][-1])
    for name, grad in want["gradients"].items():
        assert grad.norm() > 0
        assert (got["gradients"][name] - grad).norm() <= 1e-5 * max(grad.norm(), 1e-2 * norm), name


@pytest.mark.parametrize("run", RUNS)
def test_the_update_moves_every_weight(run, updates):
    """Guards the test above: weights that stand still would agree on every layout."""
    results, before = updates
    want = results[f"{run}/one"]
    assert 0 < int((want["kept_tokens"] == 2).sum()) < int((want["kept_tokens"] == 1).sum())
    for name, weight in want["weights"].items():
        assert not torch.equal(weight, before[RUNS[run][0]][name]), name


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_an_update_in_bfloat16_is_that_of_float32_to_its_precision(layout, updates):
    """Weights and activations have 8 bits; gradients and main weights are float32, so nothing worse comes of it."""
    got, want = updates[0][f"bf16/{layout}"], updates[0]["bf16/float32"]
    assert torch.equal(got["kept_ids"], want["kept_ids"]) and torch.equal(got["kept_tokens"], want["kept_tokens"])
    off = (got["log_probs"] - want["log_probs"]).abs()
    assert off.max() < 0.3 and off.mean() < 0.03
    assert relative(got["grad_norm"], want["grad_norm"]) < 0.05
    assert got["spread"] == 0
    assert all(weight.dtype == torch.bfloat16 for weight in got["weights"].values())
    for name, grad in got.get("gradients", {}).items():
        assert grad.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(grad.flatten(), want["gradients"][name].flatten(), 0)
        assert cosine > 0.98, name
