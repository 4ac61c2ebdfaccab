"""Tables of docs/concepts/scaling.md: memory, traffic and waiting beside published figures.

    python -m benchmarks.scaling docs/concepts/scaling.md   # write them between its markers

Nothing is measured here.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.formulas import (
    bubble,
    data_traffic,
    kept_activations,
    pipe_traffic,
    tensor_traffic,
)
from tools.key_tables import table, with_tables
from zerotrial.extensions.planner.formulas import estimate

PEAK_FLOPS = 312e12
"""Of an A100 in 16 bits, as both papers count it."""
LENGTH, WORDS = 2048, 51_200
"""Tokens of a sample and of the vocabulary, in both papers of Megatron-LM."""


@dataclass(frozen=True)
class Model:
    """A GPT of a published table, and the layout in which it was trained."""

    name: str
    heads: int
    width: int
    blocks: int
    tensor: int
    pipe: int
    gpus: int
    batch: int
    micro: int = 1
    teraflops: float = 0.0
    """Published, of one GPU; what is 0 follows from :attr:`step_s`."""
    step_s: float = 0.0
    """Published, with all blocks computed again; what is 0 follows from :attr:`teraflops`."""
    fast_step_s: float = 0.0
    """Published, with attention alone computed again."""
    utilization: float = 0.0
    """Published with that: the share of :data:`PEAK_FLOPS` that the model needs."""

    @property
    def parameters(self) -> int:
        """Narayanan et al., equation 2."""
        in_blocks = 12 * self.blocks * self.width**2 + 13 * self.blocks * self.width
        return in_blocks + (WORDS + LENGTH) * self.width

    @property
    def step_flops(self) -> float:
        """Of one step, blocks computed twice forward: Narayanan et al., equation 3."""
        length, width = LENGTH, self.width
        inside = 1 + length / (6 * width) + WORDS / (16 * self.blocks * width)
        return 96.0 * self.batch * length * self.blocks * width**2 * inside

    @property
    def model_flops(self) -> float:
        """Of one step, nothing computed twice: Korthikanti et al., equation 7."""
        length, width = LENGTH, self.width
        inside = 1 + length / (6 * width) + WORDS / (12 * self.blocks * width)
        return 72.0 * self.batch * length * self.blocks * width**2 * inside

    @property
    def replicas(self) -> int:
        return self.gpus // (self.tensor * self.pipe)

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.replicas * self.micro)

    @property
    def activation(self) -> int:
        return self.micro * LENGTH * self.width

    @property
    def share(self) -> int:
        """Parameters of one rank, embeddings divided like the rest."""
        return self.parameters // (self.tensor * self.pipe)


NARAYANAN = [
    Model("1.7 B", 24, 2304, 24, 1, 1, 32, 512, teraflops=137),
    Model("3.6 B", 32, 3072, 30, 2, 1, 64, 512, teraflops=138),
    Model("7.5 B", 32, 4096, 36, 4, 1, 128, 512, teraflops=142),
    Model("18.4 B", 48, 6144, 40, 8, 1, 256, 1024, teraflops=135),
    Model("39.1 B", 64, 8192, 48, 8, 2, 512, 1536, teraflops=138),
    Model("76.1 B", 80, 10240, 60, 8, 4, 1024, 1792, teraflops=140),
]
"""Table 1 of Narayanan et al., up to 1,024 GPUs; its micro-batches are taken as of one sample."""

KORTHIKANTI = [
    Model("22 B", 64, 6144, 48, 8, 1, 8, 4, 4, 0, 1.42, 1.10, 0.415),
    Model("175 B", 96, 12288, 96, 8, 8, 64, 64, 1, 0, 18.13, 13.75, 0.514),
    Model("530 B", 128, 20480, 105, 8, 35, 280, 280, 1, 0, 49.05, 37.83, 0.560),
    Model("1 T", 160, 25600, 128, 8, 64, 512, 512, 1, 0, 94.42, 71.49, 0.563),
]
"""Tables 3 and 5 of Korthikanti et al."""

ZERO = {
    (1, 64): (31.4, 536, 4187), (1, 1024): (30.1, 513, 4011),
    (2, 64): (16.6, 284, 2218), (2, 1024): (15.1, 257, 2013),
    (3, 64): (1.88, 32.0, 250), (3, 1024): (0.12, 2.0, 15.6),
}  # fmt: skip
"""Table 1 of Rajbhandari et al.: stage and GPUs to GB of model states, of the models below."""
ZERO_MODELS = {"7.5 B": 7.5e9, "128 B": 128e9, "1 T": 1e12}


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size < 1e11 else f"{size / 1e9:,.0f}"


def states(parameters: float, ranks: int, stage: int) -> int:
    return estimate(int(parameters), 1, ranks, stage, precision="bf16").device


def zero_rows() -> Iterator[tuple[str, ...]]:
    for (stage, ranks), published in ZERO.items():
        for (name, size), said in zip(ZERO_MODELS.items(), published, strict=True):
            found = states(size, ranks, stage) / 1e9
            yield name, str(ranks), str(stage), f"{found:,.2f}", f"{said:,g}"


def data_rows() -> Iterator[tuple[str, ...]]:
    for stage, (kept, published) in enumerate(
        [("16", "2 P"), ("4 + 12/N", "2 P"), ("2 + 14/N", "2 P"), ("16/N", "3 P")]
    ):
        counts = (data_traffic(1, stage, m, 8) for m in (1, 4, 16))
        yield str(stage), kept, *(f"{count} P" for count in counts), published


def layout_rows() -> Iterator[tuple[str, ...]]:
    for one in [KORTHIKANTI[0], *NARAYANAN]:
        m, blocks = one.micro_batches, one.blocks // one.pipe
        data = data_traffic(one.share, 1, m, one.replicas)
        ends = 2 if one.pipe == 1 else 1
        tensor = tensor_traffic(one.activation, blocks, m, one.tensor, ends=ends)
        pipe = pipe_traffic(one.activation, m, one.pipe)
        kept = activations(one, checkpointing=True, partitioned=True)
        held = states(one.share, one.replicas, 1)
        all_gpus = one.gpus * 1e12
        speed = f"{one.teraflops:g}"
        step = f"({one.step_flops / (all_gpus * one.teraflops):.1f})" if one.teraflops else ""
        if one.step_s:
            speed, step = f"({one.step_flops / (all_gpus * one.step_s):.0f})", f"{one.step_s:g}"
        yield (
            f"{one.gpus:,}", one.name, f"{one.pipe} x {one.replicas} x {one.tensor}", str(m),
            gb(held), gb(kept), gb(2 * data), gb(2 * tensor), gb(2 * pipe),
            f"{bubble(m, one.pipe):.1%}" if one.pipe > 1 else "-",
            speed, step,
        )  # fmt: skip


def activations(one: Model, **options: bool) -> int:
    """Bytes on the first pipeline stage, where scores are kept unless ``fused``."""
    fused = options.pop("fused", False)
    return kept_activations(
        one.activation,
        -(-one.blocks // one.pipe),
        in_flight=min(one.pipe, one.micro_batches),
        tensor=one.tensor,
        scores=0.0 if fused else one.heads * LENGTH / one.width,
        **options,
    )


def activation_rows() -> Iterator[tuple[str, ...]]:
    for one in KORTHIKANTI:
        both = activations(one, fused=True, sequence_parallel=True)
        yield (
            one.name, f"{one.pipe} x {one.replicas} x {one.tensor}",
            gb(activations(one)),
            gb(activations(one, sequence_parallel=True)),
            gb(activations(one, fused=True)),
            gb(both),
            gb(activations(one, checkpointing=True)),
            gb(activations(one, checkpointing=True, partitioned=True)),
            f"{activations(one) / both:.1f}",
        )  # fmt: skip


def bubble_rows() -> Iterator[tuple[str, ...]]:
    for stages in (2, 4, 8, 16, 64):
        yield str(stages), *(f"{bubble(k * stages, stages):.0%}" for k in (1, 2, 4, 8, 16))


TABLES = {
    "zero states": lambda: table(
        ("model", "GPUs", "stage", "GB, planner", "GB, published"), zero_rows()
    ),
    "data traffic": lambda: table(
        ("stage", "bytes of states", "m = 1", "m = 4", "m = 16", "published, m = 1"), data_rows()
    ),
    "layouts": lambda: table(
        ("GPUs", "model", "pipe x data x tensor", "m", "states", "activations", "data", "tensor",
         "pipe", "bubble", "TFLOP/s", "step, s"),
        layout_rows(),
    ),
    "activations": lambda: table(
        ("model", "pipe x data x tensor", "tensor", "+ tokens", "tensor, no scores",
         "+ tokens", "checkpointing", "+ partitioned", "first / fourth"),
        activation_rows(),
    ),
    "bubbles": lambda: table(("p", "m = p", "2 p", "4 p", "8 p", "16 p"), bubble_rows()),
}  # fmt: skip
"""Name of a marker in the page to its table."""


def main(arguments: Sequence[str]) -> None:
    page = Path(arguments[0])
    page.write_text(with_tables(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
