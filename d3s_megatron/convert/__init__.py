"""Hugging Face names <-> Megatron names, both directions together.

    shape.py     config.json -> ModelShape, or a ValueError that says what is not supported
    families.py  which config keys and which tensors each model family has: one short file per family beside it
    names.py     the rules of one model: Megatron name <-> Hugging Face names and how they combine
    pieces.py    a shard as a list of row or column ranges of Hugging Face tensors (for reading and for byte moves)
    shards.py    tensors: read one rank's shard, merge shards, split back into Hugging Face tensors
    hf_folder.py read and check a Hugging Face folder;  hf_writer.py  write one
    rope.py      inverse rotary frequencies, Llama-3 scaling included

Nothing here imports megatron or transformers: a conversion needs neither a model object nor a process group.
"""
