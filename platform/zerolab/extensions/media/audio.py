"""Audio as WAV, or as the file that it comes from."""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from zerolab.errors import ConfigError
from zerolab.extensions.media.arrays import to_numpy
from zerolab.reports.media_files import MediaItem

__all__ = ["audio_items"]

_SUFFIXES = (".wav", ".mp3", ".ogg", ".flac")
_MAX_CHANNELS = 8


def audio_items(
    audio: Any, sample_rate: int | None = None, caption: str | None = None
) -> list[MediaItem]:
    """Return the item of audio.

    Raises:
        ConfigError: If it is none, or an array without a sample rate.
    """
    metadata: dict[str, object] = {} if caption is None else {"caption": str(caption)[:2000]}
    if isinstance(audio, str | Path):
        path = Path(audio)
        if path.suffix.lower() not in _SUFFIXES or not path.is_file():
            problem = f"must be a file that exists, with suffix {', '.join(_SUFFIXES)}"
            raise ConfigError("audio", [f"{path}: {problem}"])
        return [MediaItem("audio", path, path.suffix.lower(), metadata)]
    if not isinstance(sample_rate, int) or not 0 < sample_rate < 2**31:
        raise ConfigError("audio", [f"sample_rate: must be samples a second, got {sample_rate!r}"])
    try:
        samples = to_numpy(audio)
    except TypeError as error:
        raise ConfigError("audio", [str(error)]) from error
    if samples.ndim == 1:
        samples = samples[:, None]
    if samples.ndim != 2 or not samples.size or samples.shape[1] > _MAX_CHANNELS:
        problem = f"shape: must be (samples,) or (samples, channels), got {samples.shape}"
        raise ConfigError("audio", [f"{problem}; at most {_MAX_CHANNELS} channels"])
    if samples.dtype.kind == "f":
        clipped = np.clip(np.nan_to_num(samples.astype(np.float32)), -1.0, 1.0)
        samples = np.rint(clipped * 32767.0).astype("<i2")
    elif samples.dtype != np.int16:
        problem = f"must be floats from -1 to 1, or 16-bit integers, got {samples.dtype}"
        raise ConfigError("audio", [problem])
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.astype("<i2").tobytes())
    metadata |= {"sample_rate": sample_rate, "seconds": round(len(samples) / sample_rate, 3)}
    return [MediaItem("audio", buffer.getvalue(), ".wav", metadata)]
