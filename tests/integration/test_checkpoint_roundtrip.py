"""Hugging Face -> torch_dist -> Hugging Face, bit for bit, for every layout and kind of model (faults B01-B14)."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from unit.convert.builders import VARIANTS, counting_state, tiny_config, write_folder

from d3s_megatron.convert import read_shape
from d3s_megatron.convert.checkpoint import compare, describe, job, jobs
from d3s_megatron.convert.hf_folder import INDEX


def source_of(tmp_path, dtype=torch.float32, **changes):
    config = tiny_config(num_hidden_layers=5, torch_dtype=str(dtype).removeprefix("torch."), **changes)
    state = counting_state(read_shape(config), dtype)
    return write_folder(tmp_path / "source", config, state), state


def there_and_back(tmp_path, source, tp=1, pp=1, **options):
    job.run(jobs.import_job(source, tmp_path / "megatron", tp, pp, **options))
    job.run(jobs.export_job(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=4096), workers=2)
    return tmp_path / "back"


def all_tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(folder, state):
    found = all_tensors(folder)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout(tmp_path, dtype, tied, tp, pp):
    # 5 layers are uneven over 2 and 4 stages, 2 KV heads are fewer than 4 ranks, 11 tokens need padding
    source, state = source_of(tmp_path, dtype, tie_word_embeddings=tied)
    back = there_and_back(tmp_path, source, tp, pp, vocab_multiple=4)
    assert_same(back, state)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == tp * pp


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_every_family(tmp_path, family, changes):
    config = tiny_config(family, **changes)
    state = counting_state(read_shape(config))
    source = write_folder(tmp_path / "source", config, state)
    assert_same(there_and_back(tmp_path, source, tp=2, pp=2), state)


def test_virtual_stages(tmp_path):
    source, state = source_of(tmp_path)
    assert_same(there_and_back(tmp_path, source, tp=2, pp=2, vpp=2), state)


def test_exported_folder_is_whole_and_loads(tmp_path):
    source, state = source_of(tmp_path, tie_word_embeddings=True)
    back = there_and_back(tmp_path, source, tp=2)
    index = json.loads((back / INDEX).read_text())
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert sorted(path.name for path in back.iterdir() if path.suffix != ".safetensors") == [
        "config.json",
        INDEX,
        "tokenizer.json",
    ]
    model, report = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_dtype_is_converted_on_request_on_either_way(tmp_path):
    source, state = source_of(tmp_path)
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    job.run(jobs.import_job(source, tmp_path / "half", 2, dtype=torch.bfloat16))
    job.run(jobs.import_job(source, tmp_path / "full", 2))
    job.run(jobs.export_job(tmp_path / "half", tmp_path / "a"))
    job.run(jobs.export_job(tmp_path / "full", tmp_path / "b", dtype=torch.bfloat16))
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert_same(folder, half)
        assert read_shape(folder).dtype == torch.bfloat16


def test_verify_names_the_one_tensor_that_differs(tmp_path):
    source, state = source_of(tmp_path)
    there_and_back(tmp_path, source, tp=2, pp=2)
    name = "model.layers.3.self_attn.v_proj.weight"
    state[name][-1, -1] += 1
    other = write_folder(tmp_path / "other", json.loads((source / "config.json").read_text()), state)
    digests = {
        folder.name: compare.digests(*jobs.blocks_of(folder), workers=2)
        for folder in (source, other, tmp_path / "megatron", tmp_path / "back")
    }
    assert compare.differences(digests["source"], digests["megatron"]) == []
    assert compare.differences(digests["megatron"], digests["back"]) == []
    assert compare.differences(digests["other"], digests["megatron"]) == [f"{name}: values differ"]


def test_inspect_and_plan_say_what_is_there(tmp_path):
    source, state = source_of(tmp_path, tie_word_embeddings=True)
    plan = describe.plan_conversion(source, tmp_path / "megatron", tp=2, pp=2)
    there_and_back(tmp_path, source, tp=2, pp=2)
    written = {path.name: path.stat().st_size for path in (tmp_path / "megatron").glob("*.distcp")}
    assert plan.files == written and plan.read_bytes == sum(tensor.nbytes for tensor in state.values())
    text = describe.inspect(tmp_path / "megatron")
    for words in ("qwen2: 5 layers", "tied", "step 0", "2 tensor-parallel", "padded to 256", "4 file(s)", "float32"):
        assert words in text
    back = describe.plan_conversion(tmp_path / "megatron", max_shard_bytes=4096)
    assert back.files == {path.name: path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")}
    assert "Hugging Face folder: 62 tensors" in describe.inspect(source)
