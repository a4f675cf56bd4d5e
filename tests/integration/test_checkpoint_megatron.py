"""megatron-core loads what we write and we read what it writes, in real processes at several layouts."""

import json

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from unit.convert.builders import tiny_config, write_folder

from d3s_megatron.convert.checkpoint import compare, describe, job, jobs

MODELS = {  # family, changes, layouts (TP, PP)
    "tied-bias": ("qwen2", {"tie_word_embeddings": True}, [(1, 1), (2, 1), (2, 2)]),
    "untied-norms": ("qwen3", {}, [(1, 2)]),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}, [(2, 1)]),  # fewer KV heads than ranks
}
CASES = [(name, tp, pp) for name, (_, _, layouts) in MODELS.items() for tp, pp in layouts]


def random_folder(folder, family, changes):
    config = tiny_config(family, num_hidden_layers=4, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def expected_log_probs(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)
    return scores[2:6].gather(-1, ids[0, 3:7, None])[:, 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every model imported for one layout, loaded and saved again at every other; {(model, tp, pp): job}."""
    root = tmp_path_factory.mktemp("megatron")
    for name, (family, changes, _) in MODELS.items():
        source = random_folder(root / name, family, changes)
        job.run(jobs.import_job(source, root / f"{name}-imported", tp=2, pp=2))
    found = {}
    for processes in (1, 2, 4):
        todo = []
        for name, tp, pp in CASES:
            if tp * pp == processes:
                label = f"{name}-tp{tp}-pp{pp}"
                todo.append(
                    {
                        "hf": str(root / name),
                        "actor": {
                            "tensor_model_parallel_size": tp,
                            "pipeline_model_parallel_size": pp,
                            "use_distributed_optimizer": pp > 1,
                        },
                        "load": str(root / f"{name}-imported"),
                        "save": str(root / f"{label}-saved"),
                        "weights": str(root / f"{label}.safetensors"),
                        "scores": str(root / f"{label}.pt"),
                    }
                )
                found[name, tp, pp] = todo[-1]
        if processes == 1:  # the other spelling of the keys, with the layers one by one
            todo.append(
                todo[0] | {"load": None, "save": str(root / "apart"), "metadata": {"singleton_local_shards": True}}
            )
        (root / f"jobs{processes}.json").write_text(json.dumps(todo))
        done = run_ranks(["tests/integration/checkpoint_worker.py", root / f"jobs{processes}.json"], processes)
        assert done.returncode == 0, done.stderr[-3000:]
    return found, root


@pytest.mark.parametrize("case", CASES, ids=str)
def test_imported_checkpoint_loads_at_any_layout(runs, case):
    run = runs[0][case]
    loaded, source = load_file(run["weights"]), load_file(f"{run['hf']}/model.safetensors")
    assert loaded.keys() == source.keys() and all(torch.equal(loaded[name], source[name]) for name in source)
    torch.testing.assert_close(torch.load(run["scores"]), expected_log_probs(run["hf"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_checkpoint_exports(runs, case, tmp_path):
    run = runs[0][case]
    job.run(jobs.export_job(run["save"], tmp_path / "back", companions=run["hf"]))
    ours, theirs = (compare.digests(*jobs.blocks_of(folder)) for folder in (run["hf"], tmp_path / "back"))
    assert compare.differences(ours, theirs) == []
    text = describe.inspect(run["save"], companions=run["hf"])
    assert "step 7, model and optimizer" in text and f"{case[1]} tensor-parallel" in text


def test_layers_saved_one_by_one_are_read_too(runs):
    found, root = runs
    source = found["tied-bias", 1, 1]["hf"]
    shape, blocks = jobs.blocks_of(root / "apart", companions=source)
    assert compare.differences(compare.digests(*jobs.blocks_of(source)), compare.digests(shape, blocks)) == []


def test_logits_tell_right_from_wrong(runs, tmp_path):
    found, root = runs
    source = found["tied-bias", 1, 1]["hf"]
    done = run_ranks(["tools/checkpoint.py", "verify", source, root / "tied-bias-imported", "--logits"])
    assert done.returncode == 0 and "within 0.0001" in done.stdout, done.stderr[-2000:]
    state = load_file(f"{source}/model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] *= -1
    config = json.loads((root / "tied-bias" / "config.json").read_text())
    other = write_folder(tmp_path / "other", config, state)
    done = run_ranks(["tools/checkpoint.py", "verify", other, root / "tied-bias-imported", "--logits"])
    assert done.returncode == 1 and "beyond 0.0001" in done.stdout
    assert "model.layers.0.mlp.up_proj.weight: values differ" in done.stdout
