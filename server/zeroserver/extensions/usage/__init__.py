"""Usage of slots and disk by user, project, label or pool: `zerolab usage`, and its route."""
