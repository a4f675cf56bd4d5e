"""Where the questions come from and how they become prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Files, field names and prompt rules of the training and evaluation problems."""

    train_path: str = ""
    """JSONL or Parquet file with the training problems."""

    eval_path: str | None = None
    """JSONL or Parquet file with held-out problems; null turns evaluation off."""

    problem_field: str = "problem"
    """Field that holds the question."""

    answer_field: str = "answer"
    """Field that holds the reference answer; numbers are taken as they are written."""

    id_field: str | None = "id"
    """Field that names a problem; where a row lacks it, or with null, the row number does."""

    prompt_template: str = "chat"
    """One of "chat" (the tokenizer's chat template), "raw" (the problem alone), or a text that contains {problem}."""

    system_prompt: str | None = None
    """System message of the chat template; null leaves the template's own."""

    max_prompt_tokens: int = 1024
    """Longest prompt in tokens, template included."""

    overlong: Literal["drop", "refuse"] = "drop"
    """What happens to a longer prompt: it is dropped and counted, or the run is refused."""

    limit: int | None = None
    """Use only the first rows of the training file; null uses all."""

    eval_limit: int | None = None
    """Use only the first rows of the evaluation file; null uses all."""

    def __post_init__(self) -> None:
        if self.prompt_template not in ("chat", "raw") and "{problem}" not in self.prompt_template:
            raise ValueError(
                f"data.prompt_template is {self.prompt_template!r}: "
                "use 'chat', 'raw', or a text that contains {problem}"
            )
        if self.system_prompt is not None and self.prompt_template != "chat":
            raise ValueError(
                f"data.system_prompt is set, but data.prompt_template is {self.prompt_template!r}: "
                "only 'chat' has a system message; write it into the template text instead"
            )
        if self.overlong not in ("drop", "refuse"):
            raise ValueError(f"data.overlong is {self.overlong!r}: use 'drop' or 'refuse'")
        for name in ("max_prompt_tokens", "limit", "eval_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} is {value}: it must be at least 1")
        for name in ("problem_field", "answer_field"):
            if not getattr(self, name):
                raise ValueError(f"data.{name} is empty: name the field of the file")

    def for_evaluation(self) -> DataConfig:
        """The same rules with `eval_limit` as the limit, for reading `eval_path`."""
        return replace(self, limit=self.eval_limit)
