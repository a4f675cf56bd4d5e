"""Checkpoints with all the tensors of a 70B model: planned at full size, converted at a reduced width."""

import pytest
import torch
from safetensors.torch import load_file
from unit.convert.builders import LLAMA3, counting_state, tiny_config, write_folder

from d3s_megatron.convert import read_shape
from d3s_megatron.convert.checkpoint import compare, describe, job, jobs

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3,
    "torch_dtype": "bfloat16",
}
QWEN_72B = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
# The parameter counts that the two model cards give, in billions
PARAMETERS = {"llama": 70.55, "qwen2": 72.71}


@pytest.mark.parametrize(("family", "sizes"), [("llama", LLAMA_70B), ("qwen2", QWEN_72B)])
def test_plan_of_the_real_size(tmp_path, family, sizes):
    folder = write_folder(tmp_path / family, tiny_config(family, **sizes), {"nothing": torch.zeros(1)})
    (folder / "model.safetensors").unlink()  # config.json alone
    plan = describe.plan_conversion(folder, tp=8, pp=4, workers=4)
    assert plan.read_bytes == pytest.approx(2e9 * PARAMETERS[family], rel=1e-3)
    assert plan.read_bytes < plan.written_bytes < 1.001 * plan.read_bytes  # padding and frames
    assert len(plan.files) == 32 and plan.peak_bytes < 600e6


def test_every_tensor_of_a_70b_model_at_reduced_width(tmp_path):
    config = tiny_config("llama", **LLAMA_70B | {"hidden_size": 16, "intermediate_size": 56, "head_dim": 2})
    shape = read_shape(config)
    state = counting_state(shape, torch.bfloat16)
    assert len(state) == 80 * 9 + 3
    source = write_folder(tmp_path / "source", config, state)
    report = job.run(jobs.import_job(source, tmp_path / "megatron", tp=8, pp=4, vpp=2), workers=2)
    assert report.added_anonymous < 300e6
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 32
    job.run(jobs.export_job(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=2**20), workers=2)
    digests = [compare.digests(*jobs.blocks_of(folder)) for folder in (source, tmp_path / "back")]
    assert compare.differences(*digests) == []
    found = {
        name: tensor for file in (tmp_path / "back").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path):
    # An embedding of 128 MB and columns cut over two ranks: a tensor held whole would show.
    config = tiny_config(
        "llama", hidden_size=1024, intermediate_size=8192, num_hidden_layers=2, vocab_size=65536, torch_dtype="bfloat16"
    )
    shape = read_shape(config)
    source = write_folder(tmp_path / "source", config, counting_state(shape, torch.bfloat16))
    imported = job.run(jobs.import_job(source, tmp_path / "megatron", tp=2), workers=1)
    exported = job.run(jobs.export_job(tmp_path / "megatron", tmp_path / "back"), workers=1)
    for report in (imported, exported):
        assert report.added_anonymous < 64e6
