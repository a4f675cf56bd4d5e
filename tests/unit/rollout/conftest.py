"""Tiny models on disk: random weights, wide enough apart that some tokens are likely and some are not."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

from d3s_megatron.rollout import RolloutConfig, make_requests
from d3s_megatron.rollout.serve import Server
from d3s_megatron.rollout.transformers_engine import TransformersEngine
from d3s_megatron.types import Prompt

END = "<|endoftext|>"
EOS = 12  # the padding too, as in Qwen2.5-Math (fault D20)
VOCAB = 16  # three rows more than the tokenizer has tokens, as Qwen's padded embeddings have


def build_model(family, seed=0):
    torch.manual_seed(seed)
    name, _, variant = family.partition("-")
    options = {"tie_word_embeddings": variant == "tied"}
    if variant == "window":
        options |= {"sliding_window": 5}
    config = AutoConfig.for_model(
        name,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=EOS,
        initializer_range=0.3,
        **options,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """folder(family, seed): a Hugging Face folder with that random model and a tokenizer of one id a character."""
    made = {}

    def make(family="qwen2-tied", seed=0):
        if (family, seed) not in made:
            path = made[family, seed] = tmp_path_factory.mktemp(family)
            build_model(family, seed).save_pretrained(path)
            vocab = {token: i for i, token in enumerate([*"0123456789+=", END])}
            Qwen2Tokenizer(vocab=vocab, merges=[], unk_token=END, eos_token=END, pad_token=END).save_pretrained(path)
        return made[family, seed]

    return make


@pytest.fixture
def engine(folder):
    """engine(family, seed, **options): the engine on such a folder."""

    def make(family="qwen2-tied", seed=0, **options):
        return TransformersEngine(folder(family, seed), RolloutConfig(**options))

    return make


@pytest.fixture
def serve(folder, request):
    """serve(seed): a server with a random model of that seed and its test module's CONFIG, in threads here."""
    config, running = request.module.CONFIG, []

    def make(seed=0, family="qwen2-tied", max_model_len=64, port=0):
        path = folder(family, seed)
        running.append(Server(TransformersEngine(path, config), path, config, max_model_len, port=port))
        return running[-1]

    yield make
    for server in running:
        if server.worker.thread.is_alive():
            server.close()


@pytest.fixture
def requests_for():
    """requests_for(n, prompts): n requests each for prompts given as tuples of ids."""

    def make(num_samples, prompts=((1, 10, 2, 11), (5,), (3, 4, 10, 5, 6, 11, 7)), seed=0):
        records = [Prompt(id=f"p{i}", text="", token_ids=tuple(ids), answer="0") for i, ids in enumerate(prompts)]
        return make_requests(records, num_samples, seed, step=0)

    return make
