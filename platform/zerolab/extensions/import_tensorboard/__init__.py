"""Import of TensorBoard event directories: `zerolab import`."""
