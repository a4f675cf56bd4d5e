"""Hugging Face names <-> Megatron names, both directions together.

    shape.py      config.json -> ModelShape, or a ValueError that says what is not supported
    families.py   the supported model families; family.py is their record, qwen2.py, qwen3.py, ... one file for each
    names.py      the rules of one model: Megatron name <-> Hugging Face names and how they combine
    parallel.py   vocabulary padding, layers of a stage, and which tensor-parallel sizes divide a model
    pieces.py     a shard as row or column ranges of Hugging Face tensors (for reading and for byte moves)
    shards.py     tensors: read one rank's shard, merge shards, split back into Hugging Face tensors
    rope.py       inverse rotary frequencies, Llama-3 scaling included
    hf_folder.py  read and check a Hugging Face folder;  hf_writer.py  write one;  safetensors_file.py  the header
    checkpoint/   whole checkpoints, converted by moving bytes

Nothing here imports megatron or transformers: a conversion needs neither a model object nor a process group.
"""

from d3s_megatron.convert.hf_folder import HFFolder
from d3s_megatron.convert.hf_writer import save_hf_folder
from d3s_megatron.convert.names import expected_hf_names, global_name, hf_shape, megatron_names
from d3s_megatron.convert.parallel import check_tp, padded_vocab_size
from d3s_megatron.convert.rope import rope_inv_freq
from d3s_megatron.convert.shape import Llama3Scaling, ModelShape, read_shape
from d3s_megatron.convert.shards import hf_tensors_from_full, megatron_shape, merge_shards, shard_from_hf

__all__ = [
    "HFFolder",
    "Llama3Scaling",
    "ModelShape",
    "check_tp",
    "expected_hf_names",
    "global_name",
    "hf_shape",
    "hf_tensors_from_full",
    "megatron_names",
    "megatron_shape",
    "merge_shards",
    "padded_vocab_size",
    "read_shape",
    "rope_inv_freq",
    "save_hf_folder",
    "shard_from_hf",
]
