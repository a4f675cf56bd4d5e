"""From a problem to token ids: one text is built, and exactly that text is encoded.

The text carries its own special tokens, so the tokenizer is always told to add none. That is the whole rule against
a doubled beginning-of-sequence token (fault G01).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d3s_megatron.data.config import DataConfig
from d3s_megatron.data.problems import Problem
from d3s_megatron.types import Prompt


def encode_prompts(problems: Sequence[Problem], tokenizer: Any, config: DataConfig) -> tuple[list[Prompt], int]:
    """Prompts in the order of the problems, and the number dropped for being over `max_prompt_tokens`.

    `tokenizer` is a Hugging Face tokenizer. Raises ValueError where the chat template is missing, where a prompt is
    empty, where one is too long under overlong="refuse", or where none is left.
    """
    texts = [_prompt_text(problem, tokenizer, config) for problem in problems]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    prompts = []
    for problem, text, ids in zip(problems, texts, encoded, strict=True):
        if not ids:
            raise ValueError(f"problem {problem.id!r}: its prompt has no tokens; is this the model's own tokenizer?")
        if len(ids) > config.max_prompt_tokens:
            if config.overlong == "refuse":
                raise ValueError(
                    f"problem {problem.id!r}: its prompt has {len(ids)} tokens and data.max_prompt_tokens is "
                    f"{config.max_prompt_tokens}; raise the limit or set data.overlong to 'drop'"
                )
            continue
        prompts.append(Prompt(id=problem.id, text=text, token_ids=tuple(ids), answer=problem.answer))
    if not prompts:
        raise ValueError(
            f"none of {len(problems)} prompts fits in data.max_prompt_tokens = {config.max_prompt_tokens}; "
            "raise the limit"
        )
    return prompts, len(problems) - len(prompts)


def _prompt_text(problem: Problem, tokenizer: Any, config: DataConfig) -> str:
    if config.prompt_template == "chat":
        if not tokenizer.chat_template:
            raise ValueError(
                "data.prompt_template is 'chat', but the tokenizer has no chat template; "
                "use 'raw' or a text that contains {problem}"
            )
        messages = [{"role": "user", "content": problem.problem}]
        if config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if config.prompt_template == "raw":
        text = problem.problem
    else:
        # Not str.format: problems and templates are full of LaTeX braces.
        text = config.prompt_template.replace("{problem}", problem.problem)
    bos = _leading_bos(tokenizer)
    return text if text.startswith(bos) else bos + text


def _leading_bos(tokenizer: Any) -> str:
    """The beginning-of-sequence text where this tokenizer puts one before plain text, else ""."""
    added = tokenizer("", add_special_tokens=True)["input_ids"]
    starts = tokenizer.bos_token_id is not None and added[:1] == [tokenizer.bos_token_id]
    return tokenizer.bos_token if starts else ""
