"""What a layout cannot be combined with is refused before anything starts, in words."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn

from echelon.compression.native import library
from echelon.config import build
from echelon.core.errors import UserError
from echelon.run.resolve import resolve
from echelon.trainer.compatibility import check_strategies, interplay_notes
from echelon.trainer.layouts import check_own_chain, read_cuts, read_tensor_plan

EARS = "transformers/ears"  # whose features are its own: it is for sounds


@pytest.mark.parametrize(
    ("parallel", "ranks", "settings", "words"),
    [
        ("dp=2,tp=2", 2, {}, "4 ranks, but there are 2 workers"),
        ("dp=-1,fsdp=2", 3, {}, "do not divide 3 workers"),
        ("fsdp=2,tp=-1", 5, {}, "do not divide 5 workers"),
        ("fsdp=4", 4, {"data.batch_size": 3}, "smaller than the 4 workers that share it"),
        ("fsdp=2", 2, {"optimizer.name": "lars"}, "needs whole tensors"),
        ("tp=2", 2, {"optimizer.name": "muon"}, "needs whole tensors"),
        ("pp=2", 2, {"optimizer.name": "lamb"}, "norm over all of the model"),
        ("tp=2", 4, {"strategy.sync": "ps(mode=sync, backup=2)"}, "with 2 workers at most 1 are backups"),
        ("pp=2", 6, {"strategy.sync": "ps", "launch.nodes": "2", "launch.rendezvous": "a:1"}, "2 ranks of one machine"),
        ("pp=2", 4, {"strategy.sync": "ps", "optimizer.name": "lamb"}, "depends on other tensors"),
        ("dp=-1", 2, {"strategy.sync": "ps", "optimizer.name": "lambc"}, "depends on other tensors"),
        ("dp=-1", 2, {"optimizer.name": "kronw"}, "draw random numbers, so that replicas would part"),
        ("tp=2", 4, {"strategy.sync": "ps", "model.compile": True}, "a split model is not compiled"),
        ("fsdp=2", 2, {"model.compile": True}, "--compile"),
        ("dp=2,zero1", 2, {"strategy.sync": "local(8)"}, "--sync allreduce"),
        ("tp=2", 2, {"strategy.compression": "int8"}, "makes one of 2 workers: use --parallel dp=2,tp=2 with 4"),
        ("fsdp=-1", 2, {"strategy.sync": "local(8)"}, "dp=2,fsdp=2 with 4"),
        ("pp=2", 2, {"strategy.collective": "ring"}, "leave --collective out"),
        ("pp=2", 2, {"model.sync_batchnorm": True}, "add microbatches=1"),
        ("dp=2,tp=2,pp=2", 6, {}, "write --workers 8"),
        ("dp=2,tp=2", 8, {}, "write dp=-1 or --workers 4"),
        ("pp=2,microbatches=0", 2, {}, "N at least 1"),
        ("dp=2,zero1", 2, {"optimizer.name": "lamb"}, "norm over all of the model"),
        ("dp=2,table=2", 2, {"strategy.sync": "local(8)"}, "use --sync allreduce, or leave out table=2"),
        ("dp=2,table=2", 2, {"strategy.sync": "ps"}, "use --sync allreduce, or leave out table=2"),
        ("dp=2,table=2", 2, {"model.tune": "head"}, "--tune head does not work yet: leave out --tune"),
        ("dp=2,table=2", 2, {"training.precision": "bf16-params"}, "--precision bf16-params does not work yet"),
        ("dp=2,table=2", 2, {"launch.elastic": "on"}, "--elastic on does not go together with --parallel dp=2,table=2"),
        ("pp=2,schedule=1f2b", 2, {}, "did you mean 1f1b"),
        ("dp=2", 2, {"strategy.cuts": "blocks.1"}, "--parallel pp=N"),
        ("dp=2", 2, {"strategy.tensor_plan": "a=column"}, "--parallel tp=N"),
        ("tp=2", 2, {"strategy.tensor_plan": "column"}, "PATTERN=STYLE"),
        ("pp=2", 2, {"strategy.cuts": "a,,b"}, "names of blocks"),
        ("pp=2", 2, {"model.name": "small_unet"}, "--model small_unet is not known to be a chain of blocks: use fsdp"),
        ("pp=2", 2, {"model.name": EARS, "data.features": EARS}, "--model transformers/ears is not known to be"),
    ],
)
def test_what_cannot_be_combined_is_refused(parallel: str, ranks: int, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_strategies(resolve(build(None, {"strategy.parallel": parallel, **settings}).config), ranks)


@pytest.mark.parametrize(
    ("parallel", "settings"),
    [
        ("tp=2", {"strategy.sync": "local(8)", "strategy.compression": "int8"}),
        ("dp=2,tp=2", {"strategy.tensor_plan": "a=column,b=row"}),
        ("pp=2,schedule=zero_bubble,microbatches=4", {"strategy.cuts": "a,b,c"}),
        ("pp=4", {"optimizer.name": "lars"}),
        ("fsdp=-1", {"optimizer.name": "adamw", "training.recompute": "blocks"}),
        ("dp=4,zero1", {"optimizer.name": "lars"}),
        ("tp=2", {"strategy.sync": "ps(mode=sync, backup=1)", "strategy.compression": "int8"}),
        ("fsdp=2", {"strategy.sync": "ps(mode=async)", "optimizer.name": "lars"}),
        ("tp=2,pp=2", {"strategy.sync": "ps(mode=ssp)"}),
    ],
)
def test_what_can_be_combined_is_not(parallel: str, settings: dict[str, Any]) -> None:
    check_strategies(resolve(build(None, {"strategy.parallel": parallel, **settings}).config), 4)


def test_plans_and_cuts_are_read() -> None:
    assert read_tensor_plan("blocks.*.fc1=column, fc2 = row") == {"blocks.*.fc1": "column", "fc2": "row"}
    assert read_cuts("blocks.4, blocks.8") == ("blocks.4", "blocks.8")
    assert read_cuts("") == () and read_tensor_plan(" ") == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy.sync": "local(8, start=100)", "strategy.compression": "sign"}, "leave out start"),
        ({"strategy.collective": "hierarchical(group=8)", "strategy.compression": "int8"}, "one group of 2 replicas"),
        ({"strategy.compression": "threshold(tau=0.01)", "training.precision": "fp16"}, "use --precision bf16"),
        ({"strategy.compression": "sign(vote=true)", "training.precision": "fp16"}, "use --precision bf16"),
        ({"strategy.compression": "topk(0.01, clip=1)+huffman", "training.precision": "fp16"}, "use --precision bf16"),
    ],
)
def test_a_codec_that_would_do_harm_or_nothing_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_strategies(resolve(build(None, settings).config), 2)


@pytest.mark.parametrize(
    ("group", "settings", "refused"),
    [
        (2, {"strategy.parallel": "dp=2,fsdp=4"}, "one group of 2 replicas"),
        (2, {"strategy.parallel": "dp=4,fsdp=2"}, ""),
        (4, {"launch.nodes": "1:2"}, "--nodes 1:2: .*one group of 4 replicas"),
        (2, {"launch.nodes": "1:2"}, ""),
        (2, {"launch.nodes": "1:2", "strategy.parallel": "fsdp=4"}, "one group of 2 replicas"),
        (4, {"launch.nodes": "2"}, ""),
        (4, {"launch.nodes": "1:2", "strategy.compression": "powersgd(rank=2)"}, ""),  # on every link
    ],
)
def test_a_codec_that_works_between_groups_of_replicas_has_two_at_least(
    group: int, settings: dict[str, Any], refused: str
) -> None:
    chosen = {"strategy.collective": f"hierarchical(group={group})", "strategy.compression": "topk(0.01)"}
    run = resolve(build(None, {**chosen, "launch.rendezvous": "a:1", **settings}).config)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_strategies(run, 8)


def test_a_codecs_own_momentum_is_the_optimizers_in_a_single_worker() -> None:
    config = build(None, {"strategy.compression": "topk(0.01, momentum=0.9)", "optimizer.momentum": 0.0}).config
    alone = resolve(config).for_single_worker().config.optimizer
    assert alone.name == "sgd"
    asked = build(None, {"strategy.compression": "topk(0.01, nesterov=true)", "optimizer.name": "momentum"}).config
    both = resolve(asked).for_single_worker().config.optimizer
    assert (both.name, both.momentum, both.weight_decay) == ("sgd", 0.9, asked.optimizer.weight_decay)
    plain = build(None, {"strategy.compression": "topk(0.01, momentum=0.9, nesterov=false)", "optimizer.momentum": 0.0})
    assert resolve(plain.config).for_single_worker().config.optimizer.name == "momentum"
    assert (alone.momentum, alone.weight_decay) == (0.9, pytest.approx(config.optimizer.weight_decay / 10))


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({}, 2, []),
        ({"strategy.compression": "int8"}, 2, []),
        ({"strategy.compression": "topk(0.01)"}, 2, ["topk.0.01. encodes$"]),
        ({"strategy.compression": "topk(0.01)", "optimizer.name": "momentum"}, 3, ["encodes; Nesterov's form"]),
        ({"strategy.compression": "topk(0.01)", "strategy.sync": "ps"}, 2, ["momentum 0.9 acts in each worker"]),
        ({"strategy.compression": "topk(0.01)", "strategy.sync": "local(8)"}, 2, []),
        ({"strategy.compression": "topk(0.01)"}, 1, []),
        ({"strategy.collective": "ring"}, 2, ["--collective ring changes nothing"]),
        ({"strategy.collective": "ring"}, 3, []),
        ({"model.name": "torchvision/googlenet"}, 1, ["built without its auxiliary heads"]),
        ({"model.name": "torchvision/resnet18"}, 1, []),
        ({"strategy.collective": "ring", "strategy.parallel": "fsdp=2"}, 4, ["--collective ring changes nothing"]),
    ],
)
def test_what_one_setting_does_to_another_is_said(settings: dict[str, Any], ranks: int, words: list[str]) -> None:
    notes = interplay_notes(resolve(build(None, settings).config), ranks)
    assert len(notes) == len(words)
    assert all(re.search(word, note) for word, note in zip(words, notes, strict=True)), notes


def test_that_numpy_encodes_is_said_where_something_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_NATIVE", "off")
    library.load.cache_clear()
    try:
        for spec, ranks, is_told in (("int8", 2, True), ("int8", 1, False), ("none", 2, False)):
            settings = {"strategy.compression": spec, "training.device": "cpu"}
            notes = interplay_notes(resolve(build(None, settings).config), ranks)
            assert any("--compression int8: numpy computes" in note for note in notes) == is_told
    finally:
        library.load.cache_clear()


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ("ps(mode=async, servers=0)", "--sync.*servers must be at least 1 and at most 64"),
        ("ps(servers=two)", "--sync.*servers must be a whole number"),
        ("ps(mod=async)", "--sync.*did you mean mode"),
        ("ps(mode=asink)", "--sync.*did you mean async"),
        ("ps(mode=sync, backup=2)", "--sync.*with 2 workers at most 1"),
        ("ps(momentum_correction=true)", "no momentum on the servers"),
    ],
)
def test_a_refused_setting_of_a_server_is_named(sync: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_strategies(resolve(build(None, {"strategy.sync": sync, "optimizer.name": "adamw"}).config), 2)


@pytest.mark.parametrize(("name", "lr", "said"), [("adamw", 0.1, True), ("adamw", 0.003, False), ("sgd", 0.1, False)])
def test_a_rate_of_sgd_is_remarked_on_where_steps_have_its_size(name: str, lr: float, said: bool) -> None:
    run = resolve(build(None, {"optimizer.name": name, "optimizer.lr": lr}).config)
    assert any("--lr 0.1, which is a rate for sgd" in note for note in interplay_notes(run, 1)) is said


class Tangled(nn.Module):
    """A model that says nothing of its forward pass."""


@pytest.mark.parametrize("model", ["auto", "mlp", "small_cnn", "small_bert", "speech_cnn", "transformers/gpt2"])
def test_a_named_model_that_may_be_a_chain_is_not_refused(model: str) -> None:
    check_strategies(resolve(build(None, {"strategy.parallel": "pp=2", "model.name": model}).config), 2)


def test_a_callers_module_that_is_no_chain_is_refused_before_it_is_sent_anywhere() -> None:
    run = resolve(build(None, {"strategy.parallel": "pp=2"}).config)
    check_own_chain(run, 2, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UserError, match=r"Tangled is not known to be a chain of blocks \(.*\): make the model an"):
        check_own_chain(run, 2, Tangled())
    check_own_chain(resolve(build(None, {"strategy.parallel": "tp=2"}).config), 2, Tangled())
