"""How samples are made of what data holds: its settings read once, before any data is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.config import DataConfig
from echelon.core.features import USUAL_FEATURES, FeatureChoice, read_features
from echelon.core.tokeniser import AUTO, RUN_FILE, TokeniserChoice, read_tokeniser
from echelon.data.normalise import AS_MEASURED, Normalisation, read_normalise


@dataclass(frozen=True)
class Preparation:
    """How samples are made.

    Attributes:
        tokeniser: what cuts texts.
        features: what a sound becomes.
        normalisation: of pixels.
    """

    tokeniser: TokeniserChoice
    features: FeatureChoice
    normalisation: Normalisation


USUAL = Preparation(TokeniserChoice(AUTO), USUAL_FEATURES, AS_MEASURED)


def read_preparation(config: DataConfig, folder: Path | None) -> Preparation:
    """Read the settings of a description that say how samples are made.

    Args:
        folder: of the run; one that goes on has a tokeniser there, whatever its description names.

    Raises:
        UserError: names the setting.
    """
    kept = None if folder is None else folder / RUN_FILE
    has_own = kept is not None and kept.is_file()
    tokeniser = TokeniserChoice("", file=kept) if has_own else read_tokeniser(config.tokeniser)
    return Preparation(tokeniser, read_features(config.features), read_normalise(config.normalise))
