"""Which features a model is given of a sound, as `--features` says: the text read, its files not yet opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.core.own import TRANSFORMERS

AUTO, LOG_MEL, WAVEFORM = "auto", "log_mel", "waveform"


@dataclass(frozen=True)
class FeatureChoice:
    """What a sound becomes.

    Attributes:
        name: `auto`, `log_mel` or `waveform`; empty: what the files of `path` describe.
        path: a folder, or `config.json`, of a model of transformers for sounds.
        setting: how a refusal names it: `--features TEXT`, or `--model TEXT` where the model's name tells it.
    """

    name: str
    path: Path = Path()
    setting: str = ""

    @property
    def is_of_model(self) -> bool:
        """Whether the model's name tells it."""
        return self.setting.startswith("--model")


USUAL_FEATURES = FeatureChoice(AUTO)


def read_features(text: str) -> FeatureChoice:
    """Read `auto`, `log_mel`, `waveform`, or a path; `transformers/FOLDER` is what the name of a model tells."""
    if text in (AUTO, LOG_MEL, WAVEFORM):
        return FeatureChoice(text)
    of_model = _is_of_model(text)
    path = Path(text.removeprefix(TRANSFORMERS) if of_model else text).expanduser()
    return FeatureChoice("", path, f"{'--model' if of_model else '--features'} {text}")


def _is_of_model(text: str) -> bool:
    """Whether a text is a model's name: no folder named `transformers` in the current one is meant."""
    folder = text.removeprefix(TRANSFORMERS)
    return folder != text and (Path(folder).expanduser().exists() or not Path(text).exists())
