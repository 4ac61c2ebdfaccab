"""Names of hyperparameters, and their short forms for narrow columns."""

CALLED = {
    "lr": "lr",
    "overwrite_deepspeed_args.optimizer.params.lr": "optimizer.params.lr",
    "overwrite_deepspeed_args.scheduler.params.lr": "scheduler.params.lr",
    "overwrite_deepspeed_args.optimizer.params.weight_decay": "weight_decay",
    "overwrite_deepspeed_args.optimizer.params.betas.0": "betas.0",
    "overwrite_deepspeed_args.optimizer.params.betas.1": "betas.1",
    "overwrite_deepspeed_args.zero_optimization.stage": "stage",
    "model.layers.0.width": "model.layers.0.width",  # the maximum length
    "model.encoder.layers.10.width": "layers.10.width",
    "model.encoder.layers.11.width": "layers.11.width",
    "a_name_without_dots_cannot_be_told_by_a_part": "a_name_without_dots_cannot_be_told_by_a_part",
    "stage_of_the_curriculum.0": "stage_of_the_curriculum.0",  # a number is not enough
}
