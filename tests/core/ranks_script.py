"""Core API calls of two ranks under torchrun; run by test_context.py."""

import json
import os
import signal
import sys
from pathlib import Path

import zerolab.core
from zerolab.errors import ConfigError, ZerolabError


def store(context: zerolab.core.Context, steps: int) -> str:
    rank = context.distributed.rank
    metadata = {"steps_completed": steps, "lr": 0.5}
    with context.checkpoint.store_path(metadata, shard=True) as (path, uuid):
        (path / f"rank_{rank}").write_text(f"{steps} of rank {rank}")
    return uuid


def failing_store(context: zerolab.core.Context) -> str:
    rank = context.distributed.rank
    try:
        with context.checkpoint.store_path({"steps_completed": 9}, shard=True) as (path, _):
            (path / f"rank_{rank}").touch()
            if rank == 1:
                raise RuntimeError("no memory")
    except (RuntimeError, ZerolabError) as error:
        return f"{type(error).__name__}: {error}"
    return "stored"


def chief_only(context: zerolab.core.Context) -> str:
    try:
        with context.checkpoint.store_path({"steps_completed": 9}):
            pass
    except ConfigError as error:
        return str(error)
    return "stored"


def main(directory: Path) -> None:
    with zerolab.core.init(directory=directory / "run", hparams={"lr": 0.5}) as context:
        rank = context.distributed.rank
        latest = context.train.latest_checkpoint
        start = latest.steps_completed if latest else 0
        result: dict[str, object] = {"start": start, "hparams": context.train.get_hparams()}
        if latest:
            with context.checkpoint.restore_path(latest.uuid) as path:
                result["restored"] = (path / f"rank_{rank}").read_text()
        for step in range(start + 1, start + 4):
            context.train.report_training_metrics(step, {"loss": 1 / step, "rank": rank})
            context.train.report_progress(step / 6)
        context.train.report_validation_metrics(start + 3, {"accuracy": 0.5})
        result["uuid"] = store(context, start + 3)
        result["failed"] = failing_store(context)
        if rank == 1:
            result["refused"] = chief_only(context)
        result["before"] = context.preempt.should_preempt()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while not context.preempt.should_preempt():
            pass
        result["torch"] = "torch" in sys.modules
        (directory / f"result_{rank}.json").write_text(json.dumps(result))
    context.distributed.close()  # once more does no harm


if __name__ == "__main__":
    main(Path(sys.argv[1]))
