"""The commands and the programs of README and the pages, run as they stand there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.images import make_folder, make_shards
from tests.unit.data.shapes import make_shapes
from tests.unit.data.test_parallel_text import make_parallel
from tests.unit.data.test_sounds import make_sounds
from tests.unit.data.test_transcripts import make_transcribed
from tests.unit.docs.pages import Block, blocks, commands

DEADLINE_S = 280.0
SMALL = ["--threads", "1", "--device", "cpu"]
NAMES = {
    "DATA": "digits",
    "PATH/cifar10": "digits",
    "PATH/imagenet": "digits",
    "hf:imdb": "banking77-saved",
    "s3://bucket/shards": "shards",
    "s3://bucket/table.parquet": "table.csv",
    "https://host/shards/train-{000..063}.tar": "shards",
    "timm/vit_base_patch16_224": "small_vit",
}
"""What stands for data of the reader's, and for a model that takes larger images."""
DRY = [c for c in commands() if c[:1] == ["train"] and not {"--dry-run", "--config", "--weights"} & set(c)]
PROGRAMS = [block for block in blocks("python") if "echelon.train(" in block.text]
SNIPPETS = [block for block in blocks("python") if block not in PROGRAMS]
BEFORE_PROGRAM = """
import echelon, torch
from torch import nn

class Dots(torch.utils.data.Dataset):
    def __init__(self, count):
        self.points = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    def __len__(self):
        return len(self.points)
    def __getitem__(self, index):
        return self.points[index], int(self.points[index].sum() > 0)

torch.manual_seed(0)
my_module, my_train_set, my_test_set = nn.Linear(4, 2), Dots(400), Dots(100)
"""
BEFORE_SNIPPETS = """
import sys
from types import SimpleNamespace
import torch, echelon
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, "imagenet.safetensors")
torch.save({"state_dict": nn.Linear(4, 2).state_dict(), "epoch": 3}, "last.ckpt")

def names_of_the_reader():
    model = nn.Linear(4, 2)
    ddp_model, of_lightning, of_trainer = (nn.parallel.DistributedDataParallel(nn.Linear(4, 2)) for _ in range(3))
    optimizer, *optimizers = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, of_lightning, of_trainer))
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=of_lightning), optimizers=optimizers,
                              model_wrapped=of_trainer, optimizer=optimizers[1])
    return {"torch": torch, "echelon": echelon, "model": model, "ddp_model": ddp_model, "optimizer": optimizer,
            "trainer": trainer, "loader": [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))],
            "loss_of": nn.functional.cross_entropy, "evaluate": lambda model: model.eval(),
            "accelerator": SimpleNamespace(prepare=lambda *objects: objects)}

for file in sys.argv[1:]:
    exec(compile(open(file).read(), file, "exec"), names_of_the_reader())
print("all ran")
"""
MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data_sets():
    data = TensorDataset(torch.rand(64, 1, 8, 8), torch.arange(64) % 10)
    return data, data, tuple("0123456789")

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

"""


def dry(command: list[str]) -> list[str]:
    """Return a command's arguments for a dry run on digits, without `--link`, which needs root and its modules."""
    words = [NAMES.get(word, word) for word in command]
    if "--link" in words:
        del words[words.index("--link") : words.index("--link") + 2]
    return [*words, "--dry-run"]


def run(arguments: list[str], folder: Path, deadline_s: float = DEADLINE_S) -> str:
    """Run Python with arguments, to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}"
    return done.stdout


def write_data(folder: Path) -> None:
    """Write little data under the names that the pages give theirs: texts, tables, sounds, images, masks."""
    (folder / "tinyshakespeare.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    rows = "".join(f"{i},{i % 7},{'xyz'[i % 3]},{i / 2}\n" for i in range(60))
    (folder / "table.csv").write_text(f"a,b,c,y\n{rows}")
    ratings = "".join(f"{i % 5},{i % 7},{'xyz'[i % 3]},{i / 2}\n" for i in range(60))
    (folder / "ratings.csv").write_text(f"userId,movieId,tag,rating\n{ratings}")
    (folder / "banking77").mkdir()
    texts = "".join(f"where is card number {i} of mine,{'lost' if i % 2 else 'late'}\n" for i in range(60))
    for part in ("train", "test"):
        (folder / "banking77" / f"{part}.csv").write_text(f"text,category\n{texts}")
    make_sounds(folder / "speech-digits", ("train", "test"))
    saved = {"text": [f"where is card number {i} of mine" for i in range(60)], "category": ["lost", "late"] * 30}
    datasets = pytest.importorskip("datasets", reason="the pages name data of the extra hf")
    datasets.Dataset.from_dict(saved).class_encode_column("category").save_to_disk(folder / "banking77-saved")
    make_shards(make_folder(folder / "images"), folder / "shards" / "train")
    make_transcribed(folder / "spoken", ("train", "test"))
    make_parallel(folder / "multi30k-en-de", {"train": 40, "val": 10, "test_2016_flickr": 7})
    make_shapes(folder / "shapes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the module `mine` that the pages show, a weight for each sample of digits, and data of pages."""
    shown = "".join(block.text for block in blocks("python") if block.text.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(MINE + shown)
    np.save(tmp_path / "weights.npy", np.ones(1438))
    write_data(tmp_path)
    return tmp_path


def run_commands(listed: list[list[str]], folder: Path) -> str:
    """Run commands one after the other in one process; returns a line for each that was refused or failed."""
    program = (
        "import sys, json, contextlib, io\n"
        "from echelon.cli.app import app\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(io.StringIO()):\n"
        "            code = app(standalone_mode=False, args=arguments)\n"
        "    except BaseException as error:\n"
        "        code = error\n"
        "    if code not in (None, 0):\n"
        "        print('REFUSED', ' '.join(arguments), '|', code)\n"
    )
    printed = run(["-c", program, json.dumps(listed)], folder)
    return "\n".join(line for line in printed.splitlines() if line.startswith("REFUSED"))


@pytest.mark.long
def test_what_the_pages_train_could_start(folder: Path) -> None:
    """Each dry run plans its run to the end, and refuses what could not start."""
    assert len(DRY) > 20
    once = [list(words) for words in dict.fromkeys(tuple(dry(command)) for command in DRY)]
    with ThreadPoolExecutor(2) as pool:  # a plan is made by one thread of one process
        assert list(pool.map(run_commands, (once[::2], once[1::2]), (folder, folder))) == ["", ""]


def check_program(block: Block, folder: Path) -> None:
    """Run a program of the pages in a folder of its own."""
    folder.mkdir()
    (folder / "program.py").write_text(BEFORE_PROGRAM + block.text)
    printed = run(["program.py"], folder)
    assert "Traceback" not in printed and list(folder.glob("runs/*/report.html")), f"{block.name}: {printed}"
    if "print(outcome" in block.text:
        assert float(printed.split()[-2 if printed.rstrip().endswith(".html") else -1]) > 0.3, (
            f"{block.name}: {printed}"
        )


@pytest.mark.long
def test_the_programs_of_the_pages_run(tmp_path: Path) -> None:
    """Two at a time: each waits for its imports and its processes most of the time."""
    with ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / str(number) for number in range(len(PROGRAMS))]
        assert list(pool.map(check_program, PROGRAMS, folders)) == [None] * len(PROGRAMS)


@pytest.mark.long
def test_the_snippets_of_the_pages_run(tmp_path: Path) -> None:
    """With what a reader has when they come to them: a model, an optimizer, a trainer, files of weights."""
    assert len(PROGRAMS) >= 4 and len(SNIPPETS) >= 4
    files = []
    for number, block in enumerate(SNIPPETS):
        files.append(f"snippet{number}.py")
        (tmp_path / files[-1]).write_text(f"# {block.name}\n{block.text}")
    (tmp_path / "all.py").write_text(BEFORE_SNIPPETS)
    assert "all ran" in run(["all.py", *files], tmp_path)


@pytest.mark.long
def test_the_first_commands_of_the_pages_run(folder: Path) -> None:
    run(["-m", "echelon", "train", "digits", *SMALL, "--epochs", "1", "--workers", "2", "--run", "runs/NAME"], folder)
    after = [c for c in commands() if c[0] in ("evaluate", "report", "export") and "runs/NAME" in c]
    weights = ["train", "digits", "--dry-run", "--weights", "weights.safetensors"]
    assert len(after) >= 3
    assert run_commands([*after, ["watch", "runs/NAME", "--once"], weights], folder) == ""
    assert (folder / "weights.safetensors").exists()
