"""The same update by transformers alone: one answer at a time, whole logits, autograd, no packing and no ranks.

It shares no code with the actor, so it also finds what every layout would get wrong alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d3s_megatron.doctor.update import GROUP, LONGEST, NUM_PROMPTS, TEMPERATURE, FixedEngine, prompts
from d3s_megatron.rollout import Sampling, make_requests


def plain_update(model_path: str, outcome: dict, device: torch.device) -> dict:
    """Log-probs, entropies, loss, gradients and their norm for the tokens that `outcome` kept."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it without saying that it is a method
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None  # torch would drop that token's gradient, as Megatron does not
    vocab_size = model.config.vocab_size
    requests = make_requests(prompts(vocab_size), GROUP, 5, 0)
    rollouts = FixedEngine(vocab_size).generate(requests, Sampling())
    found = {name: torch.zeros(NUM_PROMPTS * GROUP, LONGEST) for name in ("log_probs", "entropy")}
    num_kept = int((outcome["kept_tokens"] == 2).sum())
    total = 0.0
    for uid in outcome["kept_ids"].tolist():
        rollout = rollouts[uid]
        num = len(rollout.token_ids)
        log_probs, entropy = _scores(model, rollout.request.prompt.token_ids, rollout.token_ids, device)
        found["log_probs"][uid, :num] = log_probs.detach().cpu()
        found["entropy"][uid, :num] = entropy.detach().cpu()
        kept = (outcome["kept_tokens"][uid, :num] == 2).to(device)
        # pi / pi_old is 1 in the first update, with the gradient of the log-prob.
        ratio = torch.exp(log_probs - log_probs.detach())
        loss = -float(outcome["advantages"][uid]) * ratio[kept].sum() / num_kept
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([grad.double().norm() for grad in gradients.values()]).norm()
    return found | {
        "kept_ids": outcome["kept_ids"],
        "kept_tokens": outcome["kept_tokens"],
        "loss": torch.tensor([[total]], dtype=torch.float64),
        "grad_norm": norm[None],
        "gradients": gradients,
        "spread": 0.0,
    }


def _scores(model, prompt: tuple[int, ...], answer: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of an answer's tokens, [L] each."""
    ids = torch.tensor([prompt + answer], device=device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    log_softmax = torch.log_softmax(logits, -1)
    targets = torch.tensor(answer, device=device)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)
