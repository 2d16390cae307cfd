"""What is read of timm's and torchvision's files are the names that they register, and no name of theirs is refused."""

from __future__ import annotations

import pytest

from echelon.core.errors import UserError
from echelon.core.model_names import check_model_name, names_in_files
from echelon.models.external import library_names


def test_names_in_files_are_those_that_the_libraries_register() -> None:
    assert {name: set(known) for name, known in names_in_files().items()} == {
        name: set(known) for name, known in library_names().items()
    }


@pytest.mark.parametrize("name", [
    "auto", "small_gpt", "own:Model", "transformers/folder", "timm/resnet50", "timm/resnet50.a1_in1k",
    "timm/vit_tiny_patch16_224_in21k", "torchvision/fcn_resnet50",
])  # fmt: skip
def test_what_somebody_knows_is_not_refused(name: str) -> None:
    """Weights behind a dot and a name of before are timm's too."""
    check_model_name(name)


@pytest.mark.parametrize(("name", "words"), [
    ("smal_vit", "did you mean small_vit"), ("vit", "did you mean small_vit, timm/vit_.* or torchvision/vit_b_16"),
    ("torchvision/resnet19", "did you mean resnet18"), ("tmm/resnet18", "did you mean timm"),
    ("convnext_tny", "did you mean timm/convnext_tiny"), ("q", "known: auto, "),
])  # fmt: skip
def test_others_are_refused_with_the_nearest(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_model_name(name)
