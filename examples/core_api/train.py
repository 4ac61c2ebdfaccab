"""Softmax regression on handwritten digits: a plain NumPy loop with the Core API around it."""

import os
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import zerolab.core

Array = np.ndarray
DEFAULTS = {"lr": 0.5, "batch_size": 64, "batches": 400, "report_every": 10, "validate_every": 50}


def load_data() -> tuple[Array, Array, Array, Array]:
    """Return training and validation images (N, 65), the last column ones, and labels (N,)."""
    images, labels = load_digits(return_X_y=True)
    images = np.hstack([images / 16.0, np.ones((len(images), 1))])
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def loss_and_gradient(weights: Array, images: Array, labels: Array) -> tuple[float, Array]:
    """Return the mean cross-entropy, and its gradient (65, 10)."""
    logits = images @ weights
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).mean()
    chances[rows, labels] -= 1
    return float(loss), images.T @ chances / len(labels)


def batch_of(step: int, size: int, count: int, seed: int) -> Array:
    """Choose the samples of a batch, from its number alone: so a restart repeats none."""
    per_epoch = count // size
    epoch, position = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return order[position * size : (position + 1) * size]


def save(context: zerolab.core.Context, step: int, weights: Array) -> None:
    """Store a checkpoint."""
    with context.checkpoint.store_path({"steps_completed": step}) as (path, _uuid):
        np.save(path / "weights.npy", weights)


def main() -> None:
    """Train, from the latest checkpoint if there is one."""
    directory = os.environ.get("RUN_DIRECTORY")  # without a server: where to resume
    with zerolab.core.init(hparams=DEFAULTS, directory=directory) as context:
        hparams = DEFAULTS | context.train.get_hparams()
        train_x, train_y, test_x, test_y = load_data()
        weights, start = np.zeros((65, 10)), 0
        if latest := context.train.latest_checkpoint:
            start = latest.steps_completed
            with context.checkpoint.restore_path(latest.uuid) as path:
                weights = np.load(Path(path) / "weights.npy")

        for step in range(start, hparams["batches"]):
            chosen = batch_of(step, hparams["batch_size"], len(train_x), context.info.trial_seed)
            loss, gradient = loss_and_gradient(weights, train_x[chosen], train_y[chosen])
            weights -= hparams["lr"] * gradient
            done = step + 1
            if done % hparams["report_every"] == 0:
                context.train.report_training_metrics(done, {"loss": loss})
                context.train.report_progress(done / hparams["batches"])
            if done % hparams["validate_every"] == 0 or done == hparams["batches"]:
                accuracy = float(((test_x @ weights).argmax(axis=1) == test_y).mean())
                context.train.report_validation_metrics(done, {"accuracy": accuracy})
                print(f"batch {done}: loss {loss:.3f}, accuracy {accuracy:.3f}")
            if done == hparams["batches"] or context.preempt.should_preempt():
                save(context, done, weights)
                return


if __name__ == "__main__":
    main()
