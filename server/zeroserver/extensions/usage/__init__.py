"""Usage of slots and disk by user, label or pool: `zerolab usage`, and its route."""
