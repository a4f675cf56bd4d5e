"""Folders: read in slices, checked strictly, and written so that transformers loads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from d3s_megatron.convert.hf_folder import INDEX, HFFolder
from d3s_megatron.convert.hf_writer import save_hf_folder
from d3s_megatron.convert.shape import read_shape
from d3s_megatron.convert.shards import shard_from_hf

from .builders import counting_state, tiny_config, write_folder


@pytest.fixture
def tied(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    return write_folder(tmp_path / "source", config, counting_state(read_shape(config)))


def sharded(tmp_path, tied, max_shard_bytes=1024):
    state = load_file(tied / "model.safetensors")
    save_hf_folder(tmp_path / "sharded", read_shape(tied), state.items(), tied, max_shard_bytes=max_shard_bytes)
    return tmp_path / "sharded"


def test_slices_equal_the_tensor(tied):
    folder, shape, state = HFFolder(tied), read_shape(tied), load_file(tied / "model.safetensors")
    folder.check(shape)
    assert folder.dtype("model.norm.weight") == torch.float32
    for name in ("decoder.layers.0.mlp.linear_fc2.weight", "embedding.word_embeddings.weight"):
        ours = shard_from_hf(shape, name, 1, 2, 12, folder.get_slice)
        assert torch.equal(ours, shard_from_hf(shape, name, 1, 2, 12, state.__getitem__))


def test_index_of_small_shards(tmp_path, tied):
    out = sharded(tmp_path, tied)
    index = json.loads((out / INDEX).read_text())
    found = {name: path.name for path in out.glob("*.safetensors") for name in load_file(path)}
    state = load_file(tied / "model.safetensors")
    assert index["weight_map"] == found and found.keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert "lm_head.weight" not in found and (out / "tokenizer.json").exists()
    HFFolder(out).check(read_shape(out))


@pytest.mark.parametrize("limit", [1024, 10**9])
def test_transformers_loads_what_was_written(tmp_path, tied, limit):
    out = sharded(tmp_path, tied, limit)
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in load_file(tied / "model.safetensors").items())


def test_dtype_of_files_equals_dtype_of_config(tmp_path, tied):
    state = load_file(tied / "model.safetensors")
    save_hf_folder(tmp_path / "half", read_shape(tied), state.items(), tied, dtype=torch.bfloat16)
    assert read_shape(tmp_path / "half").dtype == torch.bfloat16
    written = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in state.items())


def test_nothing_is_left_of_a_failed_save(tmp_path, tied):
    shape, state = read_shape(tied), load_file(tied / "model.safetensors")
    cases = {
        "missing, among them model.norm": [(n, t) for n, t in state.items() if n != "model.norm.weight"],
        "came twice": [*state.items(), ("model.norm.weight", state["model.norm.weight"])],
        "lm_head.weight is left over": [*state.items(), ("lm_head.weight", state["model.embed_tokens.weight"])],
        "has shape": [(n, t[:1]) for n, t in state.items()],
    }
    for words, tensors in cases.items():
        with pytest.raises(ValueError, match=words):
            save_hf_folder(tmp_path / "out", shape, tensors, tied)
    with pytest.raises(ValueError, match="exists"):
        save_hf_folder(tied, shape, state.items(), tied)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_are_never_copied(tmp_path, tied):
    (tied / "pytorch_model.bin").write_bytes(b"x")
    (tied / "pytorch_model.bin.index.json").write_text("{}")
    names = {path.name for path in sharded(tmp_path, tied, 10**9).iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}


def test_missing_and_left_over_tensors_are_named(tied):
    shape, state = read_shape(tied), load_file(tied / "model.safetensors")
    del state["model.norm.weight"]
    save_file({**state, "model.extra.weight": torch.zeros(1)}, tied / "model.safetensors")
    with pytest.raises(ValueError, match="missing model.norm.weight; left over model.extra.weight"):
        HFFolder(tied).check(shape)


def test_computed_buffers_are_no_left_over(tied):
    state = load_file(tied / "model.safetensors")
    save_file({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, tied / "model.safetensors")
    HFFolder(tied).check(read_shape(tied))


def test_tied_head_may_lie_there_only_as_a_copy(tied):
    state = load_file(tied / "model.safetensors")
    head = state["model.embed_tokens.weight"].clone()
    save_file({**state, "lm_head.weight": head}, tied / "model.safetensors")
    HFFolder(tied).check(read_shape(tied))
    head[10, 3] += 1
    save_file({**state, "lm_head.weight": head}, tied / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        HFFolder(tied).check(read_shape(tied))


def test_shapes_are_compared_with_the_config(tied):
    with pytest.raises(ValueError, match="config.json says"):
        HFFolder(tied).check(read_shape(tiny_config(tie_word_embeddings=True, intermediate_size=16)))


def test_truncated_file(tied):
    data = (tied / "model.safetensors").read_bytes()
    for length in (0, 4, 40, len(data) - 1):
        (tied / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match="model.safetensors.*(truncated|damaged)"):
            HFFolder(tied)


def test_missing_shard_and_wrong_index(tmp_path, tied):
    out = sharded(tmp_path, tied)
    index = json.loads((out / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    wrong = {**index["weight_map"], "model.norm.weight": shards[0]}
    (out / INDEX).write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(ValueError, match="model.norm.weight lies in"):
        HFFolder(out)
    ghost = {**index["weight_map"], "model.ghost.weight": shards[0]}
    (out / INDEX).write_text(json.dumps({"weight_map": ghost}))
    with pytest.raises(ValueError, match="no shard holds: model.ghost.weight"):
        HFFolder(out)
    (out / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="weight_map"):
        HFFolder(out)
    (out / INDEX).write_text(json.dumps(index))
    (out / shards[1]).unlink()
    with pytest.raises(ValueError, match=f"{shards[1]}.*missing shard"):
        HFFolder(out)


def test_pickled_weights_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        HFFolder(tmp_path / "none")
    with pytest.raises(ValueError, match="neither"):
        HFFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="save them as safetensors"):
        HFFolder(tmp_path)
