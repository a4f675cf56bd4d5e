"""Prompts: one beginning-of-sequence token, the template's own text, and a limit that counts."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from d3s_megatron.data import DataConfig, Problem, encode_prompts, load_problems

SHARED = Path(__file__).parents[4] / "shared"
WORDS = ["<bos>", "<eos>", "<user>", "<answer>", "<system>", *"abcd{}", "[UNK]"]
TEMPLATE = (
    "<bos>{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
PROBLEMS = [Problem("p0", "a b", "1"), Problem("p1", "a b c d", "2")]


def tiny_tokenizer(adds_bos=True, adds_eos=False, template=TEMPLATE):
    """One id a word; like Llama's it starts plain text with <bos>, and its template writes <bos> too."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pattern = " ".join((["<bos>"] if adds_bos else []) + ["$A"] + (["<eos>"] if adds_eos else []))
    tokenizer.post_processor = processors.TemplateProcessing(pattern, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="[UNK]",
        additional_special_tokens=["<user>", "<answer>", "<system>"],
        chat_template=template,
    )


def words(prompt):
    return [WORDS[i] for i in prompt.token_ids]


def encode_one(tokenizer, **options):
    return encode_prompts(PROBLEMS[:1], tokenizer, DataConfig(**options))[0][0]


def test_the_chat_template_begins_once():
    """Fault G01."""
    prompt = encode_one(tiny_tokenizer())
    assert words(prompt) == ["<bos>", "<user>", "a", "b", "<answer>"]
    assert (prompt.id, prompt.text, prompt.answer) == ("p0", "<bos><user>a b<answer>", "1")


def test_a_system_prompt_goes_through_the_template():
    prompt = encode_one(tiny_tokenizer(), system_prompt="c")
    assert words(prompt) == ["<bos>", "<system>", "c", "<user>", "a", "b", "<answer>"]


@pytest.mark.parametrize("adds_eos", [False, True])
def test_plain_text_begins_as_the_tokenizer_begins_it_and_never_ends(adds_eos):
    assert words(encode_one(tiny_tokenizer(adds_eos=adds_eos), prompt_template="raw")) == ["<bos>", "a", "b"]
    assert words(encode_one(tiny_tokenizer(adds_bos=False), prompt_template="raw")) == ["a", "b"]
    assert words(encode_one(tiny_tokenizer(), prompt_template="<bos>{problem}")) == ["<bos>", "a", "b"]


def test_a_text_template_keeps_its_other_braces():
    prompt = encode_one(tiny_tokenizer(adds_bos=False), prompt_template="{problem} { c }")
    assert prompt.text == "a b { c }" and words(prompt) == ["a", "b", "{", "c", "}"]


def test_the_text_is_exactly_what_the_ids_encode():
    tokenizer = tiny_tokenizer()
    for template in ("chat", "raw", "d {problem}"):
        prompt = encode_one(tokenizer, prompt_template=template)
        assert tuple(tokenizer(prompt.text, add_special_tokens=False)["input_ids"]) == prompt.token_ids


def test_long_prompts_are_dropped_and_counted_or_refused():
    config = DataConfig(prompt_template="raw", max_prompt_tokens=3)
    prompts, num_dropped = encode_prompts(PROBLEMS, tiny_tokenizer(), config)
    assert ([p.id for p in prompts], num_dropped) == (["p0"], 1)  # 3 tokens fit, 5 do not
    refuse = DataConfig(prompt_template="raw", max_prompt_tokens=3, overlong="refuse")
    message = (
        "problem 'p1': its prompt has 5 tokens and data.max_prompt_tokens is 3; raise the limit or set data.overlong"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        encode_prompts(PROBLEMS, tiny_tokenizer(), refuse)
    with pytest.raises(ValueError, match="none of 2 prompts fits in data.max_prompt_tokens = 1"):
        encode_prompts(PROBLEMS, tiny_tokenizer(), DataConfig(prompt_template="raw", max_prompt_tokens=1))


def test_a_missing_chat_template_is_named():
    with pytest.raises(ValueError, match="the tokenizer has no chat template; use 'raw'"):
        encode_one(tiny_tokenizer(template=None))


@pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"the reference tokenizer and data are not at {SHARED.name}/ beside here"
)
def test_real_rows_through_the_real_template():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5-math-1.5b")
    config = DataConfig(limit=50, max_prompt_tokens=200)
    problems = load_problems(SHARED / "data" / "train" / "deepscaler_sub1209.jsonl", config)
    prompts, num_dropped = encode_prompts(problems, tokenizer, config)
    assert len(prompts) + num_dropped == 50 and len(prompts) > 25
    for prompt in prompts:
        message = [{"role": "user", "content": {p.id: p for p in problems}[prompt.id].problem}]
        own = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert list(prompt.token_ids) == own
        assert prompt.text.endswith("<|im_start|>assistant\n") and r"\boxed{}" in prompt.text
