"""The same trial without the platform; start it again to resume."""

from model_def import PatientTrial

import zerotrial

HPARAMS = {"deepspeed_config": "ds_config.json", "seconds_per_batch": 0.1}


def main() -> None:
    """Train 600 batches in all, however often this is interrupted."""
    with zerotrial.init(hparams=HPARAMS, seed=1) as context:
        trial = PatientTrial(context)
        zerotrial.Trainer(trial, context).fit(
            max_length=zerotrial.Batch(600),
            checkpoint_period=zerotrial.Batch(20),
            validation_period=zerotrial.Batch(100),
            reporting_period=zerotrial.Batch(10),
            latest_checkpoint="latest",
        )


if __name__ == "__main__":
    main()
