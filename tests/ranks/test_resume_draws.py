"""What ranks draw, as dropout does, after a resume on other workers: each its own, and nothing for the second time."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from tests.ranks.run_many import run_many

OWN = """
    import os

    import torch
    from torch import nn


    class Draws(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if self.training:
                with open(f"draws{os.environ['RANK']}", "a") as file:
                    file.write(f"{torch.rand(1).item()}\\n")
            return self.inner(x)


    def drawing(data):
        return Draws(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
"""


def test_ranks_draw_their_own_after_a_resume_on_other_workers(tmp_path: Path) -> None:
    (tmp_path / "own_draws.py").write_text(dedent(OWN))
    command = ["train", "digits", "--model", "own_draws:drawing", "--trust", "--workers", "1", "--max-steps", "2"]
    run_many(tmp_path, [[*command, "--run", "run"]])
    for workers, steps in (("2", "4"), ("3", "6")):
        run_many(tmp_path, [["resume", "run", "--trust", "--workers", workers, "--max-steps", steps]])
    draws = [(tmp_path / f"draws{rank}").read_text().split() for rank in range(3)]
    assert [len(each) for each in draws] == [6, 4, 2]
    assert len({draw for each in draws for draw in each}) == 12
