"""SASRec as a plain PyTorch loop, run by a Python that has it; it imports nothing of Sluice.

Reads the shape of the batches as a line of JSON, then numbers of steps, a line each; answers each
with the CPU-seconds of the steps.
"""

import json
import os
import sys
import time
from typing import Any

# What libraries print goes to standard error: the answers alone are read.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

BLOCKS = 2


class Block(nn.Module):
    """Attention and a feed-forward layer, each over a normalized input, each added to it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim, 1e-6), nn.LayerNorm(dim, 1e-6)
        self.parts, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.hidden, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns `[rows, width, dim]`."""
        parts = self.parts(self.first(inputs)).unsqueeze(1).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        inputs = inputs + self.output(attended.squeeze(1))
        return inputs + self.last(torch.relu(self.hidden(self.second(inputs))))


class SASRec(nn.Module):
    """Sequences latest first, trained positions, causal blocks, a normalization at the end."""

    def __init__(self, items: int, length: int, dim: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(BLOCKS))
        self.normalize = nn.LayerNorm(dim, 1e-6)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        """Returns a vector for each position, `[rows, width, dim]`."""
        width = history.shape[1]
        first = torch.ones_like(history[:, :1], dtype=torch.bool)
        is_read = torch.cat([first, history[:, :-1] > 0], dim=1)
        looks_back = torch.ones(width, width, dtype=torch.bool).triu()
        # A position that is not read reads itself: an empty row of the mask gives NaN.
        mask = (is_read[:, None, :] & looks_back) | torch.eye(width, dtype=torch.bool)
        hidden = self.items(history) * self.items.embedding_dim**0.5 + self.positions[:width]
        for block in self.blocks:
            hidden = block(hidden, mask.unsqueeze(1))
        return self.normalize(hidden)


def compute_loss(
    model: SASRec, history: torch.Tensor, item: torch.Tensor, asked: dict[str, Any]
) -> torch.Tensor:
    """Cross-entropy of each position's item among all items, over positions that have one."""
    longest = int((history > 0).sum(dim=1).max())
    history = history[:, : min(longest + 1, asked["length"])]
    targets = torch.cat([item[:, None], history[:, :-1]], dim=1)
    kept = targets >= asked["first_item"]
    logits = model(history)[kept] @ model.items.weight[asked["first_item"] :].T
    wanted = targets[kept] - asked["first_item"]
    losses = nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return losses / (asked["length"] * len(history))


def main() -> None:
    """Builds the model and its batches, then trains as many steps as each line asks for."""
    asked = json.loads(sys.stdin.readline())
    torch.manual_seed(1)
    model = SASRec(asked["items"], asked["length"], asked["dim"])
    optimizer = torch.optim.Adam(model.parameters())
    columns = {name: torch.from_numpy(values) for name, values in np.load(asked["batches"]).items()}
    batches = list(zip(columns["history"], columns["item"], strict=True))
    done = 0
    print("ready", file=ANSWERS, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(int(line)):
            loss = compute_loss(model, *batches[done % len(batches)], asked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
        if not torch.isfinite(loss):
            raise ArithmeticError("the loss is not finite: the figures would mean nothing")
        print(time.process_time() - start, file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
