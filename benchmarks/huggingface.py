"""One Trainer script on plain torch, on DeepSpeed and on Zerolab: the same numbers, and how fast.

    python -m benchmarks.huggingface [--deepspeed FOLDER] [--steps N]

Two gloo ranks, a small GPT-2, gradient accumulation, clipping, a schedule, evaluations; at stages
0 to 3 in fp32 and bf16. DeepSpeed is left out unless a folder is named that holds it:

    pip install --no-build-isolation --no-deps --target FOLDER deepspeed hjson einops ninja \\
        py-cpuinfo msgpack

It must not lie in the environment itself, where Zerolab stands in for it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = (0, 1, 2, 3)
KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss")
ENGINES = {"torch": "plain torch (DDP)", "deepspeed": "DeepSpeed", "zerolab": "Zerolab"}
Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed", type=Path, help="folder that DeepSpeed is installed in")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a case")
    parser.add_argument("--rank", nargs=2, metavar=("ENGINE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(arguments.rank[0], Path(arguments.rank[1]), arguments.steps)
        return
    wanted = [name for name in ENGINES if name != "deepspeed" or arguments.deepspeed]
    found = {name: run(name, arguments) for name in wanted}
    print(table(found))


def run(engine: str, arguments: argparse.Namespace) -> dict[str, Case]:
    """All cases of one engine, on two ranks of their own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_SKIP_CUDA_CHECK": "1",
        }
        if engine == "deepspeed":
            place = arguments.deepspeed.absolute()
            env["PYTHONPATH"] = os.pathsep.join([str(place), env.get("PYTHONPATH", "")])
            env["PATH"] = os.pathsep.join([str(place / "bin"), env["PATH"]])
            env["DS_ACCELERATOR"] = "cpu"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m"]
        command += ["benchmarks.huggingface", "--rank", engine, str(file)]
        subprocess.run([*command, "--steps", str(arguments.steps)], env=env, check=True,
                       stdout=sys.stderr)  # fmt: skip
        return dict(json.loads(file.read_text()))


def be_rank(engine: str, file: Path, steps: int) -> None:
    """One rank of all cases."""
    if engine == "zerolab":
        from zerotrial.extensions.deepspeed_api import install

        install()
    elif engine == "deepspeed":
        from zerotrial.extensions.deepspeed_api.cpu_support import patch_when_imported

        patch_when_imported()  # without a GPU the libraries would not give it ranks
    found: dict[str, Case] = {}
    for bits in (32, 16):
        for stage in STAGES if engine != "torch" else (0,):
            with tempfile.TemporaryDirectory() as folder:
                found[f"{stage} {bits}"] = train(engine, stage, bits, steps, folder)
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(found))


def train(engine: str, stage: int, bits: int, steps: int, folder: str) -> Case:
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(0, 256, (64,), generator=generator)
            return {"input_ids": ids, "labels": ids}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.begun, self.took = 0.0, list[float]()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.took.append(time.perf_counter() - self.begun)

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    set_seed(1)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 192, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))
    auto = {"enabled": "auto"}
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": auto,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    plain = engine == "torch"
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, per_device_eval_batch_size=4, max_steps=steps,
        gradient_accumulation_steps=2, learning_rate=1e-3, weight_decay=0.1, logging_steps=1,
        save_strategy="no", eval_strategy="steps", eval_steps=steps // 2, report_to=[],
        warmup_steps=2, deepspeed=None if plain else file, use_cpu=plain, bf16=bits == 16,
        disable_tqdm=True, log_level="error", logging_nan_inf_filter=False, seed=1,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(),
                      callbacks=[clock])  # fmt: skip
    trainer.train()
    rows = [{k: r[k] for k in KEPT if k in r} for r in trainer.state.log_history]
    if engine == "zerolab":
        trainer.model_wrapped.close()
    return {"rows": [row for row in rows if row], "step_s": statistics.median(clock.took[1:])}


def table(found: dict[str, dict[str, Case]]) -> str:
    """Result of each engine, and its maximum relative difference from plain torch in fp32."""
    reference = found["torch"]["0 32"]
    lines = [
        "| engine | stage | bits | first and last loss | last norm | last evaluation "
        "| loss differs by | norm | rate | evaluation | ms a step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for engine, cases in found.items():
        for name, case in cases.items():
            stage, bits = name.split()
            losses, norms, evals = (series(case, k) for k in ("loss", "grad_norm", "eval_loss"))
            apart = " | ".join(difference(case, reference, kind) for kind in KEPT)
            lines.append(
                f"| {ENGINES[engine]} | {'-' if engine == 'torch' else stage} | {bits} "
                f"| {losses[0]:.6f} {losses[-1]:.6f} | {norms[-1] if norms else float('nan'):.5f} "
                f"| {evals[-1]:.6f} | {apart} | {1000 * case['step_s']:.0f} |"
            )
    return "\n".join(lines)


def series(case: Case, kind: str) -> list[float]:
    return [row[kind] for row in case["rows"] if row.get(kind) is not None]


def difference(case: Case, reference: Case, kind: str) -> str:
    mine, other = series(case, kind), series(reference, kind)
    if len(mine) != len(other):
        return "not told"
    worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, other, strict=True))
    return f"{worst:.0e}" if worst else "0"


if __name__ == "__main__":
    main()
