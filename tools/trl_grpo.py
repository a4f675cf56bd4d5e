"""Plain GRPO by TRL's GRPOTrainer on the CPU, logged as d3s_megatron logs; compare_with_trl.py calls it.

    PYTHON_WITH_TRL tools/trl_grpo.py JOB.json        (or under torchrun)

JOB.json: model (folder), prompts ([{"prompt", "answer"}] in the order in which they are trained on), held_out (the
same), out (folder), seed, steps, prompts_per_step, samples_per_prompt, max_new_tokens, lr, eval_every (0: never),
eval_samples. Imports nothing of d3s_megatron: what it agrees with is code of others.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Log(TrainerCallback):
    """Writes a row a step, and held-out accuracy by sampling; seconds are from one step's end to the next one's."""

    def __init__(self, job: dict, tokenizer) -> None:
        self.job, self.tokenizer = job, tokenizer
        self.rewards: list[float] = []
        self.num_tokens = 0  # of this rank
        self.main = int(os.environ.get("RANK", "0")) == 0
        folder = Path(job["out"])
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "log.jsonl").open("w") if self.main else None

    def reward(self, prompts, completions, completion_ids, answer, **ignored) -> list[float]:
        """1 for the very answer, ended within the limit."""
        self.num_tokens += sum(len(ids) for ids in completion_ids)
        ended = [ids[-1] == self.tokenizer.eos_token_id for ids in completion_ids]
        values = [float(text == gold and end) for text, gold, end in zip(completions, answer, ended, strict=True)]
        self.rewards += values
        return values

    def write(self, row: dict) -> None:
        if self.main:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def on_train_begin(self, args, state, control, model, **ignored):
        self.evaluate(model, 0)
        self.start()

    def start(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, model, **ignored):
        row = {
            "step": state.global_step - 1,
            "progress": state.global_step / self.job["steps"],
            "reward": sum(self.rewards) / max(1, len(self.rewards)),
            "tokens_trained": self.num_tokens * int(os.environ.get("WORLD_SIZE", "1")),
            "tokens_generated": self.num_tokens * int(os.environ.get("WORLD_SIZE", "1")),
            "time/step": time.perf_counter() - self.wall,
            "time/cpu": time.process_time() - self.cpu,
        }
        self.write(row)
        self.rewards = []
        every = self.job["eval_every"]
        if every and (state.global_step % every == 0 or state.global_step == self.job["steps"]):
            self.evaluate(model, state.global_step)
        self.start()

    @torch.no_grad()
    def evaluate(self, model, step: int) -> None:
        """Accuracy at temperature 1, eval_samples answers a problem; the unbiased pass@1."""
        if not self.job["eval_every"] or not self.main:
            return
        problems, num = self.job["held_out"], self.job["eval_samples"]
        inputs = self.tokenizer([p["prompt"] for p in problems], return_tensors="pt", padding=True, padding_side="left")
        state = torch.get_rng_state()
        torch.manual_seed(12345)
        model.eval()
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, max_new_tokens=self.job["max_new_tokens"], num_return_sequences=num,
        )[:, inputs["input_ids"].shape[1] :]  # fmt: skip
        model.train()
        torch.set_rng_state(state)
        texts = self.tokenizer.batch_decode(out, skip_special_tokens=True)
        ended = (out == self.tokenizer.eos_token_id).any(1).tolist()
        right = [text == problems[i // num]["answer"] and ended[i] for i, text in enumerate(texts)]
        self.write({"step": step, "eval/pass@1": sum(right) / len(right)})


def main(path: Path) -> None:
    """One run."""
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    log = Log(job, tokenizer)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rollouts = job["prompts_per_step"] * job["samples_per_prompt"]
    config = GRPOConfig(
        output_dir=str(Path(job["out"]) / "trl"), seed=job["seed"], use_cpu=True, bf16=False, report_to="none",
        max_steps=job["steps"], save_strategy="no", logging_steps=10**6, disable_tqdm=True, shuffle_dataset=False,
        per_device_train_batch_size=rollouts // world, gradient_accumulation_steps=1, gradient_checkpointing=False,
        num_generations=job["samples_per_prompt"], max_completion_length=job["max_new_tokens"],
        temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, num_iterations=1,
        beta=0.0, epsilon=0.2, loss_type="dapo", scale_rewards="group",
        learning_rate=job["lr"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0,
        ddp_backend="gloo" if world > 1 else None,
        ddp_find_unused_parameters=False,  # its default walks the graph again every step
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=log.reward,
        args=config,
        train_dataset=Dataset.from_list(job["prompts"]),
        processing_class=tokenizer,
        callbacks=[log],
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads may abort an interpreter that ends before them
    if log.main:
        losses = [row["train_loss"] for row in trainer.state.log_history if "train_loss" in row]
        assert all(math.isfinite(loss) for loss in losses)
        (Path(job["out"]) / "summary.json").write_text(json.dumps({"algorithm": "trl", "steps": job["steps"]}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
