"""Optimizers and DistributedDataParallel do without torch's compiler until something imports it, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINS = """
import sys, tempfile
import torch, torch.distributed as dist
from torch import nn
from echelon.torch_compat import DDP_MODE, build_ddp, spare_dynamo

KINDS = {name: kind for name, kind in vars(torch.optim).items() if name in (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")}

def is_there():
    return "torch._dynamo" in sys.modules

def trained(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    return torch.cat([p.detach().flatten() for p in model.parameters()])

spare_dynamo()
alone = {name: trained(kind) for name, kind in KINDS.items()}
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
build_ddp(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
assert not is_there(), "something has imported it"
"""
IMPORTED_LATER = """
import torch._dynamo
assert torch._dynamo.utils.get_optimize_ddp_mode() == DDP_MODE
for name, kind in KINDS.items():
    assert torch.equal(trained(kind), alone[name]), name
build_ddp(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
mark = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable
assert mark.__module__.startswith("torch"), "the mark is not torch's own again"
"""
COMPILED_LATER = """
import torch
from torch import nn
from echelon.torch_compat import spare_dynamo

def step(model, optimizer, inputs):
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def stepped(function):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        function(model, optimizer, torch.ones(3, 4))
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

{spare}
plain = stepped(step)
from torch._dynamo.testing import CompileCounter
graphs = CompileCounter()
print(plain, stepped(torch.compile(step, backend=graphs)), stepped(step) == plain)
print(graphs.frame_count, graphs.op_count)
"""


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_imports_no_compiler_and_is_the_same_once_it_is_there() -> None:
    _run(TRAINS + IMPORTED_LATER)


@pytest.mark.long
def test_a_step_that_is_compiled_later_has_the_same_graphs_and_results() -> None:
    spared, as_before = (_run(COMPILED_LATER.format(spare=line)) for line in ("spare_dynamo()", ""))
    assert spared == as_before and spared


def test_where_torch_has_other_names_things_are_as_before() -> None:
    _run(
        "import torch\n"
        "from torch import nn\n"
        "torch.optim.Optimizer.zero_grad = lambda self: None\n"
        "torch.optim.SGD.step = lambda self: 'as it was'\n"
        "del nn.parallel.DistributedDataParallel._inside_ddp_forward\n"
        "from echelon.torch_compat import spare_dynamo\n"
        "spare_dynamo()\n"
        "assert torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step() == 'as it was'\n"
    )
