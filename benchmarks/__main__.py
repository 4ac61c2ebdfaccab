"""The benchmarks, one after the other, short: ``python -m benchmarks``, about half an hour.

Each can be run alone, with ``--help`` for its options. Figures count only on an idle machine.
"""

import subprocess
import sys

SHORT = [
    ["cli"],
    ["submit", "--rounds", "5"],
    ["queue_cost", "--trials", "100"],
    ["metrics.reporting"],
    ["metrics.import_export"],
    ["controller"],
    ["server", "--quick"],
    ["scheduler"],
    ["team", "--minutes", "1", "--users", "5", "--experiments", "10", "--trial-seconds", "4"],
    ["search", "run", "--seeds", "2", "--horizon", "5", "--methods", "random", "tpe_asha"],
    ["training.checkpoint", "--gigabytes", "0.5", "--rounds", "3"],
    ["training.offload", "--size", "1m"],
    ["training.autotune", "--memory", "0", "--batch", "16", "--steps", "10"],
    ["pipeline", "--micro-batches", "8"],
    ["engine", "--sizes", "10m", "--precisions", "fp32", "--ranks", "1", "2", "4", "--rounds", "3"],
]


def main() -> int:
    """Run them in turn; a failure of one does not keep the others from running."""
    codes = []
    for name, *options in SHORT:
        print(f"\n== benchmarks.{name} {' '.join(options)}", flush=True)
        codes.append(subprocess.call([sys.executable, "-m", f"benchmarks.{name}", *options]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
