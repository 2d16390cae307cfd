from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.models import ModelInput, build_model, load_state, load_weights, locate_weights
from echelon.models.external import build_torchvision
from echelon.models.tuning.base import blocks_of
from echelon.models.weights import head_names
from echelon.trainer.start_weights import start_from

CIFAR = ModelInput(classes=10, channels=3, image_size=32)


def model(name: str = "small_cnn", data: ModelInput = CIFAR) -> nn.Module:
    return build_model(ModelConfig(name=name), data)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("form", ["safetensors", "torch", "nested", "ddp", "compiled", "no_counters"])
def test_round_trip(tmp_path: Path, form: str) -> None:
    source, target = model("resnet20"), model("resnet20")
    state: dict[str, Tensor] = dict(source.state_dict())
    path = tmp_path / "weights.bin"  # the content tells the format, not the name
    match form:
        case "safetensors":
            save_file(state, path)
        case "nested":
            torch.save({"epoch": 3, "state_dict": state}, path)
        case "ddp":
            torch.save({f"module.{name}": tensor for name, tensor in state.items()}, path)
        case "compiled":
            torch.save({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, path)
        case "no_counters":
            torch.save({name: tensor for name, tensor in state.items() if not name.endswith("tracked")}, path)
        case _:
            torch.save(state, path)
    load_weights(target, path)
    assert same(source, target)


def test_a_model_starts_from_the_configured_file(tmp_path: Path) -> None:
    source = model("mlp")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    target = model("mlp")
    loaded = start_from(target, ModelConfig(name="mlp", weights=str(tmp_path / "w.safetensors")), None)
    assert same(source, target)
    assert loaded is not None and not loaded.new and not loaded.unexpected and not loaded.reshaped


def refusal(target: nn.Module, path: Path, head: str = "auto") -> str:
    before = [tensor.clone() for tensor in target.state_dict().values()]
    with pytest.raises(UserError) as caught:
        load_weights(target, path, head)
    after = target.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing is half loaded"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_shape_names_the_parameter_and_both_shapes(tmp_path: Path) -> None:
    save_file(model(data=ModelInput(10, 1, 32)).state_dict(), tmp_path / "w")
    words = refusal(model(), tmp_path / "w")
    assert "'features.0.weight' is 32x1x3x3 in the file and 32x3x3x3 in the model" in words
    assert "--image-size" in words


def test_another_class_count_is_named_as_the_reason(tmp_path: Path) -> None:
    source, target = model(data=ModelInput(1000, 3, 32)), model()
    save_file(source.state_dict(), tmp_path / "w")
    words = refusal(target, tmp_path / "w", head="keep")
    assert "'classifier.weight' is 1000x512 in the file and 10x512 in the model" in words
    assert "for 1000 classes, the data has 10: --head new" in words
    head = target.get_parameter("classifier.weight").clone()
    loaded = load_weights(target, tmp_path / "w")
    assert loaded.new == ("classifier.weight", "classifier.bias")
    assert "made anew: classifier.weight, classifier.bias" in str(loaded)
    assert torch.equal(target.get_parameter("classifier.weight"), head)
    assert torch.equal(target.get_parameter("features.0.weight"), source.get_parameter("features.0.weight"))


def test_another_model(tmp_path: Path) -> None:
    save_file(model("mlp").state_dict(), tmp_path / "w")
    assert "has no 'features.0.weight'" in refusal(model(), tmp_path / "w")
    extra = {**model().state_dict(), "more": torch.ones(1)}
    save_file(extra, tmp_path / "w")
    assert "has 'more', which the model has not" in refusal(model(), tmp_path / "w")


class Attack:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch unpickled",)


def test_no_code_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Attack()}, tmp_path / "zip.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Attack()))
    for name in ("zip.pt", "plain.pkl"):
        assert "cannot be read" in refusal(model(), tmp_path / name)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("content", [b"", b"hello, world", b"PK\x03\x04 torn", b"\x10\0\0\0\0\0\0\0{ torn"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    assert "cannot be read" in refusal(model(), tmp_path / "w")


@pytest.mark.parametrize("end", [1, 18, 152, 439])
def test_a_torn_file_of_an_older_torch(tmp_path: Path, end: int) -> None:
    torch.save({"a": torch.zeros(16), "b": torch.zeros(3)}, tmp_path / "w", _use_new_zipfile_serialization=False)
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:end])
    assert "cannot be read" in refusal(model(), tmp_path / "w")


def lightning(state: dict[str, Tensor], path: Path) -> Path:
    """A LightningModule's checkpoint: the network under `model.`, a metric beside it, loops and hyperparameters."""
    content = {
        "epoch": 2,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{name}": tensor for name, tensor in state.items()} | {"criterion.weight": torch.ones(3)},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"completed": 2}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "a.ckpt", "current_score": None}},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1}]}],
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(content, path / "last.ckpt")
    return path / "last.ckpt"


def deepspeed(state: dict[str, Tensor], path: Path) -> Path:
    """The folder of `engine.save_checkpoint` (ZeRO up to 2): `latest`, and bf16 weights under `module`."""
    folder = path / "global_step30"
    folder.mkdir()
    (path / "latest").write_text("global_step30")
    content = {
        "module": state,
        "buffer_names": ["features.1.running_mean"],
        "optimizer": None,
        "param_shapes": [{name: tensor.shape for name, tensor in state.items()}],
        "sparse_tensor_module_names": set(),
        "ds_config": {"train_batch_size": 32, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return path


def horovod(state: dict[str, Tensor], path: Path) -> Path:
    """What Horovod's examples save on rank 0."""
    torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}}, path / "checkpoint-3.pth.tar")
    return path / "checkpoint-3.pth.tar"


def sharded(state: dict[str, Tensor], path: Path) -> Path:
    """A folder with an index, as transformers, Accelerate and zero_to_fp32.py write it."""
    names = list(state)
    weight_map = {name: f"model-0000{1 + (names.index(name) > 3)}-of-00002.safetensors" for name in names}
    for file in set(weight_map.values()):
        save_file({name: state[name] for name in names if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("write", [lightning, deepspeed, horovod, sharded])
def test_weights_of_other_trainers(tmp_path: Path, write: Callable[[dict[str, Tensor], Path], Path]) -> None:
    source, target = model("resnet20"), model("resnet20")
    load_weights(target, write(dict(source.state_dict()), tmp_path))
    assert same(source, target)


def test_a_checkpoint_with_two_models_is_refused(tmp_path: Path) -> None:
    state = model("mlp").state_dict()
    both = {f"{prefix}{name}": tensor for prefix in ("student.", "teacher.") for name, tensor in state.items()}
    torch.save({"state_dict": both}, tmp_path / "w.ckpt")
    assert "holds 2 such models, under student. and teacher." in refusal(model("mlp"), tmp_path / "w.ckpt")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "run the zero_to_fp32.py"),
        ("mp_rank_01_model_states.pt", "tensor-parallel ranks"),
        (".metadata", "dcp_to_torch"),
    ],
)
def test_divided_checkpoints_are_refused_with_what_joins_them(tmp_path: Path, file: str, words: str) -> None:
    deepspeed(dict(model().state_dict()), tmp_path)
    (tmp_path / "global_step30" / file).touch()
    assert words in refusal(model(), tmp_path)


def test_a_class_in_a_checkpoint_is_named_and_not_made(tmp_path: Path) -> None:
    torch.save({"state_dict": model().state_dict(), "hyper_parameters": ModelInput(10, 3, 32)}, tmp_path / "w.ckpt")
    words = refusal(model(), tmp_path / "w.ckpt")
    assert "it holds an object of echelon.models.base.ModelInput beside tensors: save model.state_dict() alone" in words


@pytest.mark.parametrize("name", ["../w.safetensors", "none.safetensors"])
def test_an_index_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(model().state_dict(), tmp_path / "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "which is not beside it" in refusal(model(), folder)


def test_missing_file_folder_and_no_state_dict(tmp_path: Path) -> None:
    assert "no such file" in refusal(model(), tmp_path / "none.pt")
    assert "a folder" in refusal(model(), tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds no state dict" in refusal(model(), tmp_path / "list.pt")


def test_a_new_head_is_made_where_that_is_asked_for(tmp_path: Path) -> None:
    source, target = model(), model()
    save_file(source.state_dict(), tmp_path / "w")
    own = target.get_parameter("classifier.weight").clone()
    assert load_weights(target, tmp_path / "w", head="new").new == ("classifier.weight", "classifier.bias")
    assert torch.equal(target.get_parameter("classifier.weight"), own)
    load_weights(target, tmp_path / "w", head="keep")
    assert same(source, target)


def test_position_embeddings_of_another_grid_are_interpolated(tmp_path: Path) -> None:
    vit = "timm/test_vit"
    source, target = model(vit, ModelInput(10, 3, 32)), model(vit, ModelInput(10, 3, 64))
    save_file(source.state_dict(), tmp_path / "w")
    loaded = load_weights(target, tmp_path / "w")
    assert loaded.reshaped == ("pos_embed 1x5x64 -> 1x17x64",)
    assert torch.equal(target.get_parameter("pos_embed")[:, :1], source.get_parameter("pos_embed")[:, :1])


def test_a_base_models_file_fits_below_its_prefix_and_other_heads_are_not_used(tmp_path: Path) -> None:
    body, head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3)
    target = nn.Sequential()
    target.add_module("base", body)
    target.add_module("classifier", head)
    state = {name.removeprefix("base."): t + 1 for name, t in target.state_dict().items() if name.startswith("base.")}
    save_file({**state, "cls.weight": torch.ones(2, 2)}, tmp_path / "w")
    loaded = load_weights(target, tmp_path / "w")
    assert loaded.new == ("classifier.weight", "classifier.bias") and loaded.unexpected == ("cls.weight",)
    assert torch.equal(body[0].weight, state["0.weight"])


@pytest.mark.parametrize(
    ("weights", "name", "words"),
    [
        ("pretrained", "mlp", "mlp has none"),
        ("pretrained", "timm/resnet20_of_nobody", "no pretrained weights"),
        ("pretrained", "timm/vit_small_patch16_224", "nothing can be downloaded here"),
        ("pretrained", "torchvision/resnet18", "resnet18-f37072fd.pth is not in"),
        ("hf:nobody/nothing", "mlp", "nobody/nothing is not in"),
        ("hf:./nowhere/at/all", "mlp", "no such folder"),
    ],
)
def test_published_weights_that_are_not_here(
    weights: str, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(UserError, match="--weights") as caught:
        locate_weights(weights, name)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("Bert", "bert.pooler.dense"), ("DistilBert", "pre_classifier")],
)
def test_a_language_model_of_transformers_becomes_a_classifier(kind: str, prefix: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "Bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    }
    three, five = (getattr(transformers, f"{kind}Config")(vocab_size=20, num_labels=n, **sizes[kind]) for n in (3, 5))
    source = getattr(transformers, f"{kind}ForMaskedLM")(three)
    target, other = (getattr(transformers, f"{kind}ForSequenceClassification")(config) for config in (three, five))
    head = {f"{layer}.{leaf}" for layer in (prefix, "classifier") for leaf in ("weight", "bias")}
    assert head_names(target) == head
    loaded = load_state(target, source.state_dict(), "w")
    assert set(loaded.new) == head and loaded.unexpected
    body = {name: t for name, t in target.state_dict().items() if name not in head}
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in body.items())
    assert not [name for name in load_state(other, target.state_dict(), "w").new if "pooler" in name]


def test_older_names_are_read_as_todays() -> None:
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision")
    source, target = (torchvision.models.densenet121(num_classes=3) for _ in range(2))
    older = {re.sub(r"(layer\d+\.(?:norm|conv))([12])", r"\1.\2", name): t for name, t in source.state_dict().items()}
    assert older.keys() != source.state_dict().keys()
    load_state(target, older, "a file")
    assert same(source, target)


def test_what_published_files_hold_beside_a_model_is_not_used() -> None:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                       intermediate_size=8, max_position_embeddings=16))  # fmt: skip
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    beside = {"bert.pooler.dense.weight": torch.ones(8, 8), "cls.seq_relationship.weight": torch.ones(2, 8)}
    loaded = load_state(model, {**state, **beside}, "hub")
    assert set(loaded.unexpected) == set(beside) and not loaded.made_anew


@pytest.mark.parametrize("name", ["fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_models_of_segmentation_have_both_heads_made_anew(name: str) -> None:
    model = build_torchvision(name, ModelInput(3, 3, 64))
    before = build_torchvision(name, ModelInput(21, 3, 64)).state_dict()
    loaded = load_state(model, before, "file")
    heads = (
        {"classifier.4", "aux_classifier.4"}
        if name.startswith("fcn")
        else {"classifier.low_classifier", "classifier.high_classifier"}
    )
    assert {name.rpartition(".")[0] for name in loaded.made_anew} == heads


def test_blocks_are_found_below_a_model_that_holds_them() -> None:
    from transformers import ElectraConfig, ElectraForSequenceClassification

    config = ElectraConfig(vocab_size=20, hidden_size=8, embedding_size=8, num_hidden_layers=3, num_attention_heads=2,
                           intermediate_size=8)  # fmt: skip
    blocks = blocks_of(ElectraForSequenceClassification(config))
    assert blocks[-2:] == ["electra.encoder.layer.1", "electra.encoder.layer.2"]


def test_a_block_with_an_mlp_of_layers_in_a_row_stays_whole() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(8, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    model = nn.Sequential()
    model.embed, model.blocks, model.head = nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 2)
    assert blocks_of(model) == ["embed", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("name", "last"), [("vit_b_32", "encoder.layers.encoder_layer_11"), ("swin_t", "features.7.1")]
)
def test_blocks_of_vision_transformers_are_those_that_repeat(name: str, last: str) -> None:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    with torch.device("meta"):
        blocks = blocks_of(models.get_model(name))
    assert last in blocks and not any(".mlp" in block for block in blocks)


def test_blocks_of_branches_and_layers_in_a_list_below_another_module() -> None:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    with torch.device("meta"):
        assert "inception5b" in blocks_of(models.get_model("googlenet", aux_logits=False, init_weights=False))

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3)))

    towers = nn.Module()
    towers.text, towers.image, towers.sound, towers.head = Tower(), Tower(), Tower(), nn.Linear(8, 2)
    assert len(blocks_of(towers)) == 9

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    model = nn.Sequential()
    model.encoder, model.head = Encoder(), nn.Linear(8, 2)
    assert blocks_of(model) == [f"encoder.layers.{i}" for i in range(3)]


def test_a_tied_head_is_there_under_its_other_name() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    size = {
        "vocab_size": 16,
        "n_positions": 8,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    source, target = (transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)) for _ in range(2))
    state = {name: tensor for name, tensor in source.state_dict().items() if name != "lm_head.weight"}
    assert load_state(target, state, "a file", "keep").made_anew == []
    assert same(source, target)
    with pytest.raises(UserError, match="it has no head of its own"):
        load_state(target, state, "a file", "new")


def test_indices_that_a_model_has_not_are_passed_over() -> None:
    source, target = model(), model()
    state = {**source.state_dict(), "position_ids": torch.arange(4)}
    assert load_state(target, state, "a file").unexpected == ("position_ids",)
    with pytest.raises(UserError, match="of another model"):
        load_state(target, {**source.state_dict(), "gate": torch.ones(4)}, "a file")
