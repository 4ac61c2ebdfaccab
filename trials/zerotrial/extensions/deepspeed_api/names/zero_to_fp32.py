"""``deepspeed.utils.zero_to_fp32``: whole weights out of the engine's checkpoints."""

import argparse
import sys
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zerolab.errors import ConfigError, ZerolabError
from zerotrial.engine.module.compilation import strip_compiled
from zerotrial.engine.module.ownership import is_trained_by_an_engine
from zerotrial.extensions.full_weights.export import read_weights

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
    lazy_mode: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> dict[str, Tensor]:
    """Read all weights and buffers of a checkpoint.

    Args:
        checkpoint_dir: The directory passed to ``save_checkpoint``.
        tag: None: the tag in ``latest``.
        exclude_frozen_parameters: Only False; save without them instead.
        lazy_mode: Unused; tensors are loaded in full.

    Returns:
        Tensors by module name; floating-point ones are fp32.

    Raises:
        ConfigError: For ``exclude_frozen_parameters=True``.
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    del lazy_mode
    if exclude_frozen_parameters:
        problem = "exclude_frozen_parameters: must be False here, got True; give it to "
        call = "get_fp32_state_dict_from_zero_checkpoint()"
        raise ConfigError(call, [f"{problem}save_checkpoint(), which leaves them out"])
    weights = read_weights(checkpoint_dir, tag)
    return {name: v.float() if v.is_floating_point() else v for name, v in weights.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """Fill a model from a checkpoint; see :func:`get_fp32_state_dict_from_zero_checkpoint`.

    A model trained by an engine stays on its device; every rank must then make the call.
    """
    trained = any(is_trained_by_an_engine(part) for part in model.modules())
    target = model if trained else model.cpu()
    own_names = {strip_compiled(name): name for name in target.state_dict()}
    weights = read_weights(checkpoint_dir, tag)
    target.load_state_dict(
        {own_names.get(name, name): v for name, v in weights.items()}, strict=False
    )
    return model


def convert_zero_checkpoint_to_fp32_state_dict(  # noqa: PLR0917 - DeepSpeed's order
    checkpoint_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> None:
    """Write all weights and buffers of a checkpoint into one file of a folder.

    Args:
        checkpoint_dir: See :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: Gets ``pytorch_model.bin``, or ``model.safetensors``.
        max_shard_size: Not used; there is one file.
        safe_serialization: Whether it is safetensors.
        tag: See :func:`get_fp32_state_dict_from_zero_checkpoint`.
        exclude_frozen_parameters: See there.
    """
    del max_shard_size
    weights = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters
    )
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        copies = {name: value.clone() for name, value in weights.items()}  # tied ones share memory
        save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, folder / "pytorch_model.bin")


def main() -> None:
    """Run as DeepSpeed's script of this name, which it stores in each checkpoint."""
    parser = argparse.ArgumentParser(
        description="Write the whole weights of a checkpoint into one file, in fp32."
    )
    parser.add_argument("checkpoint_dir", help="folder that was given to save_checkpoint()")
    parser.add_argument("output_dir", help="gets pytorch_model.bin, or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="not used: there is one file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint; by default the newest")
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="refused: give it to save_checkpoint()",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="not used")
    options = vars(parser.parse_args())
    del options["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except (ZerolabError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(f"the weights are in {options['output_dir']}\n")


if __name__ == "__main__":
    main()
