"""Inputs of blocks in host memory until backward."""

import torch

from zerotrial.extensions.activation_storage import BlockInputs, InputStorage, StoredTensor


def test_device_inputs_wait_in_host_memory() -> None:
    # A CPU's tensors are in host memory already, and are not copied.
    original = torch.ones(3, requires_grad=True)
    keep = InputStorage(ranks=None, on_host=True)
    waiting = BlockInputs([original, 5], keep)
    assert waiting.take()[0] is original
    assert waiting.take() == [original, 5]
    copy = StoredTensor(original, None, on_host=True)
    assert copy.values.device.type == "cpu"
    back = copy.restore()
    assert back.requires_grad
    assert torch.equal(back, original)
